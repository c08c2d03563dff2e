"""The kernels compile for every architecture and layout without spilling registers, and no operation is fused."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fe_runtime
from fe_rope import launch, launch_vision
from fe_rope.launch_vision import COLUMNS, ROWS, SCATTERED
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
MODES = ("fp4/32/ue8m0", "fp8/32/ue8m0", "fp4/16/e4m3")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for

Built = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def rows(heads: int, columns: int, mode: str | None = None, **other: Any) -> launch.Problem:
    """Contiguous rows, as aligned as their length allows."""
    size = 2 * columns
    alignment = min(16, size & -size)
    known = {"x_alignment": alignment, "out_alignment": alignment, **other}
    return launch.Problem(heads, columns, mode=mode, **known)


def built(problem: Any, arch: str, chosen: Any = None) -> Built:
    """Return module and configuration of the kernel for a problem."""
    if isinstance(problem, launch_vision.Problem):
        how = chosen or launch_vision.choose(problem, arch)
        return "vision_rope_backward", launch_vision.config(problem, how)
    how = chosen or launch.choose(problem, arch)
    if problem.mode is None:
        return "tail_rope", launch.config(problem, how)
    return "rope_qdq", {**launch.config(problem, how), "position_dtype": "int64"}


def check(problem: Any, arch: str, chosen: Any = None) -> None:
    module, config = built(problem, arch, chosen)
    spec = KernelSpec.of(f"fe_rope.{module}", f"fe_rope.kernels.{module}:build", arch, **config)
    usage = resource_usage(spec)
    (symbol,) = usage
    assert symbol.startswith(f"fe_rope_{module}")
    assert usage[symbol].frame_bytes == 0, f"{problem} on {arch} spills {usage[symbol].frame_bytes} bytes"
    resident = config["launch_threads"] * config["launch_blocks_per_sm"]
    assert usage[symbol].registers * resident <= REGISTERS


TAIL = {
    "part of a token": rows(64, 512),
    "tokens": rows(1, 512, rank=2),
    "short odd rows": rows(3, 66),
    "strided heads": rows(4, 128, packed=False),
    "unaligned": rows(64, 512, x_alignment=2, out_alignment=2, table_alignment=4),
    "long rows": rows(2, 20000),
}
QDQ = {
    **{mode: rows(1, 512, mode, rank=2) for mode in MODES},
    "heads": rows(32, 128, MODES[0]),
    "odd heads": rows(5, 96, MODES[0], packed=False),
    "unaligned": rows(4, 128, MODES[2], x_alignment=2, out_alignment=2),
}
VISION = {
    "native": launch_vision.Problem(16, 64),
    "stored": launch_vision.Problem(16, 64, stored=True, table_rank=2),
    "rows": launch_vision.Problem(16, 64, k=ROWS, k_alignment=16, packed=False),
    "columns": launch_vision.Problem(3, 72, COLUMNS, COLUMNS, COLUMNS, packed=False),
    "scattered": launch_vision.Problem(3, 6, SCATTERED, SCATTERED, SCATTERED, packed=False, out_alignment=4),
    "unaligned": launch_vision.Problem(1, 64, q_alignment=2, v_alignment=2, out_alignment=2, table_alignment=4),
}
SAMPLE = {
    f"{name}: {kind}": problem
    for name, problems in (("tail", TAIL), ("qdq", QDQ), ("vision", VISION))
    for kind, problem in problems.items()
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Any) -> None:
    check(problem, "sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_90a"])
@pytest.mark.parametrize("problem", [TAIL["part of a token"], QDQ["fp8/32/ue8m0"], VISION["native"]], ids=str)
def test_sample_of_architectures(problem: Any, arch: str) -> None:
    check(problem, arch)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        # 8 pairs of the tail: two products and two fused sums each
        (TAIL["part of a token"], {"mul.rn.f32": 16, "fma.rn.f32": 16}),
        # Q and K, 8 pairs each: four products, a sum and a difference, all on their own
        (VISION["native"], {"mul.rn.f32": 64, "add.rn.f32": 16, "sub.rn.f32": 16}),
        # the rotation; a scale for each of 2 groups; two products and the rounding of each of 16 values
        (QDQ["heads"], {"mul.rn.f32": 16 + 2 + 32, "fma.rn.f32": 16, "add.rn.f32": 16, "sub.rn.f32": 16}),
    ],
    ids=["tail", "vision", "qdq"],
)
def test_no_operation_is_fused_or_flushes(problem: Any, wanted: dict[str, int], tmp_path: Path) -> None:
    """In the PTX each float operation names its rounding, but for products with powers of two, which are exact."""
    arithmetic = Counter(
        re.findall(r"\b(?:add|sub|mul|fma|mad|div)(?:\.\w+)*\.(?:f32|f64|bf16)\b", ptx(problem, tmp_path))
    )
    exact = arithmetic.pop("mul.f32", 0)
    assert arithmetic == wanted
    assert exact == (16 if problem in QDQ.values() else 0)


def ptx(problem: Any, folder: Path) -> str:
    cute = pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)").cute
    module, config = built(problem, "sm_90a")
    launcher, arguments = importlib.import_module(f"fe_rope.kernels.{module}").build("sm_90a", **config)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    text: str = cute.compile(launcher, *arguments, options=options).__ptx__
    return text


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [64, 66, 96, 128, 192, 512, 576, 2052, 20000])
@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_every_kind_of_row(heads: int, columns: int, arch: str) -> None:
    for packed in (True, False):
        check(rows(heads, columns, packed=packed), arch)
        if columns % 32 == 0:
            for mode in MODES if heads == 1 else MODES[:1]:
                check(rows(heads, columns, mode, packed=packed), arch)


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_alignment(alignment: int, arch: str) -> None:
    for problem in (rows(64, 512), rows(1, 512, rank=2), rows(32, 128, MODES[0]), rows(1, 512, MODES[1])):
        check(replace(problem, x_alignment=alignment), arch)
        check(replace(problem, out_alignment=alignment), arch)
        check(replace(problem, table_alignment=max(4, alignment)), arch)
    for name in ("q_alignment", "v_alignment", "out_alignment"):
        check(replace(VISION["native"], **{name: alignment}), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("channels", [2, 6, 24, 64, 72, 128, 256, 1024])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_every_layout_of_gradients(heads: int, channels: int, arch: str) -> None:
    for k in (ROWS, COLUMNS, SCATTERED):
        check(launch_vision.Problem(heads, channels, k=k, packed=False), arch)
    check(launch_vision.Problem(heads, channels), arch)
    check(launch_vision.Problem(heads, channels, COLUMNS, ROWS, SCATTERED, packed=False), arch)


@pytest.mark.compile
@pytest.mark.parametrize("problem", [rows(64, 512), rows(32, 128, MODES[0]), rows(1, 512, MODES[1], rank=2)], ids=str)
def test_every_candidate_compiles(problem: Any) -> None:
    for chosen in launch.candidates(problem, "sm_90a"):
        module, config = built(problem, "sm_90a", chosen)
        assert resource_usage(KernelSpec.of(f"fe_rope.{module}", f"fe_rope.kernels.{module}:build", "sm_90a", **config))


@pytest.mark.compile
def test_every_vision_candidate_compiles() -> None:
    for chosen in launch_vision.candidates(VISION["native"], "sm_90a"):
        module, config = built(VISION["native"], "sm_90a", chosen)
        assert resource_usage(KernelSpec.of(f"fe_rope.{module}", f"fe_rope.kernels.{module}:build", "sm_90a", **config))
