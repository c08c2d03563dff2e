"""Dense operations on few block-scaled rows on a GPU: M on both sides of every way that the rows may take.

Few kernels, many shapes: N and K stay below what all launches have in common, but for those with K in slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gpu_gemm import (
    BACKEND,
    DEVICE,
    FAR,
    as_bytes,
    assert_same,
    assert_same_in_jax,
    compiles,
    far_copy,
    host,
    jax_arrays,
    placed,
    product,
    scales,
    sides,
    there,
)
from naive_gemm import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    STORED,
    VALUES,
    assert_quantised,
    assert_within,
    cast,
    storing_error,
    unpack,
    value_of,
)
from swiglu_calls import activation, activation_error

from fe_gemm import (
    GemmAmax,
    GemmDsrelu,
    gemm_amax_jax,
    gemm_amax_wrapper,
    gemm_dsrelu_wrapper,
    gemm_srelu_wrapper,
    gemm_swiglu_wrapper,
)
from fe_gemm.planning.few_rows import choose_few_rows
from fe_gemm.planning.problem import Problem
from fe_runtime import testing
from fe_runtime.arrays import Device, capability

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

ROWS = (1, 5, 16, 17, 32, 33, 64, 65)
EVEN_ROWS = (16, 32, 48, 64, 80)
N = 320
"""No multiple of a tile of rows."""

WRAPPERS: dict[str, Callable[..., Any]] = {
    "amax": gemm_amax_wrapper,
    "swiglu": gemm_swiglu_wrapper,
    "srelu": gemm_srelu_wrapper,
    "dsrelu": gemm_dsrelu_wrapper,
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


@dataclass(frozen=True)
class Kind:
    """What selects a kernel: operation, format of the operands, dtypes of X (stored forward, read by dsrelu) and of the
    result, and their major."""

    operation: str
    name: str
    result: str = "bfloat16"
    x: str = "bfloat16"
    major: str = "n"

    def __str__(self) -> str:
        return "-".join((self.operation, self.name, self.result, self.x, self.major))

    @property
    def options(self) -> dict[str, Any]:
        dtypes = {
            "amax": {"c_dtype": self.result},
            "swiglu": {"ab12_dtype": self.x, "c_dtype": self.result},
            "srelu": {"c_dtype": self.x, "d_dtype": self.result},
            "dsrelu": {"d_dtype": self.result},
        }[self.operation]
        major = "d_major" if self.operation == "dsrelu" else "c_major"
        return {**dtypes, major: self.major, "sf_vec_size": FORMATS[self.name][2]}

    @property
    def k(self) -> int:
        """K: no multiple of a slot or an atom of scales, nor, where that is legal, of a block."""
        return 544 if "fp4" in self.name else 528

    @property
    def main(self) -> str:
        """Name of the result."""
        return "c_tensor" if self.operation in ("amax", "swiglu") else "d_tensor"

    @property
    def is_quantised(self) -> bool:
        return self.operation != "amax" and self.result in (E4M3, E5M2)


class Case:
    """Operands of one problem, and its results in float64 with what is allowed to them."""

    def __init__(
        self, kind: Kind, m: int, whole: bool = False, seed: int = 0, n: int = N, k: int = 0, batch: int = 1
    ) -> None:
        k = k or kind.k
        self.a, self.b, rest = sides(kind.name, (m, n, k, batch), 1.0, whole, seed)
        rng = np.random.default_rng([9, seed, m])
        self.kind, self.alpha = kind, (0.5 if whole else -0.7) * rest
        prob = np.exp2(rng.integers(-3, 1, (m, 1, batch))) if whole else rng.standard_normal((m, 1, batch))
        upstream = rng.integers(-4, 5, (m, n, batch)) if whole else rng.standard_normal((m, n, batch))
        self.prob = prob.astype(np.float32)
        self.upstream = upstream.astype(STORED[kind.x]) if kind.operation == "dsrelu" else None

    def given(self, pad: int = 0, seed: int = 0) -> dict[str, Any]:
        """Return the arguments on the GPU by name; ``pad``: bytes of NaN between rows; ``seed``: of padding of
        scales."""
        kind = self.kind
        a, b = (placed(side.elements(), "k", pad) for side in (self.a, self.b))
        found = {"a_tensor": a, "b_tensor": b}
        if self.upstream is not None:
            found["c_tensor"] = placed(self.upstream, "k" if kind.major == "n" else "rows", pad)
        found |= scales(self.a, self.b, seed)
        if kind.operation in ("srelu", "dsrelu"):
            found["prob_tensor"] = placed(self.prob, "k", pad // 4 * 4)
        if kind.is_quantised:
            found["norm_const_tensor"] = torch.ones(1, device=DEVICE)
        return found

    def run(self, given: dict[str, Any] | None = None) -> Any:
        """Call the wrapper; it must be a kernel that answers."""
        given = self.given() if given is None else given
        alpha = {} if self.kind.operation == "amax" else {"alpha": self.alpha}
        return WRAPPERS[self.kind.operation](**given, **alpha, **self.kind.options, backend=BACKEND)

    def x(self) -> tuple[Any, Any]:
        """Return alpha times the product in float64, and the error allowed to it."""
        alpha = 1.0 if self.kind.operation == "amax" else float(np.float32(self.alpha))
        sums, error = product(self.a.exact(), self.b.exact(), self.kind.name)
        return alpha * sums, abs(alpha) * error

    def expected(self) -> dict[str, tuple[Any, Any]]:
        """Return results before they are stored, by name, with the error allowed to them."""
        (x, error), prob = self.x(), self.prob.astype(np.float64)
        positive = np.maximum(x, 0)
        if self.kind.operation == "amax":
            return {"c_tensor": (x, error)}
        if self.kind.operation == "swiglu":
            return {"ab12_tensor": (x, error), "c_tensor": (activation(x), activation_error(x, error))}
        if self.kind.operation == "srelu":
            d = positive**2 * prob
            off = (2 * positive * error + error**2) * np.abs(prob) + 2.0**-20 * np.abs(d)
            return {"c_tensor": (x, error), "d_tensor": (d, off)}
        upstream = value_of(self.upstream)
        d = 2 * positive * upstream * prob
        off = 2 * error * np.abs(upstream * prob) + 2.0**-20 * np.abs(d)
        each = (2 * positive * error + error**2 + 2.0**-18 * positive**2) * np.abs(upstream)
        sums = (positive**2 * upstream).sum(1, keepdims=True)
        return {"d_tensor": (d, off), "dprob_tensor": (sums, each.sum(1, keepdims=True))}

    def check(self, result: Any) -> None:
        """Compare results with float64, and the maximum if there is one; not the codes of a quantised one."""
        expected = self.expected()
        for name, (want, off) in expected.items():
            if self.kind.is_quantised and name == self.kind.main:
                continue
            got, dtype = values(result[name], self.kind.result if name == self.kind.main else "")
            assert_within(got, want, storing_error(want, dtype) + off, dtype, name)
        if result["amax_tensor"] is not None:
            want, off = expected[self.kind.main]
            at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
            assert abs(result["amax_tensor"].item() - abs(want[at])) <= 2.0**-16 * abs(want[at]) + off[at]


def values(x: Any, stored: str = "") -> tuple[Any, str]:
    """Return the numbers of a result, and the name of their type; ``"uint8"``: pairs of e2m1."""
    if stored == "uint8":
        return VALUES[E2M1][unpack(testing.to_numpy(as_bytes(x)), 1)], E2M1
    array = host(x)
    return value_of(array), array.dtype.name


KINDS = [
    Kind("amax", "mxfp8_e4m3", "float32"),
    Kind("amax", "mxfp8_e5m2", E4M3),
    Kind("amax", "mxfp8_e4m3", "float16", major="m"),
    Kind("amax", "nvfp4", "uint8"),
    Kind("amax", "nvfp4", "bfloat16", major="m"),
    Kind("amax", "mxfp4", "float32"),
    Kind("amax", "fp4_e8m0_16", "bfloat16"),
    Kind("swiglu", "mxfp8_e4m3"),
    Kind("swiglu", "mxfp8_e4m3", "float32", "float32", "m"),
    Kind("swiglu", "nvfp4"),
    Kind("swiglu", "mxfp4", "float16", "float32"),
    Kind("srelu", "mxfp8_e4m3", "float32", "float16"),
    Kind("srelu", "nvfp4", "bfloat16", "bfloat16", "m"),
    Kind("srelu", "mxfp4"),
    Kind("dsrelu", "mxfp8_e4m3"),
    Kind("dsrelu", "nvfp4", "float32", "float16"),
    Kind("dsrelu", "mxfp4", "bfloat16", "float32", "m"),
]
QUANTISED = [
    Kind("swiglu", "mxfp8_e4m3", E4M3),
    Kind("swiglu", "mxfp4", E5M2, "float32"),
    Kind("srelu", "mxfp8_e5m2", E5M2, "float32", "m"),
    Kind("dsrelu", "mxfp8_e4m3", E4M3),
]
MX, NV, MX4 = KINDS[0], Kind("amax", "nvfp4", "float32"), KINDS[5]
OF_EACH = [MX, NV, MX4, KINDS[7], KINDS[11], KINDS[14]]
"""Every format and every operation."""


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_on_both_sides_of_every_way(kind: Kind) -> None:
    """One kernel serves all of them; NaN lies between rows; padding of scales and another run change no bit."""
    before = 0
    for number, m in enumerate(EVEN_ROWS if kind.major == "m" else ROWS):
        case, pad = Case(kind, m), 16 * (number % 3)
        result = case.run(case.given(pad, number))
        before = before or compiles()
        case.check(result)
        assert_same(case.run(case.given(pad, number)), result)
        assert_same(case.run(case.given(0, number + 100)), result)
    assert compiles() == before


@pytest.mark.parametrize("kind", [*OF_EACH, KINDS[9], KINDS[13]], ids=str)
def test_whole_numbers_are_exact(kind: Kind) -> None:
    for m in ROWS:
        case = Case(kind, m, whole=True)
        result = case.run()
        case.check(result)
        name = {"amax": "c_tensor", "swiglu": "ab12_tensor", "srelu": "c_tensor", "dsrelu": ""}[kind.operation]
        if name:
            got, dtype = values(result[name])
            np.testing.assert_array_equal(got, cast(case.x()[0], dtype))
        if kind.operation == "amax":
            assert result["amax_tensor"].item() == np.abs(case.x()[0]).max()


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_quantised_results_have_the_bytes_of_the_recipe(kind: Kind) -> None:
    for m in EVEN_ROWS if kind.major == "m" else ROWS:
        case = Case(kind, m, whole=True)
        if kind.operation == "swiglu":
            case.alpha = 512.0  # gates are 0, or so large that their sigmoid is 0 or 1
        result = case.run(case.given(pad=16, seed=m))
        case.check(result)
        want = cast(case.expected()[kind.main][0], "float32")
        want = np.where(np.abs(want) < 1e-6, 0, want)
        codes = host(result[kind.main]).view(np.uint8)
        codes = np.where(codes == 0x80, 0, codes)  # the sign of a zero is that of the factors
        name = "sfc_tensor" if kind.operation == "swiglu" else "sfd_tensor"
        assert_quantised(codes, host(result[name]), want, kind.result, 1.0)


DEEP = [
    (MX, 192, 8208),
    (NV, 192, 8224),
    (MX4, 192, 8224),
    (Kind("dsrelu", "mxfp8_e4m3"), 1000, 8208),
    (Kind("swiglu", "nvfp4"), 1024, 8192),
]


@pytest.mark.parametrize(("kind", "n", "k"), DEEP, ids=str)
def test_k_in_slices(kind: Kind, n: int, k: int) -> None:
    few = choose_few_rows(Problem(), FORMATS[kind.name], n, k, "sm_90a", 132)
    assert max(sums.slices for sums in few.sums) > 1
    for m in (1, 16, 30, 64):
        case = Case(kind, m, n=n, k=k)
        result = case.run(case.given(pad=16))
        case.check(result)
        assert_same(case.run(), result)


@pytest.mark.parametrize("kind", [MX, NV, MX4], ids=str)
def test_a_nan_scale_spoils_its_row_or_column_only(kind: Kind) -> None:
    for m in (16, 33):
        case = Case(kind, m, whole=True)
        nan = 0x7F if case.a.scale == E4M3 else 0xFF
        clean, _ = values(case.run()["c_tensor"])
        case.a.scales[7, 1, 0] = nan
        case.b.scales[301, 2, 0] = nan
        result = case.run()
        wrong = np.zeros(clean.shape, bool)
        wrong[7], wrong[:, 301] = True, True
        got, _ = values(result["c_tensor"])
        np.testing.assert_array_equal(np.isnan(got), wrong)
        np.testing.assert_array_equal(got[~wrong], clean[~wrong])
        assert np.isnan(result["amax_tensor"].item())


@pytest.mark.parametrize("kind", [MX, NV, MX4], ids=str)
def test_batches_are_right_too(kind: Kind) -> None:
    for m in (1, 16, 33):
        case = Case(kind, m, batch=3)
        case.check(case.run(case.given(pad=16)))


def test_the_maximum_is_that_before_rounding() -> None:
    kind = Kind("amax", "mxfp8_e4m3", E4M3)
    case = Case(kind, 16, whole=True)
    result = case.run()
    assert result["amax_tensor"].item() == np.abs(case.x()[0]).max()  # no e4m3 number has so many digits
    assert np.abs(values(result["c_tensor"])[0]).max() != result["amax_tensor"].item()


# --- class, graphs, frameworks --------------------------------------------------------------------------------------


def test_class_raises_what_amax_holds_with_any_rows() -> None:
    op, before = None, 0
    for m in (100, 64, 33, 16, 1):
        case = Case(NV, m, whole=True)
        given, largest = case.given(), np.abs(case.x()[0]).max()
        c, amax = torch.empty(m, N, 1, device=DEVICE), torch.full((1,), -torch.inf, device=DEVICE)
        if op is None:
            op = GemmAmax(*given.values(), c, amax, sf_vec_size=16, backend=BACKEND)
            op.compile()
            memory = torch.empty(op.scratch_workspace_bytes(), dtype=torch.uint8, device=DEVICE)
        for preset, want in ((-np.inf, largest), (2 * largest, 2 * largest), (np.nan, np.nan)):
            amax.fill_(preset)
            op.execute(*given.values(), c, amax)
            np.testing.assert_array_equal(amax.item(), want)
        assert_same((c, amax.reshape(1, 1, 1).fill_(largest)), case.run(given).values())
        c.zero_()
        op.execute(*given.values(), c, amax, workspace=memory)
        assert_same((c,), (case.run(given)["c_tensor"],))
        before = before or compiles()
    assert compiles() == before


def test_class_adds_to_dprob() -> None:
    kind = Kind("dsrelu", "mxfp8_e4m3", "float32", "float32")
    for m in (16, 64, 65):
        case = Case(kind, m, whole=True)
        given, want = case.given(), case.run()
        d, dprob = torch.empty(m, N, 1, device=DEVICE), torch.full((m, 1, 1), 8.0, device=DEVICE)
        operands = [given[name] for name in ("a_tensor", "b_tensor", "c_tensor")]
        factors = [given[name] for name in ("sfa_tensor", "sfb_tensor", "prob_tensor")]
        arguments = (*operands, d, dprob, *factors)
        op = GemmDsrelu(*arguments, alpha=case.alpha, sf_vec_size=32, backend=BACKEND)
        op.compile()
        op.execute(*arguments)
        assert_same((d, dprob), (want["d_tensor"], 8.0 + want["dprob_tensor"]))


@pytest.mark.parametrize("kind", OF_EACH, ids=str)
def test_graph_replays_with_changed_data(kind: Kind) -> None:
    case, other = Case(kind, 16, whole=True), Case(kind, 16, whole=True, seed=1)
    given, changed = case.given(), other.given()

    def change() -> None:
        for name, x in given.items():
            as_bytes(x).copy_(as_bytes(changed[name]))

    replayed, eager = testing.cuda_graph_replay(lambda: there(case.run(given).values()), change)
    for x, y in zip(replayed, eager, strict=True):
        assert x.tobytes() == y.tobytes()
    assert [x.tobytes() for x in eager] == [testing.to_numpy(x).tobytes() for x in there(other.run().values())]


@pytest.mark.parametrize("kind", [MX, MX4], ids=str)
def test_jax_calls_the_same_kernel(kind: Kind) -> None:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    for m in (16, 64):
        given = Case(kind, m).given()
        want, arrays = Case(kind, m).run(given), jax_arrays(given)
        options = {name: value for name, value in kind.options.items() if name != "c_major"}

        def call(arrays: Any, options: dict[str, Any] = options) -> Any:
            return gemm_amax_jax(**arrays, **options, backend=BACKEND)

        for result in (call(arrays), jax.jit(call)(arrays)):
            assert_same_in_jax(result, want)


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("kind", [MX, NV, MX4], ids=str)
def test_rows_far_apart(kind: Kind) -> None:
    """The last row of A lies beyond 2^31 elements."""
    case = Case(kind, 4, whole=True)
    given = case.given()
    want = case.run(given)
    assert_same(case.run({**given, "a_tensor": far_copy(given["a_tensor"], FAR)}), want)
