"""``gemm_srelu`` and ``gemm_dsrelu`` on a GPU: exact where sums are, within their bounds elsewhere, every edge.

Few kernels, many shapes: M never selects a kernel, N only up to 128 and (forward) from thousands on, K (forward) from
1024 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gpu_gemm import (
    BACKEND,
    DEVICE,
    EVEN_ROWS,
    FAR,
    ROWS_OF_ALL_KINDS,
    as_bytes,
    assert_same,
    assert_same_in_jax,
    bits,
    compiles,
    far_copy,
    guarded_rows,
    host,
    jax_arrays,
    on_gpu,
    placed,
    product,
    scales,
    shapes,
    sides,
    there,
)
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    LARGEST,
    STORED,
    Operand,
    assert_quantised,
    assert_within,
    cast,
    storing_error,
    value_of,
)

from fe_gemm import (
    GemmDsrelu,
    GemmSrelu,
    gemm_dsrelu_jax,
    gemm_dsrelu_wrapper,
    gemm_srelu_jax,
    gemm_srelu_wrapper,
)
from fe_runtime import testing
from fe_runtime.arrays import Device, capability

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

COLUMNS = (144, 336, 208)
"""N: no multiples of a tile, nor of 64."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


@dataclass(frozen=True)
class Kind:
    """What selects a kernel: forward or backward, format of the operands, dtypes of C (stored forward, read backward)
    and D, majors of the operands and of C and D."""

    forward: bool
    name: str = "mxfp8_e4m3"
    c: str = "bfloat16"
    d: str = "bfloat16"
    majors: str = "kk"
    major: str = "n"

    def __str__(self) -> str:
        return "-".join(("srelu" if self.forward else "dsrelu", self.name, self.c, self.d, self.majors, self.major))

    @property
    def rows(self) -> tuple[int, ...]:
        """M that the majors allow."""
        return EVEN_ROWS if self.majors[0] == "m" or self.major == "m" else ROWS_OF_ALL_KINDS

    @property
    def options(self) -> dict[str, Any]:
        found = {"c_dtype": self.c} if self.forward else {}
        return found | {"d_dtype": self.d, "sf_vec_size": FORMATS[self.name][2]}

    @property
    def wrapper_options(self) -> dict[str, Any]:
        return {**self.options, "c_major" if self.forward else "d_major": self.major}


class Case:
    """Operands of one problem, and its results in float64 with what is allowed to them."""

    def __init__(
        self,
        kind: Kind,
        shape: tuple[int, int, int, int],
        size: float = 1.0,
        alpha: float = 1.0,
        whole: bool = False,
        seed: int = 0,
    ) -> None:
        m, n, _, batch = shape
        self.a, self.b, rest = sides(kind.name, shape, size, whole, seed)
        rng = np.random.default_rng([9, seed, *shape])
        self.kind, self.alpha = kind, alpha * rest
        prob = np.exp2(rng.integers(-3, 1, (m, 1, batch))) if whole else rng.standard_normal((m, 1, batch))
        upstream = rng.integers(-4, 5, (m, n, batch)) if whole else rng.standard_normal((m, n, batch))
        self.prob, self.upstream = prob.astype(np.float32), upstream.astype(STORED[kind.c])

    def given(self, pad: int = 0, outside: float = np.nan, seed: int = 0, form: str = "logical") -> dict[str, Any]:
        """Return the inputs on the GPU by name, with other numbers around them; ``seed``: of padding of scales."""
        a, b = (
            placed(side.elements(major if major == "k" else "rows"), major, pad, outside)
            for side, major in zip((self.a, self.b), self.kind.majors, strict=True)
        )
        found = {"a_tensor": a, "b_tensor": b}
        if not self.kind.forward:
            found["c_tensor"] = placed(self.upstream, "k" if self.kind.major == "n" else "rows", pad, outside)
        found |= scales(self.a, self.b, seed, form)
        # Anything may lie between the factors.
        found["prob_tensor"] = placed(self.prob, "k", pad // 4 * 4, outside) if pad else on_gpu(self.prob)
        return found

    def run(self, given: dict[str, Any] | None = None, **options: Any) -> Any:
        """Call the wrapper; it must be a kernel that answers."""
        wrapper = gemm_srelu_wrapper if self.kind.forward else gemm_dsrelu_wrapper
        given = self.given() if given is None else given
        return wrapper(**given, **{"alpha": self.alpha, "backend": BACKEND, **self.kind.wrapper_options, **options})

    def sums(self) -> tuple[Any, Any]:
        """Return alpha times the product in float64, and the error allowed to it."""
        x, error = product(self.a.exact(), self.b.exact(), self.kind.name)
        alpha = float(np.float32(self.alpha))
        return alpha * x, abs(alpha) * error

    def result(self, x: Any) -> Any:
        """Return D, in float64."""
        positive, prob = np.maximum(x, 0), self.prob.astype(np.float64)
        return positive**2 * prob if self.kind.forward else 2 * positive * value_of(self.upstream) * prob

    def result_error(self, x: Any, error: Any) -> Any:
        """Return the error allowed to D before it is stored."""
        positive, prob = np.maximum(x, 0), self.prob.astype(np.float64)
        if self.kind.forward:
            through = (2 * positive * error + error**2) * np.abs(prob)
        else:
            through = 2 * error * np.abs(value_of(self.upstream) * prob)
        return through + 2.0**-20 * np.abs(self.result(x))

    def dprob(self, x: Any, error: Any) -> tuple[Any, Any]:
        """Return the sums over the rows, and the error allowed to them."""
        positive, upstream = np.maximum(x, 0), value_of(self.upstream)
        off = (2 * positive * error + error**2 + 2.0**-18 * positive**2) * np.abs(upstream)
        return (positive**2 * upstream).sum(1, keepdims=True), off.sum(1, keepdims=True)

    def check(self, result: Any) -> None:
        """Compare results with float64, and the maximum if there has to be one."""
        kind, (x, error) = self.kind, self.sums()
        if kind.forward:
            c = value_of(host(result["c_tensor"]))
            assert_within(c, x, storing_error(x, kind.c) + error, kind.c, "c")
        else:
            want, off = self.dprob(x, error)
            assert_within(host(result["dprob_tensor"]).astype(np.float64), want, off, "float32", "dprob")
        d, off = self.result(x), self.result_error(x, error)
        assert_within(value_of(host(result["d_tensor"])), d, storing_error(d, kind.d) + off, kind.d, "d")
        assert result["sfd_tensor"] is None
        assert (result["amax_tensor"] is not None) == ("fp4" in kind.name)
        if result["amax_tensor"] is not None:
            at = np.unravel_index(np.argmax(np.abs(d)), d.shape)
            assert tuple(result["amax_tensor"].shape) == (1,)
            assert abs(result["amax_tensor"].item() - abs(d[at])) <= 2.0**-16 * abs(d[at]) + off[at]

    def check_exactly(self, result: Any) -> None:
        """Compare the results of whole numbers with float64, rounded once; sums over rows need more bits than there
        are."""
        kind, (x, _) = self.kind, self.sums()
        if kind.forward:
            np.testing.assert_array_equal(value_of(host(result["c_tensor"])), cast(x, kind.c))
        else:
            want, _ = self.dprob(x, 0.0)
            terms = np.maximum(x, 0) ** 2 * np.abs(value_of(self.upstream))
            off = np.abs(host(result["dprob_tensor"]) - want)
            assert (off <= 2.0**-20 * terms.sum(1, keepdims=True)).all()
        d = cast(self.result(x), "float32")
        np.testing.assert_array_equal(value_of(host(result["d_tensor"])), cast(d, kind.d))
        if result["amax_tensor"] is not None:
            assert result["amax_tensor"].item() == np.abs(d).max()


ROWS = [
    ("mxfp8_e4m3", "bfloat16", "bfloat16", "kk", "n"),
    ("mxfp8_e4m3", "float32", "float16", "mn", "n"),
    ("mxfp8_e4m3", "float16", "float32", "kk", "m"),
    ("mxfp8_e5m2", "bfloat16", "float16", "mk", "n"),
    ("mxfp8_e5m2", "float32", "bfloat16", "kn", "m"),
    ("mxfp4", "bfloat16", "float32", "kk", "n"),
    ("mxfp4", "float16", "bfloat16", "kk", "m"),
    ("nvfp4", "bfloat16", "bfloat16", "kk", "n"),
    ("nvfp4", "float32", "float16", "kk", "n"),
    ("fp4_e8m0_16", "float16", "bfloat16", "kk", "n"),
]
KINDS = [Kind(forward, *row) for forward in (True, False) for row in ROWS]
NARROW = [Kind(True, "mxfp8_e4m3", E4M3), Kind(True, "nvfp4", E5M2, "float32", "kk", "m")]
QUANTISED = [
    Kind(forward, *row)
    for forward in (True, False)
    for row in (
        ("mxfp8_e4m3", "bfloat16", E4M3),
        ("mxfp8_e5m2", "float32", E5M2, "mn", "m"),
        ("mxfp4", "float16", E4M3),
    )
]
both = pytest.mark.parametrize("forward", [True, False], ids=["srelu", "dsrelu"])
mx_and_nv = pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])


@pytest.mark.parametrize("kind", [*KINDS, *NARROW], ids=str)
def test_every_operand_and_result(kind: Kind) -> None:
    """Sums near 1, results near 1e-5, and sums near 1e-5; where fp8 has no such numbers, 1/4 instead."""
    sizes = (1.0, 0.25) if kind.c in LARGEST else (1.0, 4e-3, 1e-5)
    for number, shape in enumerate(shapes(kind.name, COLUMNS, kind.rows)):
        case = Case(kind, shape, sizes[number % len(sizes)], (1.0, -0.7, 1.0)[number % 3])
        case.check(case.run(case.given(pad=16 * (number % 4), outside=(np.nan, 1e4)[number % 2])))
    for shape in [*shapes(kind.name, COLUMNS, kind.rows)][-2:]:
        case = Case(kind, shape, whole=True, alpha=0.5)
        case.check_exactly(case.run(case.given(pad=16)))


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_quantised_results_have_the_bytes_of_the_recipe(kind: Kind) -> None:
    for number, shape in enumerate(shapes(kind.name, COLUMNS, kind.rows)):
        case, norm_const = Case(kind, shape, whole=True), (1.0, 0.3)[number % 2]
        if shape[0] > 4:
            case.prob[3], case.prob[4] = 0, 2.0**-80  # a row of zeros, and one of next to nothing
        given = case.given(pad=16 * (number % 3), seed=number)
        result = case.run(given, norm_const_tensor=torch.tensor([norm_const], device=DEVICE))
        d = case.result(case.sums()[0])
        codes = host(result["d_tensor"]).view(np.uint8)
        codes = np.where(codes == 0x80, 0, codes)  # the sign of a zero is that of the factors
        assert result["amax_tensor"] is None
        assert_quantised(codes, host(result["sfd_tensor"]), np.where(d == 0, 0, d), kind.d, norm_const)


DEEP = [
    (Kind(True), (65, 16, 80, 3)),
    (Kind(True), (129, 336, 1040, 1)),
    (Kind(True), (40, 16400, 64, 1)),
    (Kind(True, "nvfp4"), (17, 48, 1056, 1)),
    (Kind(False), (65, 16, 80, 3)),
    (Kind(False), (129, 1856, 1040, 2)),
    (Kind(False, "nvfp4"), (17, 48, 1056, 1)),
]


@pytest.mark.parametrize(("kind", "shape"), DEEP, ids=str)
def test_narrow_deep_and_wide_products(kind: Kind, shape: tuple[int, int, int, int]) -> None:
    """Where other tiles are chosen; M is varied around that of the problem."""
    for m in (shape[0], 1, 128, 200):
        case = Case(kind, (m, *shape[1:]))
        case.check(case.run())


@both
def test_saturation_and_overflow(forward: bool) -> None:
    kind = Kind(True, "mxfp8_e4m3", E4M3) if forward else Kind(False, "mxfp8_e4m3", "float32", "float16", "mn")
    case = Case(kind, (128, 144, 64, 1), whole=True)
    case.a.codes[:], case.b.codes[:], case.a.scales[:], case.b.scales[:] = 0x7E, 0x7E, 132, 132
    case.prob[:], case.upstream[:] = 1, 1
    result = case.run()
    case.check_exactly(result)
    if forward:
        assert (value_of(host(result["c_tensor"])) == 448).all()
    else:
        assert (host(result["d_tensor"]) == np.inf).all()


# --- NaN, padding, what never matters -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_a_nan_scale_spoils_its_row_or_column_only(name: str, forward: bool) -> None:
    case = Case(Kind(forward, name), (130, 144, 96, 2), whole=True)
    nan = 0x7F if case.a.scale == E4M3 else 0xFF
    clean = case.run()
    case.a.scales[7, 1, 0] = nan
    case.b.scales[101, 2, 1] = nan
    result = case.run()
    wrong = np.zeros((130, 144, 2), bool)
    wrong[7, :, 0], wrong[:, 101, 1] = True, True
    sums = wrong.any(1, keepdims=True)  # a column takes part in every sum
    for key, nans in {"c_tensor": wrong, "d_tensor": wrong, "dprob_tensor": sums}.items():
        if key in result:
            got, want = (host(x[key]).astype(np.float32) for x in (result, clean))
            np.testing.assert_array_equal(np.isnan(got), nans)
            np.testing.assert_array_equal(got[~nans], want[~nans])
    assert result["amax_tensor"] is None or np.isnan(result["amax_tensor"].item())


@both
def test_nan_factors_and_gradients_stay_in_their_place(forward: bool) -> None:
    case = Case(Kind(forward), (65, 144, 80, 1), whole=True)
    case.prob[5] = np.nan
    if not forward:
        case.upstream[9, 17] = np.nan
    result = case.run()
    nans = np.isnan(host(result["d_tensor"]).astype(np.float32))[..., 0]
    assert nans[5].all()
    assert nans.sum() == 144 + (not forward)
    if forward:
        assert not np.isnan(host(result["c_tensor"]).astype(np.float32)).any()
    else:  # prob is no part of dprob
        assert np.flatnonzero(np.isnan(host(result["dprob_tensor"]))).tolist() == [9]


@both
@mx_and_nv
def test_padding_of_the_scales_never_matters(name: str, forward: bool) -> None:
    case = Case(Kind(forward, name), (130, 144, 96, 2))
    first = case.run(case.given())
    for seed, form in ((1, "logical"), (2, "physical")):
        assert_same(case.run(case.given(seed=seed, form=form)), first)


@both
def test_spellings_of_operands_give_the_same(forward: bool) -> None:
    """Pairs of e2m1 as torch's own or as bytes, scales of e8m0 as bytes, hints."""
    case = Case(Kind(forward, "mxfp4", "bfloat16", "float32"), (65, 144, 96, 1))
    given = case.given()
    want = case.run(given)
    own = {name: given[name].view(torch.float4_e2m1fn_x2) for name in ("a_tensor", "b_tensor")}
    raw = {name: given[name].view(torch.uint8) for name in ("sfa_tensor", "sfb_tensor")}
    before = compiles()
    for other in ({**given, **own}, {**given, **raw}):
        assert_same(case.run(other), want)
    assert_same(case.run(given, mma_tiler_mn=(128, 64), cluster_shape_mn=(4, 1), vector_f32=True), want)
    assert compiles() == before


# --- runtime values -------------------------------------------------------------------------------------------------


@both
def test_any_rows_and_any_alpha_compile_once(forward: bool) -> None:
    kind = Kind(forward)
    case = Case(kind, (40 * 7, 336, 80, 1))
    case.run()
    before = compiles()
    for number in range(40):
        m = 1 + 7 * number
        part = Case(kind, (1, 16, 16, 1), alpha=0.05 * (number - 20))
        part.a = Operand(case.a.codes[:m], case.a.element, case.a.scales[:m], case.a.scale, case.a.vec)
        part.b, part.prob, part.upstream = case.b, case.prob[:m], case.upstream[:m]
        result = part.run()
        if number % 5 == 0 or m in (64, 71, 127, 134):
            part.check(result)
    assert compiles() == before


@both
def test_nothing_is_launched_for_no_rows(forward: bool) -> None:
    before = compiles()
    for m, batch in ((0, 1), (5, 0)):
        result = Case(Kind(forward, "fp4_e8m0_16", "float32", "float16"), (m, 144, 96, batch)).run()
        assert tuple(result["d_tensor"].shape) == (m, 144, batch)
        assert result["amax_tensor"].item() == -np.inf
    assert compiles() == before  # not even loaded


@both
def test_strict_mode(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_STRICT", "1")
    case = Case(Kind(forward), (65, 144, 80, 1))
    case.check(case.run(backend="auto"))


# --- class ----------------------------------------------------------------------------------------------------------


class Object:
    """A compiled object that writes into watched results of a caller."""

    def __init__(self, case: Case, norm_const: Any = None, with_amax: bool = False) -> None:
        self.kind, self.norm_const = case.kind, norm_const
        self.amax = torch.full((1,), -torch.inf, device=DEVICE) if with_amax else None
        given, results = case.given(), self.results(case)
        api = GemmSrelu if case.kind.forward else GemmDsrelu
        self.op = api(
            *self.ordered(given, results),
            sample_sfd=results["sfd"],
            sample_amax=self.amax,
            sample_norm_const=norm_const,
            alpha=case.alpha,
            sf_vec_size=FORMATS[self.kind.name][2],
            backend=BACKEND,
        )
        self.op.compile()

    def results(self, case: Case) -> dict[str, Any]:
        """Return watched results; dprob is zero and has gaps."""
        (m, n, batch), kind = case.upstream.shape, case.kind
        dprob = testing.guarded(
            (m, 1, batch), "float32", stride=(3, 1, 3 * m + 1), framework="torch", device=DEVICE, name="dprob"
        )
        dprob.array.zero_()
        found: dict[str, Any] = {"d": guarded_rows((m, n, batch), kind.d, kind.major), "dprob": dprob, "sfd": None}
        if kind.forward:
            found["c"] = guarded_rows((m, n, batch), kind.c, kind.major)
        if kind.d in LARGEST:
            shape = (batch, -(-m // 128), -(-n // 128), 32, 4, 4)
            found["sfd"] = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
        return found

    def ordered(self, given: dict[str, Any], results: dict[str, Any]) -> list[Any]:
        """Return the arguments without defaults."""
        first, second = ("c", "d") if self.kind.forward else ("d", "dprob")
        own = [given[name] for name in ("a_tensor", "b_tensor", "c_tensor") if name in given]
        rest = [given[name] for name in ("sfa_tensor", "sfb_tensor", "prob_tensor")]
        return [*own, results[first].array, results[second].array, *rest]

    def execute(self, case: Case, results: Any = None, given: Any = None, **options: Any) -> dict[str, Any]:
        """Execute; return results like the wrapper's after what lies around them has been checked."""
        results = self.results(case) if results is None else results
        given = case.given() if given is None else given
        more = {"sfd_tensor": results["sfd"], "amax_tensor": self.amax, "norm_const_tensor": self.norm_const}
        self.op.execute(*self.ordered(given, results), **more, **options)
        found = {f"{name}_tensor": x for name, x in results.items()} | {"amax_tensor": self.amax}
        for name in ("c_tensor", "d_tensor", "dprob_tensor"):
            if name in found:
                found[name].check_surroundings()
                found[name] = found[name].array
        return found


@pytest.mark.parametrize("kind", [*KINDS[:3], KINDS[7], *KINDS[10:13], KINDS[17]], ids=str)
def test_class_takes_any_rows(kind: Kind) -> None:
    op, before = None, 0
    for number, m in enumerate(reversed(kind.rows)):
        case = Case(kind, (m, 336, 160, 2), alpha=(0.5, -0.7)[number % 2])
        op = op or Object(case, with_amax="fp4" in kind.name)
        if op.amax is not None:
            op.amax.fill_(-torch.inf)
        result = op.execute(case, **({} if case.alpha == 0.5 else {"alpha": case.alpha}))
        case.check(result)
        want = case.run()
        assert_same([result[name] for name in want.keys()], want)  # noqa: SIM118 - a TupleDict iterates values
        before = before or compiles()
    assert compiles() == before


@both
def test_class_adds_to_what_there_is(forward: bool) -> None:
    case = Case(Kind(forward, "nvfp4"), (129, 144, 96, 1), whole=True)
    largest = np.abs(cast(case.result(case.sums()[0]), "float32")).max()
    op = Object(case, with_amax=True)
    results, want = op.results(case), case.run()
    for times, (preset, maximum) in enumerate(((-np.inf, largest), (2 * largest, 2 * largest), (np.nan, np.nan)), 1):
        op.amax.fill_(preset)
        result = op.execute(case, results)
        np.testing.assert_array_equal(op.amax.item(), maximum)
        if not forward:
            found, once = (x["dprob_tensor"].double() for x in (result, want))
            assert ((found - times * once).abs() <= 2.0**-22 * times * once.abs()).all()
    op.amax.fill_(5.0)
    op.execute(Case(Kind(forward, "nvfp4"), (0, 144, 96, 1)))
    assert op.amax.item() == 5.0


@both
def test_class_quantises(forward: bool) -> None:
    kind, norm_const = Kind(forward, "mxfp8_e4m3", "bfloat16", E4M3), torch.full((1, 1), 0.3, device=DEVICE)
    op = Object(Case(kind, (300, 144, 96, 1), whole=True), norm_const)
    for m in (300, 1, 129, 64):
        case = Case(kind, (m, 144, 96, 1), whole=True)
        result, want = op.execute(case), case.run(norm_const_tensor=norm_const)
        assert torch.equal(bits(result["d_tensor"]), bits(want["d_tensor"]))
        assert torch.equal(bits(result["sfd_tensor"].permute(3, 4, 1, 5, 2, 0)), bits(want["sfd_tensor"]))


def test_class_in_a_workspace() -> None:
    """A workspace of the caller serves any M that it is long enough for; the object's own no more than the sample's."""
    kind = Kind(False)
    op = Object(Case(kind, (64, 336, 96, 1)))
    large = Case(kind, (300, 336, 96, 1))
    needed = Object(large).op.scratch_workspace_bytes()
    assert needed >= 4 * 300
    workspace = torch.full((needed,), 0xFF, dtype=torch.uint8, device=DEVICE)
    large.check(op.execute(large, workspace=workspace))
    with pytest.raises(ValueError, match="a_tensor must have at most the sample's 64 rows without a workspace"):
        op.execute(large)
    with pytest.raises(ValueError, match="workspace must be a contiguous uint8 vector"):
        op.execute(large, workspace=workspace[:-1])


# --- graphs, streams, repetition ------------------------------------------------------------------------------------


def assert_equal_in_numpy(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


def change(given: dict[str, Any], changed: dict[str, Any]) -> None:
    for name, x in given.items():
        as_bytes(x).copy_(as_bytes(changed[name]))


@both
@mx_and_nv
def test_graph_replays_with_changed_data(name: str, forward: bool) -> None:
    case, other = (Case(Kind(forward, name), (129, 144, 96, 1), whole=True, seed=seed) for seed in (0, 1))
    given, changed = case.given(), other.given()
    replayed, eager = testing.cuda_graph_replay(lambda: there(case.run(given)), lambda: change(given, changed))
    assert_equal_in_numpy(replayed, eager)
    assert_equal_in_numpy(eager, [testing.to_numpy(x) for x in there(other.run())])


@pytest.mark.parametrize(
    ("forward", "own"), [(True, True), (False, True), (False, False)], ids=["srelu", "dsrelu", "dsrelu in a workspace"]
)
def test_class_in_a_graph(forward: bool, own: bool) -> None:
    case, other = (Case(Kind(forward), (65, 144, 96, 1), whole=True, seed=seed) for seed in (0, 1))
    op, given, changed = Object(case), case.given(), other.given()
    results = op.results(case)
    first, second = (results[name].array for name in (("c", "d") if forward else ("d", "dprob")))
    more = {}
    if not own:
        more["workspace"] = torch.full((op.op.scratch_workspace_bytes(),), 0xFF, dtype=torch.uint8, device=DEVICE)

    def call() -> Any:
        results["dprob"].array.zero_()
        op.op.execute(*op.ordered(given, results), **more)
        return first, second

    replayed, eager = testing.cuda_graph_replay(call, lambda: change(given, changed))
    assert_equal_in_numpy(replayed, eager)
    found = {f"{name}_tensor": results[name].array for name in ("c", "d", "dprob") if name in results}
    other.check_exactly({**found, "amax_tensor": None})


@both
@mx_and_nv
def test_current_and_explicit_streams_are_followed(name: str, forward: bool) -> None:
    case = Case(Kind(forward, name), (300, 336, 544, 1))
    given = case.given()
    want = [testing.to_numpy(x) for x in there(case.run(given))]
    late = {**given, "a_tensor": torch.zeros_like(as_bytes(given["a_tensor"])).view(given["a_tensor"].dtype)}
    for current in (True, False):
        got = testing.run_on_side_stream(
            lambda stream, given=not current: there(case.run(late, stream=stream if given else None)),
            produce=lambda: as_bytes(late["a_tensor"]).copy_(as_bytes(given["a_tensor"])),
            current=current,
        )
        assert_equal_in_numpy(got, want)


@both
@mx_and_nv
def test_results_are_bit_identical(name: str, forward: bool) -> None:
    for shape in ((1000, 768, 512, 1), (40, 768, 512, 2)):
        case = Case(Kind(forward, name), shape)
        given = case.given()
        testing.repeat_identical(lambda case=case, given=given: there(case.run(given)), 20)


# --- frameworks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind(True), Kind(True, "nvfp4"), QUANTISED[0], Kind(False), QUANTISED[3]], ids=str)
def test_jax_calls_the_same_kernel(kind: Kind) -> None:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case = Case(kind, (130, 144, 96, 1), whole=True)
    given = case.given()
    if kind in QUANTISED:
        given["norm_const_tensor"] = torch.full((1,), 0.3, device=DEVICE)
    want, arrays = case.run(given), jax_arrays(given)
    entry = gemm_srelu_jax if kind.forward else gemm_dsrelu_jax

    def call(arrays: Any) -> Any:
        return entry(**arrays, alpha=case.alpha, **kind.options, all_outputs=True, backend=BACKEND)

    for result in (call(arrays), jax.jit(call)(arrays), case.run(arrays)):
        assert_same_in_jax(result, want)
    assert_same_in_jax(entry(**arrays, alpha=case.alpha, **kind.options), [*want][:2])


@both
@mx_and_nv
def test_torch_compile(name: str, forward: bool) -> None:
    case = Case(Kind(forward, name), (130, 144, 96, 1))
    wrapper = gemm_srelu_wrapper if forward else gemm_dsrelu_wrapper
    alpha, options = case.alpha, case.kind.wrapper_options

    @torch.compile(fullgraph=True)
    def model(given: Any) -> Any:
        return tuple(wrapper(**given, alpha=alpha, **options, backend=BACKEND).values())

    assert_same(model(case.given()), case.run())


# --- far apart ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(exclusive=True)
@both
def test_rows_far_apart(forward: bool) -> None:
    """The last rows of A and of D lie beyond 2^31 elements, and of the C that is read."""
    case = Case(Kind(forward), (3, 144, 96, 1), whole=True)
    given, want = case.given(), case.run()
    for name in ("a_tensor", "c_tensor"):
        if name in given:
            given[name] = far_copy(given[name], FAR)
    op = Object(case)
    results = op.results(case)
    results["d"] = _Far(far_copy(want["d_tensor"], FAR))
    results["d"].array.zero_()
    result = op.execute(case, results, given)
    case.check_exactly({**result, "amax_tensor": None})


@dataclass
class _Far:
    """A result that is too large to be watched."""

    array: Any

    def check_surroundings(self) -> None:
        pass
