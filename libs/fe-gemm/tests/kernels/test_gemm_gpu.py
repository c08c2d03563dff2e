"""The Hopper matrix product on a GPU: against float64, with tails, every layout, guards and few multiprocessors."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fe_gemm.planning.launches import config
from fe_gemm.planning.tiles import Launch, Problem, is_valid
from fe_runtime import testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError, load

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60, method="thread")]

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TERMS = {"bfloat16": (2.0**-18, 2.0**-28), "float16": (2.0**-18, 2.0**-28)}
"""Share of the sum of absolute values by which a sum may be off: whatever K, and for each of K products."""

HALF_SUBNORMAL = {"bfloat16": 2.0**-134, "float16": 2.0**-25}
LAUNCHES = {
    "128x256": Launch(128, 256, slots=4),
    "128x128": Launch(128, 128, slots=6),
    "256x128": Launch(256, 128, slots=4),
    "128x192": Launch(128, 192, slots=4, store_buffers=3),
    "128x64": Launch(128, 64, slots=8, store_buffers=1),
    "256x192": Launch(256, 192, slots=3),
    "128x256, two rows": Launch(128, 256, 2, 1, slots=4),
    "128x256, two columns": Launch(128, 256, 1, 2, slots=4),
    "256x128, two rows": Launch(256, 128, 2, 1, slots=4),
    "256x128, two columns": Launch(256, 128, 1, 2, slots=4),
    "128x192, two rows": Launch(128, 192, 2, 1, slots=4, store_buffers=3),
    "128x128, two by two": Launch(128, 128, 2, 2, slots=6),
    "few slots, odd band": Launch(128, 128, slots=3, band=3),
    "64x128": Launch(64, 128, slots=8),
    "64x256, two columns": Launch(64, 256, 1, 2, slots=4),
    "64x256, two rows": Launch(64, 256, 2, 1, slots=4),
    "64x128, K in two parts": Launch(64, 128, cluster_k=2, slots=5),
    "64x128, K in five parts": Launch(64, 128, cluster_k=5, slots=6),
    "128x128, K in two parts": Launch(128, 128, cluster_k=2, slots=4),
    "128x128, K in three parts": Launch(128, 128, cluster_k=3, slots=2, store_buffers=1),
    "128x64, two columns, K in two parts": Launch(128, 64, 1, 2, 2, slots=6),
    "64x128, two rows": Launch(64, 128, 2, 1, slots=8, store_buffers=1),
    "64x128, two rows, K in three parts": Launch(64, 128, 2, 1, 3, slots=5),
    "64x128, two by two, K in two parts": Launch(64, 128, 2, 2, 2, slots=6),
    "128x64, four columns, K in two parts": Launch(128, 64, 1, 4, 2, slots=6, store_buffers=1),
    "128x128, two columns, K in two parts": Launch(128, 128, 1, 2, 2, slots=4),
    "128x256, K in four parts": Launch(128, 256, cluster_k=4, slots=4, store_buffers=1),
    "128x256, two columns, K in four parts": Launch(128, 256, 1, 2, 4, slots=3, store_buffers=1),
    "128x256, K in six parts": Launch(128, 256, cluster_k=6, slots=4, store_buffers=1),
    "128x192, K in three parts": Launch(128, 192, cluster_k=3, slots=4),
    "128x192, K in two parts": Launch(128, 192, cluster_k=2, slots=4),
    "128x128, K in four parts": Launch(128, 128, cluster_k=4, slots=6),
    "256x128, K in two parts": Launch(256, 128, cluster_k=2, slots=3),
    "64x256, K in two parts": Launch(64, 256, cluster_k=2, slots=4),
    "64x256, two rows, K in four parts": Launch(64, 256, 2, 1, 4, slots=4),
}
BYTE_LAUNCHES = {
    "128x192, two rows": Launch(128, 192, 2, 1, slots=4, store_buffers=3),
    "128x128, two columns": Launch(128, 128, 1, 2, slots=6),
    "64x128": Launch(64, 128, slots=8),
    "64x128, K in two parts": Launch(64, 128, cluster_k=2, slots=5),
    "128x64, two columns, K in two parts": Launch(128, 64, 1, 2, 2, slots=6),
    "128x128, K in two parts": Launch(128, 128, cluster_k=2, slots=6),
}
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=list(LAUNCHES))


def kernel(problem: Problem, launch: Launch) -> Any:
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert is_valid(problem, launch)
    flat = config(problem, launch)
    try:
        return load(KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", "sm_90a", **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def guarded(
    name: str, dtype: str, shape: tuple[int, int, int], second_contiguous: bool, pad: int, values: Any = None
) -> testing.Guarded:
    """Matrices (first, second, batches), batches outermost, with ``pad`` values of NaN after each line."""
    first, second, _ = shape
    line = (second if second_contiguous else first) + pad
    matrix = line * (first if second_contiguous else second)
    stride = (line, 1, matrix) if second_contiguous else (1, line, matrix)
    place = {"framework": "torch", "device": "cuda", "name": name}
    return testing.guarded(shape, dtype, stride=stride, values=values, **place)


def stored(matrices: testing.Guarded) -> Any:
    """The array as kernels take it: bytes for 8-bit values."""
    array = matrices.array
    return array.view(torch.uint8) if array.element_size() == 1 else array


def multiply(
    problem: Problem,
    launch: Launch,
    shape: tuple[int, int, int, int],
    pad: int = 0,
    multiprocessors: int | None = None,
    whole: bool = False,
) -> tuple[Any, Any, Any]:
    """Run a product (M, N, K, batches) twice; return A, B and C after everything but the values has been checked."""
    m, n, k, batches = shape
    random = np.random.default_rng(sum(shape))
    a, b = (
        guarded(name, problem.dtype, (rows, k, batches), major == "k", pad, values)
        for name, rows, major in (("a", m, problem.a_major), ("b", n, problem.b_major))
        for values in [
            random.integers(-2, 3, (rows, k, batches)) if whole else random.standard_normal((rows, k, batches))
        ]
    )
    run, outputs = kernel(problem, launch), []
    for _ in range(2):
        c = guarded("c", problem.c_dtype, (m, n, batches), problem.c_major == "n", pad)
        run(*map(stored, (a, b, c)), sm_count(Device("cuda", 0)) if multiprocessors is None else multiprocessors)
        torch.cuda.synchronize()
        c.check_surroundings()
        outputs.append(c.array)
    first, again = (x.contiguous().view(torch.int16) for x in outputs)  # bits, so NaN is equal to itself
    assert torch.equal(first, again), "two runs differ"
    a.check_unchanged()
    b.check_unchanged()
    return a.array, b.array, outputs[0]


def check(problem: Problem, launch: Launch, shape: tuple[int, int, int, int], **how: Any) -> None:
    """Compare with float64.

    The tensor cores add in float32 and cut off: 2^-18 of the sum of absolute values for the few additions that each
    instruction makes, and 2^-28 of it for each of K products; then C is rounded once. Of 8-bit operands they keep about
    13 bits of sums of at most 128 products, which are then added in float32: 2^-11 of the sum of absolute values.
    """
    a, b, c = multiply(problem, launch, shape, **how)
    a, b = (x.permute(2, 0, 1).double() for x in (a, b))
    want = (a @ b.mT).permute(1, 2, 0)
    terms = (a.abs() @ b.abs().mT).permute(1, 2, 0)
    once, each = TERMS.get(problem.dtype, (2.0**-11, 0.0))
    allowed = UNIT[problem.c_dtype] * want.abs() + (once + shape[2] * each) * terms
    wrong = ~((c.double() - want).abs() <= allowed + HALF_SUBNORMAL[problem.c_dtype])  # NaN is wrong too
    where = wrong.nonzero()
    assert not len(where), (
        f"{shape} {how}: {len(where)} of {c.numel()} values are wrong, "
        f"between {where.amin(0).tolist()} and {where.amax(0).tolist()}"
    )


SMALL = [(64, 64, 64), (128, 256, 64), (128, 256, 128), (128, 256, 640), (256, 512, 512)]
TAILS = [(8, 8, 8), (1, 8, 8), (100, 72, 40), (129, 264, 72), (300, 520, 200), (1000, 1000, 1000), (257, 24, 4096)]
MANY_TILES = [(4096, 4096, 200), (3000, 5000, 136), (520, 16384, 64)]


@every_launch
@pytest.mark.parametrize("shape", SMALL + TAILS, ids=str)
def test_shapes(shape: tuple[int, int, int], launch: Launch) -> None:
    check(Problem(), launch, (*shape, 1))


@every_launch
@pytest.mark.parametrize("shape", MANY_TILES, ids=str)
def test_more_tiles_than_blocks(shape: tuple[int, int, int], launch: Launch) -> None:
    check(Problem(), launch, (*shape, 1))


@every_launch
@pytest.mark.parametrize("pad", [0, 24])
def test_batches(pad: int, launch: Launch) -> None:
    check(Problem(), launch, (200, 328, 136, 3), pad=pad)
    check(Problem(), launch, (1, 4096, 512, 5), pad=pad)


@every_launch
def test_one_cluster_computes_everything(launch: Launch) -> None:
    check(Problem(), launch, (600, 1000, 200, 2), multiprocessors=launch.cluster)


@every_launch
def test_whole_numbers_are_exact(launch: Launch) -> None:
    """Sums of small whole numbers are exact in float32, so only the rounding of C is left."""
    a, b, c = multiply(Problem(), launch, (520, 1032, 968, 2), whole=True)
    want = torch.einsum("mkl,nkl->mnl", a.double(), b.double()).to(c.dtype)
    assert torch.equal(c, want)


LAYOUTS = [Problem(a_major=a, b_major=b, c_major=c) for a, b, c in product("km", "kn", "nm")]
DTYPES = [Problem("float16", "float16"), Problem("float16", "bfloat16", "m", "n", "m"), Problem(c_dtype="float16")]


@pytest.mark.parametrize("name", ["128x256", "256x128, two rows", "256x128, two columns", "128x128, two by two"])
@pytest.mark.parametrize("problem", LAYOUTS + DTYPES, ids=lambda p: "-".join(str(p).split("'")[1::2]))
@pytest.mark.parametrize("pad", [0, 8])
def test_layouts(pad: int, problem: Problem, name: str) -> None:
    for shape in [(128, 256, 128, 1), (200, 328, 136, 3), (1000, 1000, 1000, 1), (8, 8, 8, 2)]:
        check(problem, LAUNCHES[name], shape, pad=pad)


every_byte_launch = pytest.mark.parametrize("launch", BYTE_LAUNCHES.values(), ids=list(BYTE_LAUNCHES))
BYTES = [(a, c) for a in ("float8_e4m3fn", "float8_e5m2") for c in ("bfloat16", "float16")]


@every_byte_launch
@pytest.mark.parametrize("dtypes", BYTES, ids="-".join)
def test_8_bit_operands(dtypes: tuple[str, str], launch: Launch) -> None:
    for shape in [(1, 16, 16), (100, 80, 48), (129, 264, 144), (300, 520, 208), (1000, 1008, 1008), (257, 24, 4096)]:
        check(Problem(*dtypes), launch, (*shape, 1))
    check(Problem(*dtypes), launch, (200, 336, 144, 3), pad=16)


@every_byte_launch
def test_whole_8_bit_numbers_are_exact(launch: Launch) -> None:
    a, b, c = multiply(Problem("float8_e4m3fn"), launch, (520, 1040, 976, 2), whole=True)
    want = torch.einsum("mkl,nkl->mnl", a.double(), b.double()).to(c.dtype)
    assert torch.equal(c, want)


@every_byte_launch
def test_long_sums_of_8_bit_values_of_one_sign(launch: Launch) -> None:
    """What the tensor cores alone would cut off of each addition is far more than the bound: 2^-13 of the whole sum."""
    run, k = kernel(Problem("float8_e4m3fn", "float16"), launch), 16384
    a, b = (guarded(name, "float8_e4m3fn", (64, k, 1), True, 0, np.full((64, k, 1), 0.15625)) for name in "ab")
    c = guarded("c", "float16", (64, 64, 1), True, 0)
    run(*map(stored, (a, b, c)), sm_count(Device("cuda", 0)))
    want = 0.15625**2 * k
    assert (c.array.double() - want).abs().max().item() <= (2.0**-11 + UNIT["float16"]) * want


def test_nan_stays_in_its_row_and_column() -> None:
    """Also where a tile reaches beyond the matrices, in depth too."""
    run = kernel(Problem(), LAUNCHES["128x256"])
    a = guarded("a", "bfloat16", (130, 72, 1), True, 0, np.ones((130, 72, 1)))
    b = guarded("b", "bfloat16", (264, 72, 1), True, 0, np.ones((264, 72, 1)))
    c = guarded("c", "bfloat16", (130, 264, 1), True, 0)
    a.array[129, 71], b.array[263, 0] = torch.nan, torch.nan
    run(a.array, b.array, c.array, sm_count(Device("cuda", 0)))
    want = torch.full_like(c.array, 72.0)
    want[129], want[:, 263] = torch.nan, torch.nan
    assert torch.equal(c.array.nan_to_num(-1), want.nan_to_num(-1))
