"""What the building blocks of device code decide while compiling: types, access widths, partitions of a row."""

from __future__ import annotations

import pytest

cutlass = pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_runtime.cute.memory import access_bits  # noqa: E402
from fe_runtime.cute.rows import RowPartition  # noqa: E402
from fe_runtime.cute.types import architecture_number, numeric, storage  # noqa: E402


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_90a", 90), ("sm_100f", 100), ("sm_120a", 120)])
def test_architecture_number(arch: str, number: int) -> None:
    assert architecture_number(arch) == number


def test_small_float_formats_are_stored_as_bytes() -> None:
    assert numeric("bfloat16") is cutlass.BFloat16
    assert storage("float32") is cutlass.Float32
    assert storage("float8_e4m3fn") is storage("nvfp4") is cutlass.Uint8


@pytest.mark.parametrize(
    ("dtype", "elements", "alignment", "bits"),
    [
        pytest.param("bfloat16", 8, 16, 128, id="one full access"),
        pytest.param("float32", 8, 16, 128, id="never more than 16 bytes"),
        pytest.param("bfloat16", 8, 2, 16, id="one value, where it is unaligned"),
        pytest.param("bfloat16", 4, 16, 64, id="no more than there is"),
        pytest.param("uint8", 4, 1, 8, id="bytes"),
    ],
)
def test_access_bits(dtype: str, elements: int, alignment: int, bits: int) -> None:
    assert access_bits(numeric(dtype), elements, alignment) == bits


PARTITIONS = [
    RowPartition(columns=8192, vector=8, threads=512, count=2),
    RowPartition(columns=96, vector=8, threads=16, count=1),
    RowPartition(columns=33, vector=1, threads=4, count=9),
    RowPartition(columns=100_000, vector=8, threads=1024, count=5),
    RowPartition(columns=7, vector=1, threads=1, count=2),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: f"{p.columns} columns")
def test_each_value_of_a_row_has_one_owner(partition: RowPartition) -> None:
    indices = [
        partition.index(lane, chunk, j)
        for lane in range(partition.threads)
        for chunk in range(partition.chunks)
        for j in range(partition.count)
    ]
    assert len(set(indices)) == len(indices)
    inside = [index for index in indices if index < partition.vectors]
    assert sorted(inside) == list(range(partition.columns // partition.vector))


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: f"{p.columns} columns")
def test_unconditional_accesses_stay_inside_the_row(partition: RowPartition) -> None:
    for j in range(partition.count):
        last = partition.index(partition.threads - 1, partition.chunks - 1, j)
        assert (partition.inside(last, j) is True) == (last < partition.vectors)
