"""The epilogues of the Hopper matrix product on a GPU, against float64: exact for whole numbers, bounded for others.

Outputs start as poison and are watched around; between the lines of all matrices there is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fe_gemm.kernels.sm90.epilogue import Epilogue
from fe_gemm.planning.launches import config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import Launch, is_valid
from fe_runtime import formats, testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError, load

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
FP8 = STORED[3:]
UNIT = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float4_e2m1fn": 2.0**-2,
}
HALF_SUBNORMAL = {
    "float32": 2.0**-150,
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float8_e4m3fn": 2.0**-10,
    "float8_e5m2": 2.0**-17,
    "float4_e2m1fn": 0.25,
}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}

AMAX = Problem(c_dtype="float32", amax=True)
SWIGLU = Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True)
SRELU = Problem(epilogue="srelu", pre_dtype="bfloat16", alpha=True)
DSRELU = Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True)

WIDE = Launch(128, 256, slots=3)
LAUNCHES = {
    "128x256": WIDE,
    "128x256, two rows": Launch(128, 256, 2, 1, slots=3),
    "128x256, two columns": Launch(128, 256, 1, 2, slots=3),
    "256x128": Launch(256, 128, slots=3),
    "256x128, one buffer": Launch(256, 128, 1, 2, slots=3, store_buffers=1),
    "128x128, three buffers": Launch(128, 128, 2, 2, slots=3, store_buffers=3),
    "128x128, odd band": Launch(128, 128, slots=2, band=3),
}
SHAPES = [(128, 256, 64, 1), (1, 64, 8, 1), (100, 192, 40, 1), (257, 832, 200, 2), (1000, 1024, 968, 1)]
EVEN_SHAPES = [(16, 64, 8, 2), (304, 832, 200, 2)]  # M for columns that start at multiples of 16 bytes
TAILS = [(33, 48, 72, 1), (130, 272, 136, 3)]  # N for everything but swiglu


def kernel(problem: Problem, launch: Launch) -> Any:
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert is_valid(problem, launch)
    flat = config(problem, launch)
    try:
        return load(KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", "sm_90a", **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


@dataclass
class Case:
    """A problem with operands, in float64 on the host as (rows, columns, batches), and what a run made of them."""

    problem: Problem
    launch: Launch
    shape: tuple[int, int, int, int]
    whole: bool = False
    pad: int = 0
    alpha: float = 0.5
    norm: float = 0.75
    scale: float = 1.0

    def __post_init__(self) -> None:
        m, n, k, batches = self.shape
        self.random = np.random.default_rng(sum(self.shape))
        self.a = self.values((m, k, batches), self.problem.dtype)
        self.b = self.values((n, k, batches), self.problem.dtype)
        self.upstream = self.values((m, n, batches), self.problem.upstream_dtype or "float32")
        self.prob = self.random.choice([-2.0, 0.0, 0.5, 1.0], (m, 1, batches))
        self.columns = n // 2 if self.problem.epilogue == "swiglu" else n
        self.preset_amax, self.preset_dprob = -np.inf, np.zeros((m, 1, batches), np.float32)
        if self.problem.accumulates:
            self.preset_dprob += self.random.integers(-100, 100, (m, 1, batches))

    def values(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Random values that a dtype holds."""
        drawn = self.random.integers(-2, 3, shape) if self.whole else self.random.standard_normal(shape) * self.scale
        kind = getattr(torch, dtype)
        return torch.from_numpy(drawn.astype(np.float64)).to(kind).double().numpy()

    def run(self) -> dict[str, Any]:
        """Run twice and return the results by name, on the host; bytes for the narrow formats and the scales."""
        first, again = (self.once() for _ in range(2))
        for name, result in first.items():
            assert np.array_equal(bits(result), bits(again[name])), f"{name} differs from run to run"
        return first

    def once(self) -> dict[str, Any]:
        read = {"a": self.matrix("a", self.problem.dtype, self.a, self.problem.a_major == "k")}
        read["b"] = self.matrix("b", self.problem.dtype, self.b, self.problem.b_major == "k")
        written: dict[str, testing.Guarded] = {}
        arguments: list[Any] = [read["a"].array, read["b"].array]
        for name in Epilogue(self.problem, self.launch).names:
            if name == "alpha":
                arguments.append(self.alpha)
                continue
            made, is_read = self.operand(name)
            (read if is_read else written)[name] = made
            arguments.append(made.array)
        kernel(self.problem, self.launch)(*arguments, sm_count(Device("cuda", 0)))
        torch.cuda.synchronize()
        for made in read.values():
            made.check_unchanged()
        for made in written.values():
            made.check_surroundings()
        return {name: host(made.array) for name, made in written.items() if name != "partials"}

    def operand(self, name: str) -> tuple[testing.Guarded, bool]:
        """Return the array of a name, and whether the kernel only reads it."""
        m, n, _, batches = self.shape
        problem, row_major = self.problem, self.problem.c_major == "n"
        if name == "upstream":
            return self.matrix(name, problem.upstream_dtype, self.upstream, row_major), True
        if name == "prob":
            stride = (1, 1, m + 3)
            return place(name, "float32", (m, 1, batches), stride, self.prob), True
        if name == "norm_const":
            return place(name, "float32", (1,), None, np.array([self.norm])), True
        if name == "amax":
            return place(name, "float32", (1,), None, np.array([self.preset_amax])), False
        if name == "dprob":
            stride = (2 * batches, 1, 2)
            return place(name, "float32", (m, 1, batches), stride, self.preset_dprob), False
        if name == "partials":
            return place(name, "float32", (-(-n // self.launch.group_columns), batches, m), None), False
        if name == "scales":
            scales = formats.scales_per_row(self.columns, problem.scale_vector)
            size = int(np.prod(formats.scale_shape(m, scales, batches)))
            return place(name, "uint8", (size,), None), False
        sheet = {sheet.name: sheet for sheet in problem.outputs}[name]
        columns = self.columns if name == "c" else n
        dtype = sheet.dtype if sheet.bits > 8 else "uint8"
        shape = (m, columns // 2 if sheet.bits == 4 else columns, batches)
        return place(name, dtype, shape, self.stride(shape, row_major)), False

    def matrix(self, name: str, dtype: str, values: Any, second_contiguous: bool) -> testing.Guarded:
        return place(name, dtype, values.shape, self.stride(values.shape, second_contiguous), values)

    def stride(self, shape: tuple[int, ...], second_contiguous: bool) -> tuple[int, ...]:
        first, second, _ = shape
        line = (second if second_contiguous else first) + self.pad
        matrix = line * (first if second_contiguous else second)
        return (line, 1, matrix) if second_contiguous else (1, line, matrix)

    def x(self) -> tuple[Any, Any]:
        """Return X and the bound on its error before it is rounded."""
        alpha = self.alpha if self.problem.alpha else 1.0
        x, terms = alpha * product(self.a, self.b), abs(alpha) * product(abs(self.a), abs(self.b))
        return x, (2.0**-18 + self.shape[2] * 2.0**-28) * terms

    def result(self) -> tuple[Any, Any]:
        """Return the result and the bound on its error before it is rounded."""
        x, error = self.x()
        if self.problem.epilogue == "none":
            return x, error
        if self.problem.epilogue == "swiglu":
            return self.gated(x, error)
        positive = np.maximum(x, 0)
        if self.problem.epilogue == "srelu":
            result = positive**2 * self.prob
            return result, abs(self.prob) * (2 * positive * error + error**2) + 2.0**-20 * abs(result)
        result = 2 * positive * (self.upstream * self.prob)
        return result, abs(2 * self.upstream * self.prob) * error + 2.0**-20 * abs(result)

    def gated(self, x: Any, error: Any) -> tuple[Any, Any]:
        """The derivative of silu is below 1.1."""
        m, n, _, batches = self.shape
        (up, gate), (up_error, gate_error) = (
            np.moveaxis(y.reshape(m, n // 64, 2, 32, batches), 2, 0).reshape(2, m, n // 2, batches) for y in (x, error)
        )
        if self.problem.gate_first:
            up, gate, up_error, gate_error = gate, up, gate_error, up_error
        silu = gate / (1 + np.exp(-np.clip(gate, -700, None)))
        allowed = abs(silu) * up_error + 1.1 * (abs(up) + up_error) * gate_error
        return up * silu, allowed + 2.0**-20 * abs(up * silu) + 2.0**-119 * abs(up)


def product(a: Any, b: Any) -> Any:
    """Return the products of (M, K, L) and (N, K, L) matrices."""
    return np.moveaxis(np.matmul(np.moveaxis(a, 2, 0), np.moveaxis(b, 2, 0).swapaxes(1, 2)), 0, 2)


def place(name: str, dtype: str, shape: Any, stride: Any, values: Any = None) -> testing.Guarded:
    return testing.guarded(shape, dtype, stride=stride, values=values, framework="torch", device="cuda", name=name)


def host(array: Any) -> Any:
    """Return an array on the host; bfloat16 as the float32 values that it holds."""
    array = array.cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).contiguous().numpy()


def bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)


def rounded(values: Any, dtype: str) -> Any:
    """Return what a store of exact values leaves, as :meth:`Case.run` returns it."""
    values = values.astype(np.float32)
    if dtype == "bfloat16":
        return torch.from_numpy(values).bfloat16().float().numpy()
    if dtype == "float4_e2m1fn":
        codes = formats.cast(values, dtype)
        return codes[:, 0::2] | codes[:, 1::2] << 4
    found = formats.cast(values, dtype)
    return found.view(np.uint8) if dtype in LARGEST else found


def decoded(array: Any, dtype: str) -> Any:
    """Return the values of a result in float64."""
    if dtype == "float4_e2m1fn":
        codes = np.stack([array & 15, array >> 4], axis=2)  # (rows, bytes, 2, batches)
        return formats.decode(codes.reshape(array.shape[0], -1, array.shape[2]), dtype).astype(np.float64)
    return (formats.decode(array, dtype) if dtype in FP8 else array).astype(np.float64)


def compare(name: str, found: Any, dtype: str, want: Any, error: Any) -> None:
    """Compare with float64 within ``error``, the rounding added."""
    limit = LARGEST.get(dtype, np.inf)
    want = np.clip(want, -limit, limit)
    allowed = error + UNIT[dtype] * abs(want) + HALF_SUBNORMAL[dtype]
    wrong = np.argwhere(~(abs(decoded(found, dtype) - want) <= allowed))  # NaN is wrong too
    assert not len(wrong), f"{name}: {len(wrong)} of {want.size} values are wrong, the first at {wrong[0].tolist()}"


def check(case: Case) -> None:
    """Compare everything that a run gives with float64."""
    problem, found = case.problem, case.run()
    x, x_error = case.x()
    result, error = case.result()
    if problem.pre_dtype is not None:
        compare("pre", found["pre"], problem.pre_dtype, x, x_error)
    if problem.amax:
        largest = np.abs(result).max()
        assert abs(found["amax"][0] - largest) <= 2.0**-16 * largest + error[np.abs(result) == largest].max()
    if problem.epilogue == "dsrelu":
        check_sums(case, found["dprob"], x, x_error)
    if problem.scale_dtype is None:
        compare("c", found["c"], problem.c_dtype, result, error)


def check_sums(case: Case, found: Any, x: Any, error: Any) -> None:
    positive, weight = np.maximum(x, 0), abs(case.upstream)
    want = (positive**2 * case.upstream).sum(1, keepdims=True)
    terms = (positive**2 * weight).sum(1, keepdims=True)
    allowed = 2.0**-18 * terms + ((2 * positive * error + error**2) * weight).sum(1, keepdims=True)
    preset = case.preset_dprob.astype(np.float64) if case.problem.accumulates else 0.0
    allowed = allowed + 2.0**-22 * abs(preset)
    assert (abs(found - (preset + want)) <= allowed).all()


def check_exact(case: Case) -> None:
    """Compare bits: with whole numbers everything before the last rounding is exact."""
    problem, found = case.problem, case.run()
    x, _ = case.x()
    result, _ = case.result()
    if problem.pre_dtype is not None:
        assert np.array_equal(found["pre"], rounded(x, problem.pre_dtype))
    if problem.amax:
        assert found["amax"][0] == np.abs(result).max()
    if problem.scale_dtype is None:
        assert np.array_equal(found["c"], rounded(result, problem.c_dtype))
        return
    codes, scales = formats.quantize_nc(
        np.ascontiguousarray(np.moveaxis(result.astype(np.float32), 2, 0)),
        problem.c_dtype,
        case.norm,
        scale_dtype=problem.scale_dtype,
        vec=problem.scale_vector,
    )
    assert np.array_equal(found["scales"], formats.to_blocked(scales).view(np.uint8).ravel())
    assert np.array_equal(found["c"], np.moveaxis(codes.view(np.uint8), 0, 2))


def shapes(problem: Problem) -> list[tuple[int, int, int, int]]:
    """Shapes whose lines start at multiples of 16 bytes in every dtype."""
    if problem.c_major == "m":
        return EVEN_SHAPES if problem.epilogue == "swiglu" else [*EVEN_SHAPES, (48, 331, 72, 2)]
    tails = [] if problem.epilogue == "swiglu" or "float4_e2m1fn" in (problem.c_dtype, problem.pre_dtype) else TAILS
    return [*SHAPES, *tails]


EPILOGUES = {"amax": AMAX, "swiglu": replace(SWIGLU, amax=True), "srelu": SRELU, "dsrelu": replace(DSRELU, amax=True)}
every_epilogue = pytest.mark.parametrize("problem", EPILOGUES.values(), ids=list(EPILOGUES))


@every_epilogue
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=list(LAUNCHES))
def test_shapes(problem: Problem, launch: Launch) -> None:
    for shape in shapes(problem):
        check(Case(problem, launch, shape))


@every_epilogue
def test_more_tiles_than_blocks(problem: Problem) -> None:
    for launch in (WIDE, LAUNCHES["128x256, two rows"]):
        check(Case(problem, launch, (2100, 6144, 72, 1)))


PARTS = {
    "halves": Launch(128, 256, cluster_k=2, slots=3),
    "of four blocks": Launch(128, 256, cluster_k=4, slots=4, store_buffers=1),
    "halves, two columns": Launch(128, 256, 1, 2, 2, slots=3, store_buffers=1),
    "side by side": Launch(64, 256, cluster_k=2, slots=3, store_buffers=1),
}


@pytest.mark.parametrize("epilogue", [name for name in EPILOGUES if name != "dsrelu"])
@pytest.mark.parametrize("launch", PARTS.values(), ids=list(PARTS))
def test_parts_of_tiles(epilogue: str, launch: Launch) -> None:
    """Of K in parts, where each block finishes a part of the columns."""
    problem = EPILOGUES[epilogue]
    for shape in [*shapes(problem), (2100, 2048, 200, 1)]:
        check(Case(problem, launch, shape))
    check(Case(replace(problem, c_major="m"), launch, EVEN_SHAPES[1]))


@pytest.mark.parametrize("name", ["halves", "of four blocks"])
def test_quantised_parts_of_tiles(name: str) -> None:
    problem = replace(SRELU, c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", amax=True)
    for shape in [*shapes(problem), (600, 2048, 200, 1)]:
        check_exact(Case(problem, PARTS[name], shape, whole=True, norm=0.75, alpha=0.5))


@every_epilogue
def test_other_operands(problem: Problem) -> None:
    turned = replace(problem, dtype="float16", a_major="m", b_major="n")
    for shape in EVEN_SHAPES:
        check(Case(turned, WIDE, shape))


@every_epilogue
def test_padded_lines(problem: Problem) -> None:
    for major in "nm":
        for shape in EVEN_SHAPES:
            check(Case(replace(problem, c_major=major), WIDE, shape, pad=16))


@pytest.mark.parametrize("scale", [1e-5, 1e3])
@every_epilogue
def test_small_and_large_values(problem: Problem, scale: float) -> None:
    wide = {"c_dtype": "float32"} | ({} if problem.pre_dtype is None else {"pre_dtype": "float32"})
    check(Case(replace(problem, **wide), WIDE, (200, 320, 136, 1), scale=scale))  # type: ignore[arg-type]


NARROW = {(dtype, major) for dtype in (*STORED, "float4_e2m1fn") for major in "nm"} - {("float4_e2m1fn", "m")}


@pytest.mark.parametrize(("dtype", "major"), sorted(NARROW))
def test_every_result_of_amax(dtype: str, major: str) -> None:
    problem = replace(AMAX, c_dtype=dtype, c_major=major)
    for shape in shapes(problem):
        check(Case(problem, WIDE, shape))
        check_exact(Case(problem, WIDE, shape, whole=True))


@pytest.mark.parametrize("c_dtype", STORED)
@pytest.mark.parametrize("pre_dtype", STORED)
def test_every_pair_of_results(pre_dtype: str, c_dtype: str) -> None:
    """With rows and columns contiguous in turn, as a chessboard is coloured."""
    turn = (STORED.index(pre_dtype) + STORED.index(c_dtype)) % 2
    problem = replace(SRELU, pre_dtype=pre_dtype, c_dtype=c_dtype, c_major="nm"[turn])
    for shape in EVEN_SHAPES:
        check(Case(problem, WIDE, shape))
        check_exact(Case(problem, WIDE, shape, whole=True))


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize(("pre_dtype", "c_dtype"), list(zip(STORED, (*STORED[2:], *STORED[:2]), strict=True)))
def test_every_result_of_swiglu(pre_dtype: str, c_dtype: str, major: str, gate_first: bool) -> None:
    problem = replace(SWIGLU, pre_dtype=pre_dtype, c_dtype=c_dtype, c_major=major, gate_first=gate_first)
    for shape in EVEN_SHAPES:
        check(Case(problem, WIDE, shape))


@pytest.mark.parametrize("upstream", STORED[:3])
@pytest.mark.parametrize("c_dtype", STORED)
def test_every_result_of_dsrelu(c_dtype: str, upstream: str) -> None:
    turn = (STORED.index(c_dtype) + STORED.index(upstream)) % 2
    problem = replace(DSRELU, c_dtype=c_dtype, upstream_dtype=upstream, c_major="nm"[turn], amax=True)
    for shape in shapes(problem):
        check(Case(problem, replace(WIDE, slots=2), shape))
        check_exact(Case(problem, replace(WIDE, slots=2), shape, whole=True))


@pytest.mark.parametrize("c_dtype", FP8)
@pytest.mark.parametrize(
    ("scale_dtype", "vector", "major"),
    [("float8_e8m0fnu", 32, "n"), ("float8_e8m0fnu", 32, "m"), ("float8_e8m0fnu", 16, "m"), ("float8_e4m3fn", 16, "n")],
)
@pytest.mark.parametrize("problem", [SRELU, DSRELU], ids=["srelu", "dsrelu"])
def test_quantised_results_are_exact(problem: Problem, scale_dtype: str, vector: int, major: str, c_dtype: str) -> None:
    """Rows with prob = 0 are blocks of zeros; with small products the scales reach their lower end."""
    kinds = {"c_dtype": c_dtype, "scale_dtype": scale_dtype, "scale_vector": vector, "c_major": major}
    problem = replace(problem, amax=True, **kinds)  # type: ignore[arg-type]
    for shape in shapes(problem):
        for norm, alpha in ((0.75, 0.5), (1.0, 2.0**-60), (3.0, 2.0**-67)):
            check_exact(Case(problem, WIDE, shape, whole=True, norm=norm, alpha=alpha))


def test_a_quantised_gated_result() -> None:
    """With gates of 64 or -128 silu is the gate itself or zero, so that everything is exact."""
    problem = replace(SWIGLU, c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", alpha=False)
    for shape in [(100, 192, 64, 1), (257, 832, 64, 2)]:
        case = Case(problem, WIDE, shape, whole=True)
        case.a = np.ones_like(case.a)
        gates = case.b.reshape(shape[1] // 64, 2, 32, shape[2], shape[3])[:, 1]
        gates[...] = case.random.choice([-2.0, 1.0], (*gates.shape[:2], 1, shape[3]))
        x, _ = case.x()
        up, gate = np.moveaxis(x.reshape(shape[0], -1, 2, 32, shape[3]), 2, 0).reshape(2, shape[0], -1, shape[3])
        exact = up * np.where(gate > 0, gate, -0.0)
        case.result = lambda exact=exact: (exact, None)  # type: ignore[method-assign]
        check_exact(case)


@pytest.mark.parametrize("preset", [-np.inf, 0.0, 1.0, 1e30, np.nan])
def test_amax_joins_what_is_there(preset: float) -> None:
    case = Case(replace(AMAX, accumulates=True), WIDE, (200, 320, 136, 2), whole=True)
    case.preset_amax = preset
    found = case.run()["amax"][0]
    assert np.array_equal(found, np.maximum(np.float32(preset), abs(case.x()[0]).max()), equal_nan=True)


def test_amax_is_written_anew() -> None:
    case = Case(AMAX, WIDE, (200, 320, 136, 2), whole=True)
    case.preset_amax = 1e30
    assert case.run()["amax"][0] == abs(case.x()[0]).max()


@every_epilogue
def test_nan_makes_amax_nan(problem: Problem) -> None:
    """Wherever it is, also in the last row of the last column of blocks."""
    for at in ((0, 0), (99, 0), (64, 39)):
        case = Case(replace(problem, amax=True), WIDE, (100, 192, 40, 1))
        case.prob[...] = 1.0
        case.a[(*at, 0)] = np.nan
        assert np.isnan(case.run()["amax"][0])


def test_nothing_outside_the_matrix_counts() -> None:
    """Beyond its rows and columns a tile multiplies zeros, and zero times infinity is NaN."""
    case = Case(AMAX, WIDE, (100, 208, 40, 1))
    case.a[...], case.b[...] = 1.0, 1.0
    case.b[200, 3], case.a[50, 3] = np.inf, np.inf
    assert case.run()["amax"][0] == np.inf
    case = Case(replace(DSRELU, amax=True), WIDE, (100, 208, 40, 1))
    case.a[...], case.b[...], case.upstream[...], case.prob[...] = 1.0, 1.0, 1.0, 1.0
    case.a[50, 3] = -np.inf
    found = case.run()
    assert found["amax"][0] == 2 * 0.5 * 40
    assert found["dprob"][50, 0, 0] == 0
    assert found["dprob"][51, 0, 0] == 208 * 20.0**2


@pytest.mark.parametrize("launch", [WIDE, LAUNCHES["256x128"]], ids=["128x256", "256x128"])
def test_dprob_joins_what_is_there(launch: Launch) -> None:
    check(Case(replace(DSRELU, accumulates=True), launch, (300, 848, 136, 2)))


@pytest.mark.parametrize("problem", [SRELU, DSRELU], ids=["srelu", "dsrelu"])
def test_relu_keeps_nan(problem: Problem) -> None:
    case = Case(replace(problem, c_dtype="float32"), WIDE, (100, 208, 40, 1))
    case.prob[...], case.upstream[...] = 1.0, 1.0
    case.a[7, 3, 0] = np.nan
    found = case.run()
    assert np.isnan(found["c"][7]).all()
    assert np.isfinite(np.delete(found["c"], 7, axis=0)).all()


def test_the_gate_saturates() -> None:
    """A gate far below zero gives -0 times up, one far above gives itself; nothing overflows on the way."""
    problem = replace(SWIGLU, c_dtype="float32", pre_dtype="float32", alpha=False)
    case = Case(problem, WIDE, (8, 64, 8, 1))
    case.a[...], case.b[...] = 0.0, 0.0
    case.a[:, 0], case.b[:32, 0] = 1.0, 1.0  # up is 1
    gates = np.array([-3e38, -1e30, -200.0, -88.5, -20.0, 20.0, 88.5, 3e38])
    held = torch.from_numpy(gates).bfloat16().double().numpy()
    case.a[:, 1, 0], case.b[32:, 1] = held, 1.0
    found = case.run()["c"][:, 0, 0]
    want = held / (1 + np.exp(-np.clip(held, -700, None)))
    assert (abs(found - want) <= 2.0**-17 * abs(want) + 2.0**-119).all()
    assert np.signbit(found[:3]).all()
