"""Grouped products on a Hopper GPU, against a loop over the groups in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from grouped_calls import (
    FLOAT,
    UNIT,
    Call,
    activation,
    chosen,
    compare,
    interleaved,
    kernel,
    make,
    plan,
    run,
    separated,
    sum_share,
    workspaces,
)

from fe_gemm.planning.grouped import Grouped, GroupedProblem
from fe_gemm.planning.tiles import Launch

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

LAUNCHES = {
    "128x256, two rows": Launch(128, 256, cluster_m=2, slots=4),
    "128x256": Launch(128, 256, slots=4),
    "128x128, two columns": Launch(128, 128, cluster_n=2, slots=6, band=3),
    "256x128": Launch(256, 128, slots=4),
    "64x256": Launch(64, 256, slots=4, store_buffers=1),
    "64x128": Launch(64, 128, slots=8, store_buffers=1),
    "64x128, two rows": Launch(64, 128, cluster_m=2, slots=6),
}
SIZES = {
    "uneven": [162, 0, 2577, 446, 0, 83],
    "one group": [1000],
    "one row each": [1] * 40,
    "all empty": [0] * 40,
    "first empty": [0, 0, 300, 1],
    "middle empty": [5, 0, 0, 0, 5],
    "last empty": [300, 256, 0],
    "99 % in one": [3, 0, 1, 9900, 40, 0, 56],
    "multiples of a tile": [256, 0, 512, 128, 256],
    "33 groups, all in the last": [0] * 32 + [513],
}
MANY = {"256 groups": [(7 * e) % 90 for e in range(256)], "1024 groups": [e % 3 for e in range(1024)]}
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=list(LAUNCHES))


def check(call: Call, how: Grouped) -> dict[str, Any]:
    """Run a kernel twice; compare both with each other and with float64; return the results."""
    before = {name: guard.array.clone() for name, guard in call.results.items()}
    run(call, how)
    first = {name: guard.array.clone() for name, guard in call.results.items()}
    for name, guard in call.results.items():
        guard.array.copy_(before[name])
    run(call, how)
    for name, guard in call.results.items():
        assert torch.equal(*(x.view(torch.uint8) for x in (first[name], guard.array))), f"{name}: two runs differ"
    checks = {"unfused": check_unfused, "glu": check_glu, "dglu": lambda call: check_gradient(call, before)}
    checks[call.problem.epilogue](call)
    return first


def check_unfused(call: Call) -> None:
    """Compare results with a loop over the groups; every operation on the sum is in float32."""
    problem, share = call.problem, sum_share(call.k)
    a, alpha, prob = (call.value(name) for name in ("a", "alpha", "prob"))
    for e, start, end in call.ranges():
        rows, weight, factor = a[start:end], call.weight(e), prob[start:end, None]
        c, error = alpha[e] * (rows @ weight.T), (share + FLOAT) * alpha[e].abs() * (rows.abs() @ weight.abs().T)
        if problem.bias_dtype is None:
            d, d_error = c * factor, error * factor.abs() + FLOAT * (c * factor).abs()
        else:
            bias = call.value("bias")[e] * factor
            error = error + FLOAT * (c.abs() + 2 * bias.abs())
            c = c + bias
            d, d_error = c, error
        for name, want, allowed in (("c", d, d_error), ("pre", c, error)):
            if name in call.results:
                dtype = problem.c_dtype if name == "c" else problem.pre_dtype
                compare(f"{name} of group {e}", call.results[name].array[start:end], want, allowed, dtype)


def check_glu(call: Call) -> None:
    """Compare results with a loop over the groups. An error of the sums counts as far as it changes the activation."""
    problem, share = call.problem, sum_share(call.k)
    a, alpha = (call.value(name) for name in ("a", "alpha"))
    for e, start, end in call.ranges():
        rows, weight = a[start:end], call.weight(e)
        h, error = alpha[e] * (rows @ weight.T), (share + FLOAT) * alpha[e].abs() * (rows.abs() @ weight.abs().T)
        if problem.bias_dtype is not None:
            bias = call.value("bias")[e]
            error = error + FLOAT * (h.abs() + bias.abs())
            h = h + bias
        factor = call.value("prob")[start:end, None] if problem.weighted else 1.0
        (gate, up), (gate_error, up_error) = separated(h), separated(error)
        x, allowed = activation(problem.activation, gate, up), torch.zeros_like(gate)
        for one, other in product((-1, 0, 1), (-1, 0, 1)):
            moved = activation(problem.activation, gate + one * gate_error, up + other * up_error)
            allowed = torch.maximum(allowed, (moved - x).abs())
        flushed = 2.0**-125 * gate.abs() * (up.abs() + 2)  # a subnormal sigmoid may be 0
        allowed = (1.25 * allowed + (2.0**-18 + gate.abs() * 2.0**-22) * x.abs() + flushed) * abs(factor)
        compare(f"c of group {e}", call.results["c"].array[start:end], x * factor, allowed, problem.c_dtype)
        if "pre" in call.results:
            compare(f"pre of group {e}", call.results["pre"].array[start:end], h, error, problem.pre_dtype)


def check_gradient(call: Call, before: dict[str, Any]) -> None:
    """Compare results with a loop over the groups; slopes in float64 by differentiation.

    Beside the error of the sums, 2^-18 of the largest terms that a slope is made of counts.
    """
    problem, share = call.problem, sum_share(call.k)
    a, alpha, saved = (call.value(name) for name in ("a", "alpha", "upstream"))
    for e, start, end in call.ranges():
        rows, weight, factor = a[start:end], call.weight(e), alpha[e] ** 2
        r, error = factor * (rows @ weight.T), (share + 2 * FLOAT) * factor * (rows.abs() @ weight.abs().T)
        if problem.rounds:
            error = error + UNIT["bfloat16"] * (r.abs() + error)
        beta = call.value("beta")[e] if problem.beta else 1.0
        gate, up = (x.contiguous().requires_grad_() for x in separated(saved[start:end] * beta))
        act = activation(problem.activation, gate, up)
        slopes = torch.autograd.grad(act.sum(), (gate, up))
        act, gate, up = (x.detach() for x in (act, gate, up))
        inexact = 2.0**-18 * 4 * (1 + gate.abs()) * (1 + up.abs())
        prob = call.value("prob")[start:end, None] if problem.weighted else torch.ones_like(r[:, :1])
        x = interleaved(*(r * prob * slope for slope in slopes))
        allowed = interleaved(*((prob * (error * slope)).abs() + (r * prob).abs() * inexact for slope in slopes))
        compare(f"c of group {e}", call.results["c"].array[start:end], x, allowed, problem.c_dtype)
        if problem.keeps:
            got = call.results["act"].array[start:end]
            compare(f"act of group {e}", got, act * prob, inexact * prob.abs(), "bfloat16")
        if problem.dprob is not None:
            there = before["dprob"][start:end].double() if problem.dprob == "added" else 0.0
            terms = (error * act).abs() + r.abs() * inexact + 2.0**-20 * (r * act).abs()
            got = call.results["dprob"].array[start:end]
            compare(f"dprob of group {e}", got, there + (r * act).sum(1), terms.sum(1) + FLOAT * abs(there), "float32")
        if problem.dbias is not None:
            there = before["dbias"][e].double() if problem.dbias == "added" else torch.zeros_like(x[0])
            want, wrong = there + x.sum(0), (allowed + 2.0**-20 * x.abs()).sum(0)
            wrong = wrong + UNIT["bfloat16"] * x.sum(0).abs() * (problem.dbias == "added")
            compare(f"dbias of group {e}", call.results["dbias"].array[e], want, wrong, "bfloat16")
    if problem.dbias is not None:
        for e in (e for e, size in enumerate(call.sizes) if size == 0):
            want = before["dbias"][e] if problem.dbias == "added" else torch.zeros_like(before["dbias"][e])
            assert torch.equal(call.results["dbias"].array[e], want), f"dbias of the empty group {e}"


@every_launch
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_sizes(sizes: list[int], launch: Launch) -> None:
    how = plan(GroupedProblem(), launch)
    check(make(GroupedProblem(), sizes, 264, 136), how)
    check(make(GroupedProblem(), sizes, 512, 64, tail=int(sum(sizes) == 0)), how)


@pytest.mark.parametrize("sizes", MANY.values(), ids=list(MANY))
def test_many_groups(sizes: list[int]) -> None:
    for name in ("128x256, two rows", "64x128"):
        check(make(GroupedProblem(), sizes, 136, 72), plan(GroupedProblem(), LAUNCHES[name]))


@every_launch
def test_small_whole_numbers_are_exact(launch: Launch) -> None:
    call = make(GroupedProblem(c_dtype="float32"), SIZES["uneven"], 520, 968, whole=True)
    run(call, plan(call.problem, launch))
    a, alpha, prob = (call.value(name) for name in ("a", "alpha", "prob"))
    for e, start, end in call.ranges():
        want = alpha[e] * (a[start:end] @ call.weight(e).T) * prob[start:end, None]
        assert torch.equal(call.results["c"].array[start:end].double(), want)


def test_one_cluster_computes_everything() -> None:
    for launch in LAUNCHES.values():
        how = plan(GroupedProblem(), launch, multiprocessors=launch.cluster)
        check(make(GroupedProblem(), SIZES["uneven"], 392, 72), how)


@pytest.mark.parametrize("n", [8, 64, 72, 1000, 4096])
@pytest.mark.parametrize("k", [8, 64, 1000, 4096])
def test_extents(n: int, k: int) -> None:
    problem = GroupedProblem(pre_dtype="bfloat16")
    sizes = [17, 0, 130, 1, 260]
    check(make(problem, sizes, n, k), plan(problem, chosen(problem, n, k, len(sizes))))


DTYPES = [
    (c, pre, bias)
    for c, pre, bias in product(
        ("bfloat16", "float16", "float32"),
        (None, "bfloat16", "float16", "float32"),
        (None, "bfloat16", "float16", "float32"),
    )
    if (c, pre, bias).count("bfloat16") < 2 or pre is None
]


@pytest.mark.parametrize(("c_dtype", "pre_dtype", "bias_dtype"), DTYPES)
def test_dtypes(c_dtype: str, pre_dtype: str | None, bias_dtype: str | None) -> None:
    problem = GroupedProblem(c_dtype=c_dtype, pre_dtype=pre_dtype, bias_dtype=bias_dtype)
    check(make(problem, [162, 0, 300, 46, 0, 83], 328, 200), plan(problem, LAUNCHES["128x256, two rows"]))


@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("discrete", [False, True])
def test_weights(discrete: bool, b_major: str, bytes_: bool) -> None:
    """With addresses, some are there twice, and none in the order of the groups."""
    if bytes_ and not discrete:
        return
    problem = GroupedProblem(discrete=discrete, b_major=b_major, bias_dtype="float16")
    for name in ("128x256, two rows", "128x128, two columns", "64x256"):
        check(make(problem, SIZES["uneven"], 392, 200), plan(problem, LAUNCHES[name], bytes_))
    check(make(problem, MANY["1024 groups"], 72, 72), plan(problem, LAUNCHES["64x128"], bytes_))


@pytest.mark.parametrize("rows", [8, 100, 1000])
def test_launches_by_the_average_number_of_rows(rows: int) -> None:
    problem = GroupedProblem(discrete=True, pre_dtype="float16")
    sizes = [rows // 2, 0, 3 * rows, rows // 2, rows]
    call, launches = make(problem, sizes, 1024, 520), chosen(problem, 1024, 520, len(sizes))
    assert len(launches.few) == 2
    check(call, plan(problem, launches))


MALFORMED = {
    "decreasing": [100, 50, 300, 200, 400],
    "negative": [-5, 10, -1, 20, 30],
    "beyond the rows": [100, 5000, 200, 10**9, 2**31 - 1],
    "lowest": [-(2**31)] * 5,
}


@pytest.mark.parametrize("offsets", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_offsets_stay_within_the_arrays(offsets: list[int]) -> None:
    """Entries count as the nearest ones that do not decrease and lie within the rows."""
    for name in ("128x256, two rows", "64x128"):
        ends, last, rows = [], 0, 450
        for entry in offsets:
            last = min(max(entry, last), rows)
            ends.append(last)
        call = make(GroupedProblem(), np.diff([0, *ends]).tolist(), 264, 136, tail=rows - last)
        call.offsets = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        check(call, plan(GroupedProblem(), LAUNCHES[name]))


GATED_LAUNCHES = {name: launch for name, launch in LAUNCHES.items() if launch.group_columns >= 128}
"""Each warp group has whole cells of the result, which is half as wide."""


@pytest.mark.parametrize("launch", GATED_LAUNCHES.values(), ids=list(GATED_LAUNCHES))
@pytest.mark.parametrize("name", ["swiglu", "geglu", "situglu"])
def test_gated_activations(name: str, launch: Launch) -> None:
    problem = GroupedProblem(epilogue="glu", activation=name, pre_dtype="bfloat16", bias_dtype="bfloat16")
    how = plan(problem, launch)
    for sizes in (SIZES["uneven"], SIZES["one row each"], SIZES["99 % in one"]):
        check(make(problem, sizes, 448, 136), how)


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("pre_dtype", [None, "float16", "float32"])
def test_dtypes_of_gated_activations(pre_dtype: str | None, bias_dtype: str | None, c_dtype: str) -> None:
    for weighted in (True, False):
        problem = GroupedProblem(
            c_dtype=c_dtype,
            pre_dtype=pre_dtype,
            bias_dtype=bias_dtype,
            epilogue="glu",
            activation="swiglu",
            weighted=weighted,
            discrete=not weighted,
        )
        launches = chosen(problem, 576, 200, 6)
        check(make(problem, [162, 0, 300, 46, 0, 83], 576, 200), plan(problem, launches))


def test_nan_stays_in_its_row_of_a_gated_activation() -> None:
    """Clamps pass NaN on, of the gate and of what it gates."""
    for name in ("swiglu", "geglu", "situglu"):
        problem = GroupedProblem(epilogue="glu", activation=name)
        call = make(problem, [100, 50], 128, 72)
        call.given["a"].array[33] = torch.nan
        kernel(plan(problem, LAUNCHES["128x256"]))(*call.arguments(plan(problem, LAUNCHES["128x256"])))
        found = call.results["c"].array[:150].isnan()
        assert bool(found[33].all())
        assert int(found.sum()) == 64


def gradient(name: str, **how: Any) -> GroupedProblem:
    given: dict[str, Any] = {"upstream_dtype": "bfloat16", "dprob": "added", "dbias": "added", "beta": True, **how}
    return GroupedProblem(epilogue="dglu", activation=name, **given)


GRADIENT_LAUNCHES = {
    "128x256, two rows": Launch(128, 256, cluster_m=2, slots=3),
    "128x128, two columns": Launch(128, 128, cluster_n=2, slots=4, band=3),
    "256x128": Launch(256, 128, slots=3),
    "64x256": Launch(64, 256, slots=3, store_buffers=1),
}


@pytest.mark.parametrize("sizes", [*SIZES.values(), MANY["256 groups"]], ids=[*SIZES, "256 groups"])
@pytest.mark.parametrize("launch", GRADIENT_LAUNCHES.values(), ids=list(GRADIENT_LAUNCHES))
def test_gradients_of_gated_activations(launch: Launch, sizes: list[int]) -> None:
    problem = gradient("swiglu")
    check(make(problem, sizes, 288, 136), plan(problem, launch))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("rounds", [False, True])
def test_gradients_of_every_activation(rounds: bool, name: str) -> None:
    for more in (
        {"weighted": False, "beta": False},
        {"discrete": True, "b_major": "n"},
        {"dprob": None, "keeps": True},
    ):
        problem = gradient(name, rounds=rounds, **more)
        for rows in (10, 900):
            sizes = [rows // 2, 0, 3 * rows, rows // 2, rows]
            check(make(problem, sizes, 320, 200), plan(problem, chosen(problem, 320, 200, len(sizes))))


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("upstream_dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_of_gradients(upstream_dtype: str, c_dtype: str) -> None:
    problem = gradient("swiglu", c_dtype=c_dtype, upstream_dtype=upstream_dtype, dprob="new", dbias="new")
    check(make(problem, [162, 0, 300, 46, 0, 83], 544, 200), plan(problem, chosen(problem, 544, 200, 6)))


def test_a_graph_replays_with_other_offsets_addresses_and_factors() -> None:
    problem = GroupedProblem(discrete=True)
    sizes = [100, 0, 300, 112]
    call = make(problem, sizes, 392, 200, tail=0)
    how = plan(problem, chosen(problem, 392, 200, len(sizes)))
    launch, arguments = kernel(how), dict(zip(how.arguments, call.arguments(how), strict=True))
    launch(*arguments.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*arguments.values())
    for turn, sizes in enumerate(([100, 0, 300, 112], [0, 512, 0, 0], [1, 2, 3, 506], [200, 100, 50, 0])):
        other = make(problem, sizes, 392, 200, tail=512 - sum(sizes), seed=turn + 1)
        for name in ("a", "b", "alpha", "prob"):
            call.given[name].array.copy_(other.given[name].array)
        call.sizes, call.order = sizes, other.order
        arguments["offsets"].copy_(other.offsets)
        arguments["addresses"].copy_(call.arguments(how)[how.arguments.index("addresses")])
        call.results["c"].array.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        check_unfused(call)
        assert bool(call.results["c"].array[sum(sizes) :].isnan().all())


def test_rows_of_the_next_group_stay_clean() -> None:
    """NaN in one group's rows, weights, factor and bias, whose tiles reach into the next one, stay there."""
    problem = GroupedProblem(bias_dtype="float32")
    call = make(problem, [10, 200, 3, 0, 77], 264, 136)
    for name in ("b", "alpha", "bias"):
        call.given[name].array[1] = torch.nan
    for name in ("a", "prob"):
        call.given[name].array[10:210] = torch.nan
    for launch in LAUNCHES.values():
        kernel(plan(problem, launch))(*call.arguments(plan(problem, launch)))
        got = call.results["c"].array
        assert bool(got[10:210].isnan().all())
        assert not bool(got[:10].isnan().any() | got[210:290].isnan().any())


def test_more_values_than_32_bits_count() -> None:
    """E N K and M N beyond 2^31: some rows of the last group are compared."""
    problem = GroupedProblem(b_major="n")
    groups, n, k, rows = 36, 8192, 8192, 270_000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    b = torch.empty((groups, k, n), dtype=torch.bfloat16, device="cuda").normal_().transpose(1, 2)
    a = torch.empty((rows, k), dtype=torch.bfloat16, device="cuda").normal_()
    c = torch.empty((rows, n), dtype=torch.bfloat16, device="cuda")
    sizes = [10] * (groups - 2) + [rows - 10 * (groups - 2) - 300, 300]
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    alpha, prob = (torch.ones(count, device="cuda") for count in (groups, rows))
    how = plan(problem, chosen(problem, n, k, groups))
    arrays = {"a": a, "b": b, "c": c, "offsets": offsets, "alpha": alpha, "prob": prob}
    arrays |= workspaces(how, groups, rows, n)
    kernel(how)(*(arrays[name] for name in how.arguments))
    for at, group in ((5, 0), (rows - 301, groups - 2), (rows - 1, groups - 1)):
        row, weight = a[at].double(), b[group].double()
        allowed = sum_share(k) * (weight.abs() @ row.abs())
        compare(f"row {at}", c[at], weight @ row, allowed, "bfloat16")
