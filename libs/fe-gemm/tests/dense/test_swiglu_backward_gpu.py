"""The gradients of ``gemm_swiglu`` on a GPU: exact where sums are, within propagated bounds elsewhere, every edge.

The oracle is the formula in float64, from the AB12 that the kernel gets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_gemm import gemm_swiglu_wrapper
from fe_gemm.dense.swiglu_backward import OPERATION
from fe_runtime import testing
from fe_runtime.arrays import Device, capability

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
U = {BF16: 2.0**-8, F16: 2.0**-11}
HALF_SUBNORMAL = {BF16: 0.0, F16: 2.0**-25}
NAMES = ("dc", "dab12", "a", "b", "ab12")


class Kind:
    """dtypes of (A, dC, AB12, dAB12 or None) and the majors of dC, dAB12, A, B, AB12: "n" is the second dimension."""

    def __init__(self, dtypes: tuple[Any, Any, Any, Any], majors: str) -> None:
        operand, dc, ab12, dab12 = dtypes
        self.dtypes = dict(zip(NAMES, (dc, dab12, operand, operand, ab12), strict=True))
        self.majors = dict(zip(NAMES, majors, strict=True))

    @property
    def step(self) -> int:
        """What M is a multiple of."""
        sizes = [self.dtypes[name].itemsize for name in NAMES if self.majors[name] == "m" and self.dtypes[name]]
        return 16 // min(sizes, default=16)


KINDS = {
    "bf16": Kind((BF16, BF16, BF16, None), "nnnnn"),
    "fp16, wide AB12, by columns": Kind((F16, BF16, F32, F32), "mmmmm"),
    "mixed dtypes and majors": Kind((BF16, F16, E4M3, E5M2), "nnnmm"),
    "columns of dC only": Kind((F16, F16, F16, BF16), "mnmnn"),
}
SHAPES = ((1, 64, 16, 1), (3, 128, 104, 2), (130, 192, 80, 2), (257, 448, 264, 3), (1000, 2112, 1032, 1))
"""M, N, K, L: one row, M that no tile divides, batches, and both widths of tiles."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an element of a result or of the workspace that is never written shows."""
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


def strided(x: Any, major: str) -> Any:
    """Return (rows, columns, L) with its columns ("n") or rows contiguous and the batch outermost."""
    order, back = ((2, 0, 1), (1, 2, 0)) if major == "n" else ((2, 1, 0), (2, 1, 0))
    return x.permute(order).contiguous().permute(back)


def operands(kind: Kind, shape: tuple[int, int, int, int], whole: bool = False, scale: float = 1.0) -> list[Any]:
    m, n, k, batches = shape
    m = -(-m // kind.step) * kind.step
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    shapes = {"dc": (m, n // 2), "dab12": (m, n), "a": (m, k), "b": (n, k), "ab12": (m, n)}
    found: list[Any] = []
    for name, (rows, columns) in shapes.items():
        known = {"generator": generator, "device": "cuda"}
        if whole:
            values = torch.randint(-2, 3, (rows, columns, batches), **known).float() * (2 if name == "dc" else 1)
        else:
            values = torch.randn((rows, columns, batches), **known) * (2.0 if name == "ab12" else scale)
        dtype = kind.dtypes[name]
        found.append(None if dtype is None else strided(values.to(dtype), kind.majors[name]))
    return found


def call(arrays: list[Any], alpha: float = 1.0) -> tuple[Any, Any]:
    """Run the kernel; nothing else may answer."""
    return OPERATION.outputs(arrays, {"alpha": alpha}, backend="sm90")


def expected(arrays: list[Any]) -> tuple[Any, Any]:
    """Return dX in float64 and its error before it is rounded."""
    dc, dab12, _, _, ab12 = arrays
    x = ab12.double()
    m, n, batches = x.shape
    up, gate = x.reshape(m, n // 64, 2, 32, batches).unbind(2)
    given = dc.double().reshape(up.shape)
    s, rest = torch.sigmoid(gate), torch.sigmoid(-gate)
    dup, dgate = given * gate * s, given * up * s * (1 + gate * rest)
    weight = 2.0**-18 + gate.abs() * 2.0**-20  # of two approximate functions
    size = (given * up).abs() * s * (1 + gate.abs() * rest)
    dx = torch.stack([dup, dgate], 2).reshape(x.shape)
    flushed = 2.0**-125 * (1 + gate.abs()) * given.abs()  # a subnormal sigmoid may be 0
    off = torch.stack([weight * dup.abs() + flushed, weight * size + flushed * up.abs()], 2).reshape(x.shape)
    if dab12 is not None:
        dx = dx + dab12.double()
    return dx, off + 2.0**-22 * dx.abs()


def check(arrays: list[Any], alpha: float = 1.0) -> None:
    results = call(arrays, alpha)
    _, _, a, b, _ = arrays
    dx, off = expected(arrays)
    u, least, alpha = U[a.dtype], HALF_SUBNORMAL[a.dtype], float(torch.tensor(alpha, dtype=F32))
    off = off + u * (dx.abs() + off) + least
    for got, like, sums, other in zip(results, (a, b), ("mnl,nkl->mkl", "mnl,mkl->nkl"), (b, a), strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        assert (got.stride(1) == 1) == (like.stride(1) == 1) or 1 in like.shape
        length = dx.shape[1] if like is a else dx.shape[0]
        value, size = other.double(), other.double().abs()
        exact = alpha * torch.einsum(sums, dx, value)
        through = torch.einsum(sums, off + (2.0**-18 + length * 2.0**-28) * (dx.abs() + off), size)
        allowed = abs(alpha) * through + u * exact.abs() + least
        wrong = ~((got.double() - exact).abs() <= allowed)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_values_within_their_bounds(kind: Kind) -> None:
    for shape in SHAPES:
        check(operands(kind, shape), -0.7)
    check(operands(kind, SHAPES[-1], scale=2.0**-7), 2.0**-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_whole_numbers_are_exact(kind: Kind) -> None:
    """A gate of zero has sigmoid 1/2: dup = 0, dgate = dC * up / 2, and all sums are exact in float32."""
    for shape in SHAPES:
        arrays = operands(kind, shape, whole=True)
        gates = torch.arange(arrays[4].shape[1], device="cuda") % 64 >= 32
        ab12 = arrays[4].float()
        ab12[:, gates] = 0
        arrays[4] = strided(ab12.to(arrays[4].dtype), kind.majors["ab12"])
        dx, _ = expected(arrays)
        da = torch.einsum("mnl,nkl->mkl", dx, arrays[3].double())
        db = torch.einsum("mnl,mkl->nkl", dx, arrays[2].double())
        for got, want in zip(call(arrays), (da, db), strict=True):
            assert torch.equal(got, want.to(got.dtype))


def test_what_lies_outside_the_views_never_matters() -> None:
    kind = KINDS["bf16"]
    for shape in ((3, 128, 104, 1), (130, 192, 80, 2)):
        arrays = operands(kind, shape)
        want = call(arrays)
        for number, x in enumerate(arrays):
            if x is not None:
                rows, columns, batches = x.shape
                wide = torch.full((batches, rows + 5, columns + 16), float("nan"), device="cuda", dtype=x.dtype)
                view = wide[:, :rows, 8 : 8 + columns].permute(1, 2, 0)
                view.copy_(x)
                arrays[number] = view
        assert all(torch.equal(x, y) for x, y in zip(call(arrays), want, strict=True))


def test_nan_and_infinity_stay_where_they_belong() -> None:
    arrays = operands(KINDS["bf16"], (130, 192, 80, 1))
    clean = call(arrays)
    arrays[0][7, 3] = float("nan")
    da, db = call(arrays)
    assert da[7].isnan().all()
    assert torch.equal(torch.cat([da[:7], da[8:]]), torch.cat([clean[0][:7], clean[0][8:]]))
    touched = [3, 3 + 32]
    assert db[touched].isnan().all()
    rest = [n for n in range(192) if n not in touched]
    assert torch.equal(db[rest], clean[1][rest])


def test_extreme_gates_have_finite_gradients() -> None:
    arrays = operands(KINDS["bf16"], (8, 64, 16, 1))
    arrays[4][:, 32:] = torch.tensor([-1e30, -200, -90, -20, 20, 90, 200, 1e30], device="cuda")[:, None, None].to(BF16)
    assert all(x.isfinite().all() for x in call(arrays))
    check(arrays)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_results_are_bit_identical(kind: Kind) -> None:
    arrays = operands(kind, (1000, 2112, 1032, 1))
    testing.repeat_identical(lambda: list(call(arrays)), 20)


def test_rows_never_compile() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    kind = KINDS["bf16"]
    call(operands(kind, (300, 448, 264, 1)))
    before = compiles()
    for m in (1, 2, 7, 64, 65, 128, 129, 513):
        check(operands(kind, (m, 448, 264, 1)))
    assert compiles() == before


def test_no_rows() -> None:
    arrays = operands(KINDS["bf16"], (8, 64, 16, 1))
    da, db = call([None if x is None else x if x is arrays[3] else x[:0] for x in arrays])
    assert da.shape == (0, 16, 1)
    assert not db.any()


def test_graph_and_side_stream() -> None:
    arrays = operands(KINDS["bf16"], (300, 448, 264, 2))
    replayed, eager = testing.cuda_graph_replay(lambda: call(arrays), lambda: arrays[0].mul_(2))
    for x, y in zip(replayed, eager, strict=True):
        assert x.tobytes() == y.tobytes()
    found = testing.run_on_side_stream(lambda stream: call(arrays)[0])
    assert found.tobytes() == testing.to_numpy(call(arrays)[0]).tobytes()


@pytest.mark.parametrize("through", ["c", "ab12", "c and ab12"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_autograd_end_to_end(dtype: Any, through: str) -> None:
    m, n, k, alpha = 515, 1152, 520, 0.5
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn((rows, k, 1), generator=generator, device="cuda") * 0.2 for rows in (m, n))
    a, b = (x.to(dtype).requires_grad_() for x in (a, b))
    weights = [torch.randn(shape, generator=generator, device="cuda") for shape in ((m, n // 2, 1), (m, n, 1))]

    def gradients(x: Any, c: Any, *of: Any) -> Any:
        parts = {"c": (c.double() * weights[0]).sum(), "ab12": (x.double() * weights[1]).sum()}
        return torch.autograd.grad(sum(part for name, part in parts.items() if name in through), of)

    ab12, c, *_ = gemm_swiglu_wrapper(a, b, alpha, ab12_dtype=dtype, c_dtype=dtype, backend="sm90")
    got = gradients(ab12, c, a, b)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    x = alpha * torch.einsum("mkl,nkl->mnl", *exact)
    up, gate = x.reshape(m, n // 64, 2, 32, 1).unbind(2)
    want = gradients(x, (up * torch.nn.functional.silu(gate)).reshape(m, n // 2, 1), *exact)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        # AB12, dC, dX and the result are rounded once each: errors of random sign.
        assert (mine.double() - theirs).norm() <= 2 * U[dtype] * theirs.norm()


def test_compiled_by_torch() -> None:
    a, b = operands(KINDS["bf16"], (130, 192, 80, 1))[2:4]

    def gradients(function: Any) -> Any:
        given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (a, b)]
        return torch.autograd.grad(function(*given).float().square().sum(), given)

    def gated(a: Any, b: Any) -> Any:
        return gemm_swiglu_wrapper(a, b, ab12_dtype=BF16, c_dtype=BF16)["c_tensor"]

    want = gradients(gated)
    for got, wanted in zip(gradients(torch.compile(gated, fullgraph=True)), want, strict=True):
        assert torch.equal(got, wanted)
