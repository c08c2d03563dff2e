"""``gemm_amax`` on a GPU: exact where sums are, within its bounds elsewhere, every edge of the contract.

Few kernels, many shapes: M never selects a kernel, N only up to 128 and from thousands on, K from 1024 on.
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
    compiles,
    far_copy,
    guarded_rows,
    host,
    jax_arrays,
    placed,
    product,
    scales,
    shapes,
    sides,
    there,
)
from naive_gemm import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    LARGEST,
    VALUES,
    Operand,
    assert_within,
    cast,
    storing_error,
    unpack,
    value_of,
)

from fe_gemm import GemmAmax, gemm_amax_jax, gemm_amax_wrapper
from fe_runtime import testing
from fe_runtime.arrays import Device, capability

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

COLUMNS = (160, 352, 288)
"""N: no multiples of a tile, nor of 64."""
PACKED = ("uint8", "float4_e2m1fn_x2")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


@dataclass(frozen=True)
class Kind:
    """What selects a kernel: format of the operands, dtype of C, majors of the operands and of C."""

    name: str
    c: str = "float32"
    majors: str = "kk"
    c_major: str = "n"

    def __str__(self) -> str:
        return "-".join((self.name, self.c, self.majors, self.c_major))

    @property
    def rows(self) -> tuple[int, ...]:
        """M that the majors allow."""
        return EVEN_ROWS if self.majors[0] == "m" or self.c_major == "m" else ROWS_OF_ALL_KINDS

    @property
    def stored(self) -> str:
        """The type of the values of C."""
        return E2M1 if self.c in PACKED else self.c

    @property
    def options(self) -> dict[str, Any]:
        return {"c_dtype": self.c, "c_major": self.c_major, "sf_vec_size": FORMATS[self.name][2]}


@dataclass
class Case:
    """Operands of one problem."""

    kind: Kind
    a: Operand
    b: Operand

    @classmethod
    def of(cls, kind: Kind, shape: tuple[int, int, int, int], size: float = 1.0) -> Case:
        a, b, _ = sides(kind.name, shape, size)
        return cls(kind, a, b)

    @classmethod
    def whole(cls, kind: Kind, shape: tuple[int, int, int, int], seed: int = 0) -> Case:
        """Return a case with exact sums."""
        a, b, _ = sides(kind.name, shape, whole=True, seed=seed)
        return cls(kind, a, b)

    def given(self, pad: int = 0, outside: float = np.nan, seed: int = 0, form: str = "logical") -> dict[str, Any]:
        """Return the operands on the GPU by name, with other numbers around them; ``seed``: of padding of scales."""
        a, b = (
            placed(side.elements(major if major == "k" else "rows"), major, pad, outside)
            for side, major in zip((self.a, self.b), self.kind.majors, strict=True)
        )
        return {"a_tensor": a, "b_tensor": b, **scales(self.a, self.b, seed, form)}

    def run(self, given: dict[str, Any] | None = None, **options: Any) -> Any:
        """Call the wrapper; it must be a kernel that answers."""
        given = self.given() if given is None else given
        return gemm_amax_wrapper(**given, **{"backend": BACKEND, **self.kind.options, **options})

    def exact(self) -> tuple[Any, Any]:
        """Return the product in float64, and the error allowed to it."""
        return product(self.a.exact(), self.b.exact(), self.kind.name)

    def values(self, c: Any) -> Any:
        """Return the numbers that C holds."""
        if self.kind.stored == E2M1:
            return VALUES[E2M1][unpack(testing.to_numpy(as_bytes(c)), 1)]
        return value_of(host(c))

    def check(self, result: Any) -> None:
        """Compare C and the maximum with float64."""
        c, amax = result
        x, error = self.exact()
        assert_within(self.values(c), x, storing_error(x, self.kind.stored) + error, self.kind.stored, "c")
        at = np.unravel_index(np.argmax(np.abs(x)), x.shape)
        assert (tuple(amax.shape), amax.dtype) == ((1, 1, 1), torch.float32)
        assert abs(amax.item() - abs(x[at])) <= 2.0**-16 * abs(x[at]) + error[at]

    def check_exactly(self, result: Any) -> None:
        """Compare the results of whole numbers with float64, rounded once; the maximum is not rounded."""
        c, amax = result
        x, _ = self.exact()
        np.testing.assert_array_equal(self.values(c), cast(x, self.kind.stored))
        assert amax.item() == np.abs(x).max()


KINDS = [
    Kind("mxfp8_e4m3"),
    Kind("mxfp8_e4m3", "bfloat16", "kk", "m"),
    Kind("mxfp8_e4m3", E4M3, "mn", "n"),
    Kind("mxfp8_e4m3", "float16", "kn", "m"),
    Kind("mxfp8_e5m2", "float16", "mk", "n"),
    Kind("mxfp8_e5m2", E5M2, "mn", "m"),
    Kind("mxfp8_e5m2", "float32", "kn", "m"),
    Kind("mxfp8_e5m2", E4M3, "mk", "m"),
    Kind("mxfp4", "uint8"),
    Kind("mxfp4", "bfloat16", "kk", "m"),
    Kind("mxfp4", E5M2),
    Kind("nvfp4"),
    Kind("nvfp4", "float4_e2m1fn_x2"),
    Kind("nvfp4", E4M3, "kk", "m"),
    Kind("fp4_e8m0_16", "bfloat16"),
    Kind("fp4_e8m0_16", "float16", "kk", "m"),
]
MX, PACKS, NV = KINDS[0], KINDS[8], KINDS[11]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_operand_and_result(kind: Kind) -> None:
    """Results near 1 and near 1e-5; where fp8 and FP4 have no such numbers, 4 instead, beyond the largest too."""
    sizes = (1.0, 4.0, 300.0) if kind.stored in LARGEST else (1.0, 1e-5)
    for number, shape in enumerate(shapes(kind.name, COLUMNS, kind.rows)):
        case = Case.of(kind, shape, sizes[number % len(sizes)])
        case.check(case.run(case.given(pad=16 * (number % 4), outside=(np.nan, 1e4)[number % 2])))
    for shape in [*shapes(kind.name, COLUMNS, kind.rows)][-2:]:
        case = Case.whole(kind, shape)
        case.check_exactly(case.run(case.given(pad=16)))


DEEP = [
    (MX, (65, 16, 80, 3)),
    (MX, (17, 80, 1040, 1)),
    (MX, (129, 352, 1552, 1)),
    (MX, (40, 16400, 64, 1)),
    (PACKS, (65, 64, 96, 1)),
    (NV, (129, 192, 1056, 1)),
]


@pytest.mark.parametrize(("kind", "shape"), DEEP, ids=str)
def test_narrow_deep_and_wide_products(kind: Kind, shape: tuple[int, int, int, int]) -> None:
    """Where other tiles are chosen; M is varied around that of the problem."""
    for m in (shape[0], 1, 128, 200):
        case = Case.of(kind, (m, *shape[1:]))
        case.check(case.run())


def test_float32_rows_need_only_four_columns() -> None:
    """N of 16 bytes in C is enough: B counts its columns in rows."""
    for n in (132, 140, 148):
        case = Case.of(MX, (65, n, 80, 2))
        case.check(case.run())


# --- NaN, padding, what never matters -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MX, NV, KINDS[5]], ids=str)
def test_a_nan_scale_spoils_its_row_or_column_only(kind: Kind) -> None:
    case = Case.whole(kind, (144, 160, 96, 2))
    nan = 0x7F if case.a.scale == E4M3 else 0xFF
    clean = case.values(case.run()[0])
    case.a.scales[7, 1, 0] = nan
    case.b.scales[101, 2, 1] = nan
    c, amax = case.run()
    wrong = np.zeros(clean.shape, bool)
    wrong[7, :, 0], wrong[:, 101, 1] = True, True
    got = case.values(c)
    np.testing.assert_array_equal(np.isnan(got), wrong)
    np.testing.assert_array_equal(got[~wrong], clean[~wrong])
    assert np.isnan(amax.item())


def test_one_nan_element_wins_the_maximum() -> None:
    for m in (1, 100, 300):
        case = Case.whole(MX, (m, 352, 80, 1))
        case.a.codes[m - 1, 79, 0] = 0x7F
        c, amax = case.run()
        assert np.isnan(amax.item())
        np.testing.assert_array_equal(np.isnan(case.values(c)).any(1)[:, 0], np.arange(m) == m - 1)


@pytest.mark.parametrize("kind", [MX, NV, PACKS], ids=str)
def test_padding_of_the_scales_never_matters(kind: Kind) -> None:
    case = Case.of(kind, (130, 160, 96, 2))
    first = case.run(case.given())
    for seed, form in ((1, "logical"), (2, "physical")):
        assert_same(case.run(case.given(seed=seed, form=form)), first)


def test_spellings_of_operands_give_the_same() -> None:
    """Pairs of e2m1 as torch's own or as bytes, scales of e8m0 as bytes, hints."""
    case = Case.of(PACKS, (65, 160, 96, 1))
    given = case.given()
    want = there(case.run(given))
    own = {name: given[name].view(torch.float4_e2m1fn_x2) for name in ("a_tensor", "b_tensor")}
    as_uint8, as_int8 = (
        {name: given[name].view(kind) for name in ("sfa_tensor", "sfb_tensor")} for kind in (torch.uint8, torch.int8)
    )
    before = compiles()
    for other in ({**given, **own}, {**given, **as_uint8}, {**given, **as_int8}):
        assert_same(there(case.run(other)), want)
    assert_same(there(case.run(given, c_dtype="float4_e2m1fn_x2")), want)
    assert_same(there(case.run(given, mma_tiler_mn=(256, 256), cluster_shape_mn=(2, 4))), want)
    assert compiles() == before


def test_maximum_of_small_and_of_zero_results() -> None:
    case = Case.whole(MX, (129, 160, 96, 1))
    case.a.codes[:] = 0
    c, amax = case.run()
    assert not case.values(c).any()
    assert amax.item() == 0.0
    case.b.codes[:] = 0
    case.a.codes[128, 95, 0], case.b.codes[159, 95, 0] = 0x38, 0xB8  # 1 and -1, the last product of the last element
    case.a.scales[128, 2, 0], case.b.scales[159, 2, 0] = 127 - 60, 127 - 50
    c, amax = case.run()
    assert amax.item() == 2.0**-110
    assert case.values(c)[128, 159, 0] == -(2.0**-110)


# --- runtime values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MX, NV], ids=str)
def test_any_rows_compile_once(kind: Kind) -> None:
    whole = Case.of(kind, (40 * 7, 352, 96, 1))
    whole.run()
    before = compiles()
    for number in range(40):
        m = 1 + 7 * number
        part = Operand(whole.a.codes[:m], whole.a.element, whole.a.scales[:m], whole.a.scale, whole.a.vec)
        case = Case(kind, part, whole.b)
        result = case.run()
        if number % 5 == 0 or m in (64, 71, 127, 134):
            case.check(result)
    assert compiles() == before


def test_nothing_is_launched_for_no_rows() -> None:
    before = compiles()
    for m, batch in ((0, 1), (5, 0)):
        c, amax = Case.of(Kind("fp4_e8m0_16", E5M2, "kk", "m"), (m, 160, 96, batch)).run()
        assert tuple(c.shape) == (m, 160, batch)
        assert amax.item() == -np.inf
    assert compiles() == before  # not even loaded


def test_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_STRICT", "1")
    case = Case.of(MX, (65, 160, 80, 1))
    case.check(case.run(backend="auto"))


# --- class ----------------------------------------------------------------------------------------------------------


class Object:
    """A compiled object that writes into watched results of a caller."""

    def __init__(self, case: Case) -> None:
        self.kind, self.amax = case.kind, torch.zeros(1, device=DEVICE)
        given, guard = case.given(), self.result(case)
        self.op = GemmAmax(
            *given.values(), guard.array, self.amax, sf_vec_size=FORMATS[case.kind.name][2], backend=BACKEND
        )
        self.op.compile()

    def result(self, case: Case) -> Any:
        m, n, batch = case.a.codes.shape[0], case.b.codes.shape[0], case.a.codes.shape[2]
        return guarded_rows((m, n // 2 if case.kind.stored == E2M1 else n, batch), self.kind.c, self.kind.c_major)

    def execute(self, case: Case, preset: float = -np.inf) -> Any:
        """Execute; return results like the wrapper's after what lies around C has been checked."""
        guard = self.result(case)
        self.amax.fill_(preset)
        self.op.execute(*case.given().values(), guard.array, self.amax)
        guard.check_surroundings()
        return guard.array, self.amax.reshape(1, 1, 1)


@pytest.mark.parametrize("kind", [MX, KINDS[3], PACKS, NV], ids=str)
def test_class_takes_any_rows(kind: Kind) -> None:
    op, before = None, 0
    for m in reversed(kind.rows):
        case = Case.of(kind, (m, 352, 160, 2))
        op = op or Object(case)
        result = op.execute(case)
        case.check(result)
        assert_same(result, case.run())
        before = before or compiles()
    assert compiles() == before


def test_class_raises_what_amax_holds() -> None:
    case = Case.whole(NV, (129, 160, 96, 1))
    largest = np.abs(case.exact()[0]).max()
    op = Object(case)
    for preset, want in ((-np.inf, largest), (0.0, largest), (2 * largest, 2 * largest), (np.nan, np.nan)):
        np.testing.assert_array_equal(op.execute(case, preset)[1].item(), want)
    assert op.execute(Case.whole(NV, (0, 160, 96, 1)), 5.0)[1].item() == 5.0
    op.amax.fill_(-np.inf)
    for number in range(3):  # one maximum of several products
        part = Case.whole(NV, (100, 160, 96, 1), seed=number)
        op.op.execute(*part.given().values(), op.result(part).array, op.amax)
    parts = [np.abs(Case.whole(NV, (100, 160, 96, 1), seed=number).exact()[0]).max() for number in range(3)]
    assert op.amax.item() == max(parts)


# --- graphs, streams, repetition ------------------------------------------------------------------------------------


def assert_equal_in_numpy(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


def change(given: dict[str, Any], changed: dict[str, Any]) -> None:
    for name, x in given.items():
        as_bytes(x).copy_(as_bytes(changed[name]))


@pytest.mark.parametrize("kind", [MX, NV, PACKS], ids=str)
def test_graph_replays_with_changed_data(kind: Kind) -> None:
    case, other = (Case.whole(kind, (129, 160, 96, 1), seed=seed) for seed in (0, 1))
    given, changed = case.given(), other.given()
    replayed, eager = testing.cuda_graph_replay(lambda: there(case.run(given)), lambda: change(given, changed))
    assert_equal_in_numpy(replayed, eager)
    assert_equal_in_numpy(eager, [testing.to_numpy(x) for x in there(other.run())])


def test_class_in_a_graph() -> None:
    case, other = (Case.whole(MX, (65, 160, 96, 1), seed=seed) for seed in (0, 1))
    op, given, changed = Object(case), case.given(), other.given()
    c = op.result(case).array

    def call() -> Any:
        op.amax.fill_(-np.inf)
        op.op.execute(*given.values(), c, op.amax)
        return c, op.amax

    replayed, eager = testing.cuda_graph_replay(call, lambda: change(given, changed))
    assert_equal_in_numpy(replayed, eager)
    other.check_exactly((c, op.amax))


@pytest.mark.parametrize("kind", [MX, NV], ids=str)
def test_current_and_explicit_streams_are_followed(kind: Kind) -> None:
    case = Case.of(kind, (300, 352, 544, 1))
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


@pytest.mark.parametrize("kind", [MX, NV, PACKS], ids=str)
def test_results_are_bit_identical(kind: Kind) -> None:
    for shape in ((1000, 768, 512, 1), (40, 768, 512, 2)):
        case = Case.of(kind, shape)
        given = case.given()
        testing.repeat_identical(lambda case=case, given=given: there(case.run(given)), 20)


# --- frameworks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MX, NV, PACKS], ids=str)
def test_jax_calls_the_same_kernel(kind: Kind) -> None:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case = Case.of(kind, (130, 160, 96, 1))
    given = case.given()
    want, arrays = case.run(given), jax_arrays(given)
    options = {name: value for name, value in case.kind.options.items() if name != "c_major"}

    def call(arrays: Any) -> Any:
        return gemm_amax_jax(**arrays, **options, backend=BACKEND)

    for result in (call(arrays), jax.jit(call)(arrays), case.run(arrays)):
        assert_same_in_jax(result, want)


@pytest.mark.parametrize("kind", [MX, KINDS[1]], ids=str)
def test_torch_compile(kind: Kind) -> None:
    case, options = Case.of(kind, (144, 160, 96, 1)), kind.options

    @torch.compile(fullgraph=True)
    def model(given: Any) -> Any:
        return tuple(gemm_amax_wrapper(**given, **options, backend=BACKEND).values())

    assert_same(model(case.given()), case.run())


# --- far apart ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("kind", [MX, PACKS], ids=str)
def test_rows_far_apart(kind: Kind) -> None:
    """The last rows of A and of C lie beyond 2^31 elements."""
    case = Case.whole(kind, (3, 160, 96, 1))
    a, *others = case.given().values()
    a, amax = far_copy(a, FAR), torch.full((1,), -torch.inf, device=DEVICE)
    c = far_copy(case.run()["c_tensor"], FAR)
    op = GemmAmax(a, *others, c, amax, sf_vec_size=FORMATS[kind.name][2], backend=BACKEND)
    as_bytes(c).zero_()
    op(a, *others, c, amax)
    case.check_exactly((c, amax))


@pytest.mark.gpu(exclusive=True)
def test_batches_far_apart() -> None:
    """The last matrices of A and B start beyond 2^31 elements."""
    case = Case.whole(MX, (17, 160, 96, 3))
    a, b, sfa, sfb = case.given().values()
    far = {"a_tensor": far_copy(a, FAR, dimension=2), "b_tensor": far_copy(b, FAR, dimension=2)}
    case.check_exactly(case.run({**far, "sfa_tensor": sfa, "sfb_tensor": sfb}))
