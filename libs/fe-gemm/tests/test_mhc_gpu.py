"""``mhc_projection_backward`` on a GPU: the kernels against float64, and every edge of the contract."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from fe_gemm.mhc import MhcProjectionBackward, mhc_projection_backward, mhc_projection_backward_jax
from fe_gemm.planning.mhc import Launch, Problem, config, is_valid
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError, arch_for, load

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

NAME = "mhc_projection_backward"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, workspaces too, hold NaN: an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def backend() -> str:
    return f"sm{capability(Device('cuda', 0))[0]}0"


def operands(m: int, n: int, columns: int, padding: int = 0, seed: int = 0) -> tuple[Any, ...]:
    """Random operands; the columns of grad_proj that are ignored hold NaN."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=g)

    grad_proj = torch.cat([normal(m, n), torch.full((m, padding), float("nan"), device="cuda")], dim=1)
    r = 0.5 + normal(m, 1).abs()
    return normal(m, columns).bfloat16(), normal(n, columns), grad_proj, normal(m, 1) * columns**0.5, r


def oracle(x: Any, weight: Any, grad_proj: Any, grad_r: Any, r: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The results in float64, and the sums of absolute values: of dx's two parts, and of dweight."""
    v, w, p = x.double(), weight.double(), grad_proj[:, : len(weight)].double()
    term = grad_r.double() / (r.double() * x.shape[1]) * v
    return term + p @ w, p.T @ v, term.abs(), p.abs() @ w.abs(), p.T.abs() @ v.abs()


def check(result: Any, arrays: tuple[Any, ...]) -> None:
    """Compare with float64.

    dx: both factors of a product are rounded to TF32 (2^-11 each), four roundings make its first term, the tensor cores
    add in float32 and cut off, and the sum is rounded to bf16 (2^-8). dweight: two bf16 terms leave 2^-15 of a
    coefficient, and M / 16 sums are cut off.
    """
    dx, dweight = result
    m, (n, columns) = arrays[0].shape[0], arrays[1].shape
    assert (tuple(dx.shape), dx.dtype, tuple(dweight.shape)) == ((m, columns), torch.bfloat16, (n, columns))
    assert dweight.dtype == torch.float32
    want_dx, want_dweight, term, products, sums = oracle(*arrays)
    allowed = 2.0**-8 * want_dx.abs() + 2.0**-20 * term + (2.0**-10 + 2.0**-16) * products
    worse = (dx.double() - want_dx).abs() - allowed * (1 + 2.0**-7)
    assert not (~(worse <= 0)).any(), f"dx is off at {(~(worse <= 0)).nonzero()[:3].tolist()} and elsewhere"
    allowed = (2.0**-15 + 2.0**-18 + m * 2.0**-27) * sums
    worse = (dweight.double() - want_dweight).abs() - allowed
    assert not (~(worse <= 0)).any(), f"dweight is off at {(~(worse <= 0)).nonzero()[:3].tolist()} and elsewhere"
    if m * columns >= 4096:  # enough values for norms to mean something
        assert (dx.double() - want_dx).norm() <= 2.5e-3 * want_dx.norm()
        assert (dweight.double() - want_dweight).norm() <= 1e-4 * want_dweight.norm()


def run(arrays: tuple[Any, ...], **options: Any) -> Any:
    return mhc_projection_backward(*arrays, allow_tf32=True, **{"backend": backend(), **options})


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 24, 31, 32, 33, 40, 48, 63, 64])
def test_every_kind_of_coefficients(n: int) -> None:
    for m, columns, padding in ((1, 8, 0), (33, 264, 3), (200, 520, 8)):
        arrays = operands(m, n, columns, padding, seed=n)
        check(run(arrays), arrays)


@pytest.mark.parametrize("columns", [8, 16, 56, 64, 72, 248, 256, 264, 1000, 4096])
def test_tails_of_columns(columns: int) -> None:
    for n in (24, 40):
        arrays = operands(70, n, columns)
        check(run(arrays), arrays)


def test_tails_of_rows() -> None:
    for m in (*range(1, 35), 47, 63, 64, 65, 95, 127, 479, 480, 481, 511, 1000, 1023, 2049):
        arrays = operands(m, 24, 256, padding=8, seed=m)
        check(run(arrays), arrays)


WORKLOADS = [(4096, 24, 20480, 8), (8192, 24, 28672, 8), (4096, 24, 16384, 8), (1000, 8, 4096, 0)]


@pytest.mark.parametrize("shape", WORKLOADS, ids=str)
def test_the_named_workloads(shape: tuple[int, ...]) -> None:
    arrays = operands(*shape)
    result = run(arrays)
    dx, dweight, *_ = oracle(*arrays)
    for got, want, bound in zip(result, (dx, dweight), (3e-3, 1e-4), strict=True):
        off = got.double() - want
        assert off.norm() <= bound * want.norm()
        assert off.abs().max() <= 0.01 * want.abs().max()


def test_a_hundred_row_counts_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    run(operands(3, 5, 736))
    before = compiles()
    for m in range(4, 104):
        run(operands(m, 5, 736, padding=m % 3))
    assert compiles() == before


LAUNCHES = [
    Launch(8, 4, 4, 32, 2, 3),
    Launch(8, 4, 4, 64, 2, 7, overlap=True),
    Launch(8, 2, 3, 32, 4, 1),
    Launch(8, 4, 5, 64, 1, 32, overlap=True),
    Launch(8, 8, 2, 16, 1, 2),
    Launch(8, 1, 6, 16, 4, 5),
    Launch(4, 4, 4, 32, 2, 4, overlap=True),
    Launch(4, 2, 3, 64, 2, 9),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_kind_of_launch(launch: Launch) -> None:
    arch = arch_for(capability(Device("cuda", 0)))
    problem = Problem(24, 1032)
    if launch.overlap and arch == "sm_80":
        pytest.skip("kernels cannot start early on this GPU")
    assert is_valid(problem, launch, arch)
    flat = config(problem, launch)
    try:
        kernel = load(KernelSpec.of(f"fe_gemm.{NAME}", f"fe_gemm.kernels.{NAME}:build", arch, **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")
    for m in (1, 100, 1500):
        x, weight, grad_proj, grad_r, r = arrays = operands(m, 24, 1032, padding=8)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        partials = torch.empty(launch.splits, 24 * 1032, device="cuda")
        kernel(x, weight, grad_proj, grad_r.view(-1), r.view(-1), dx, dweight, partials)
        check((dx, dweight), arrays)


def test_whole_numbers_are_exact() -> None:
    """Small whole numbers are exact in TF32, in bf16 and in sums of float32; the coefficients need both bf16 terms."""
    g = torch.Generator("cuda").manual_seed(1)

    def whole(*shape: int, most: int) -> Any:
        return torch.randint(-most, most + 1, shape, device="cuda", generator=g).float()

    x, weight, r = whole(700, 512, most=3).bfloat16(), whole(24, 512, most=2), torch.full((700, 1), 2.0, device="cuda")
    grad_proj, grad_r = whole(700, 24, most=500), 1024 * whole(700, 1, most=4)
    dx, dweight = run((x, weight, grad_proj, grad_r, r))
    want_dx, want_dweight, *_ = oracle(x, weight, grad_proj, grad_r, r)
    assert torch.equal(dx, want_dx.to(torch.bfloat16))
    assert torch.equal(dweight.double(), want_dweight)


def test_nan_and_infinity_stay_where_they_belong() -> None:
    x, weight, grad_proj, grad_r, r = operands(100, 24, 512, padding=8)
    clean_dx, clean_dweight = run((x, weight, grad_proj, grad_r, r))
    for value in (float("nan"), float("inf")):
        bad = grad_proj.clone()
        bad[37, 5] = value
        dx, dweight = run((x, weight, bad, grad_r, r))
        assert not dx[37].isfinite().any()
        assert not dweight[5].isfinite().any()
        others, rows = [j for j in range(24) if j != 5], [i for i in range(100) if i != 37]
        assert torch.equal(dx[rows], clean_dx[rows])
        assert torch.equal(dweight[others], clean_dweight[others])
        bad = x.clone()
        bad[99, 200] = value
        dx, dweight = run((bad, weight, grad_proj, grad_r, r))
        assert not dx[99, 200].isfinite()
        assert not dweight[:, 200].isfinite().any()
        columns = [k for k in range(512) if k != 200]
        assert torch.equal(dx[:, columns], clean_dx[:, columns])
        assert torch.equal(dweight[:, columns], clean_dweight[:, columns])


def test_infinity_is_no_nan() -> None:
    """The second term of an infinite coefficient is zero."""
    arrays = operands(16, 8, 64)
    arrays[0].fill_(2.0)
    arrays[2][3, 1] = float("inf")
    dx, dweight = run(arrays)
    assert (dweight[1] == float("inf")).all()
    assert (dx[3].isinf()).all()


def test_no_rows() -> None:
    dx, dweight = run(operands(0, 24, 512))
    assert tuple(dx.shape) == (0, 512)
    assert (dweight == 0).all()


def test_nothing_outside_the_operands_is_touched() -> None:
    """All operands lie among NaN, and what surrounds outputs and workspace does not change."""
    for m, n, columns in ((1, 1, 8), (37, 24, 264), (300, 40, 1000)):
        arrays = operands(m, n, columns, padding=1)
        kinds = ("bfloat16", "float32", "float32", "float32", "float32")
        place = {"framework": "torch", "device": "cuda"}
        inputs = [
            testing.guarded(a.shape, kind, values=a.float().cpu().numpy(), name=str(at), **place)  # type: ignore[arg-type]
            for at, (a, kind) in enumerate(zip(arrays, kinds, strict=True))
        ]
        outs = [
            testing.guarded((m, columns), "bfloat16", name="dx", **place),  # type: ignore[arg-type]
            testing.guarded((n, columns), "float32", name="dweight", **place),  # type: ignore[arg-type]
        ]
        given = [x.array for x in (*inputs, *outs)]
        op = MhcProjectionBackward(*given, allow_tf32=True, backend=backend()).compile()
        size = op.scratch_workspace_bytes()
        workspace = testing.guarded((size,), "uint8", name="workspace", **place)  # type: ignore[arg-type]
        op.execute(*given, workspace.array)
        torch.cuda.synchronize()
        check([x.array for x in outs], tuple(given[:5]))
        for x in (*outs, workspace):
            x.check_surroundings()
        for x in inputs:
            x.check_unchanged()


def test_results_are_bit_identical() -> None:
    for m, n, columns in ((4096, 24, 5120), (333, 40, 1000)):
        arrays = operands(m, n, columns)
        testing.repeat_identical(lambda arrays=arrays: run(arrays))


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    """The last rows lie beyond 2^31 elements; compare dx at both ends, and dweight of rows that are mostly zero."""
    columns, m = 8192, 2**18 + 40
    x = torch.zeros(m, columns, dtype=torch.bfloat16, device="cuda")
    _, weight, grad_proj, grad_r, r = operands(m, 24, columns)
    ends = torch.cat([torch.arange(40), torch.arange(m - 40, m)]).cuda()
    x[ends] = torch.randn(80, columns, device="cuda").bfloat16()
    dx, dweight = run((x, weight, grad_proj, grad_r, r))
    check((dx[ends], dweight), (x[ends], weight, grad_proj[ends], grad_r[ends], r[ends]))


# --- streams, graphs, class, frameworks ----------------------------------------------------------------------------


def test_current_and_explicit_streams_are_followed() -> None:
    x, *others = operands(2048, 24, 2048)
    want = [a.clone() for a in run((x, *others))]
    late = torch.full_like(x, float("nan"))
    for current in (True, False):
        got = testing.run_on_side_stream(
            lambda stream, given=not current: run((late, *others), current_stream=stream if given else None),
            produce=lambda: late.copy_(x),
            current=current,
        )
        for a, b in zip(got.values(), want, strict=True):
            assert a.tobytes() == testing.to_numpy(b).tobytes()


def made(arrays: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    dx, dweight = torch.empty_like(arrays[0]), torch.empty_like(arrays[1])
    op = MhcProjectionBackward(*arrays, dx, dweight, allow_tf32=True, backend=backend()).compile()
    workspace = torch.empty(op.scratch_workspace_bytes(), dtype=torch.uint8, device="cuda")
    return op, dx, dweight, workspace


def test_class_takes_any_rows_and_allocates_nothing() -> None:
    arrays = operands(300, 24, 1024)
    op, dx, dweight, workspace = made(arrays)
    for m in (300, 1, 1000):
        arrays = operands(m, 24, 1024)
        dx = torch.empty_like(arrays[0])
        op.execute(*arrays, dx, dweight, workspace)
        check((dx, dweight), arrays)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        op.execute(*arrays, dx, dweight, workspace)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        want = run(arrays)
        assert torch.equal(dx, want["dx"])
        assert torch.equal(dweight, want["dweight"])


def test_class_with_an_explicit_stream_and_in_a_graph() -> None:
    arrays = operands(500, 24, 1024)
    op, dx, dweight, workspace = made(arrays)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    op.execute(*arrays, dx, dweight, workspace, current_stream=stream)
    op.execute(*arrays, dx, dweight, workspace, stream.cuda_stream)
    torch.cuda.synchronize()
    check((dx, dweight), arrays)
    replayed, eager = testing.cuda_graph_replay(
        lambda: tuple(a.clone() for a in op.execute(*arrays, dx, dweight, workspace).values()),
        lambda: arrays[0].copy_(operands(500, 24, 1024, seed=9)[0]),
    )
    for a, b in zip(replayed, eager, strict=True):
        assert a.tobytes() == b.tobytes()


def test_class_without_rows() -> None:
    op, _, dweight, workspace = made(operands(32, 24, 512))
    arrays = operands(0, 24, 512)
    op.execute(*arrays, torch.empty_like(arrays[0]), dweight, workspace)
    assert (dweight == 0).all()


def test_class_refuses_what_does_not_do() -> None:
    arrays = operands(32, 24, 512)
    op, dx, dweight, workspace = made(arrays)
    with pytest.raises(ValueError, match="workspace must be a contiguous uint8 vector"):
        op.execute(*arrays, dx, dweight, workspace[:-1])
    longer = torch.empty(len(workspace) + 16, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="workspace must start at a multiple of 16 bytes"):
        op.execute(*arrays, dx, dweight, longer[8:])
    with pytest.raises(ValueError, match="workspace must"):
        op.execute(*arrays, dx, dweight, workspace.cpu())
    with pytest.raises(ValueError, match="not share memory with"):
        op.execute(*arrays[:4], arrays[3], dx, dweight, workspace)
    off = torch.empty(32 * 512 + 4, dtype=torch.bfloat16, device="cuda")[4:].view(32, 512)
    with pytest.raises(ValueError, match=r"x must .*16"):
        op.execute(off, *arrays[1:], dx, dweight, workspace)
    with pytest.raises(ValueError, match=r"dx must .*16"):
        op.execute(*arrays, off, dweight, workspace)
    with pytest.raises(ValueError, match=r"x must .*16"):
        run((off, *arrays[1:]))


def test_a_thread_without_a_context_works() -> None:
    arrays = operands(100, 24, 512)
    op, dx, dweight, workspace = made(arrays)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: op.execute(*arrays, dx, dweight, workspace))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    check((dx, dweight), arrays)


def test_reference_on_the_gpu() -> None:
    arrays = operands(100, 24, 512, padding=8)
    check(run(arrays, backend="reference"), arrays)


def test_torch_compile() -> None:
    arrays = operands(64, 24, 256)

    @torch.compile(fullgraph=True)
    def model(x: Any, *others: Any) -> Any:
        dx, dweight = mhc_projection_backward(x * 1, *others, allow_tf32=True)
        return dx + 0, dweight + 0

    for given in (arrays, operands(100, 24, 256)):
        for got, want in zip(model(*given), run(given), strict=True):
            assert torch.equal(got, want)


def test_jax_calls_the_same_kernel() -> None:
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    arrays = operands(300, 24, 1024, padding=8)
    want = [a.float().cpu().numpy() for a in run(arrays)]
    given = [jnp.asarray(a.float().cpu().numpy()) for a in arrays]
    given[0] = given[0].astype(jnp.bfloat16)

    def call(*arrays: Any) -> Any:
        return mhc_projection_backward_jax(*arrays, allow_tf32=True)

    wrapper = tuple(mhc_projection_backward(*given, allow_tf32=True))
    for result in (call(*given), jax.jit(call)(*given), wrapper):
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected)


def test_class_on_jax_arrays() -> None:
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    arrays = operands(40, 24, 512)
    given = [jnp.asarray(a.float().cpu().numpy()) for a in arrays]
    given[0] = given[0].astype(jnp.bfloat16)
    dx, dweight = jnp.zeros_like(given[0]), jnp.zeros_like(given[1])
    op = MhcProjectionBackward(*given, dx, dweight, allow_tf32=True).compile()
    op.execute(*given, dx, dweight, jnp.zeros(op.scratch_workspace_bytes(), jnp.uint8))
    for got, want in zip((dx, dweight), run(arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.float().cpu().numpy())
