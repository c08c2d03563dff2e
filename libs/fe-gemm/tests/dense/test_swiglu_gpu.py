"""``gemm_swiglu`` on a GPU: exact where sums and gates are, within its bounds elsewhere, every edge of the contract.

Few kernels, many shapes: M never selects a kernel, N only up to 128 and from thousands on, K from 1024 (8-bit operands
without scales 2048) on.
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
    placed,
    product,
    scales,
    shapes,
    sides,
    there,
)
from naive_gemm import E4M3, E5M2, E8M0, FORMATS, LARGEST, Operand, assert_quantised, cast, value_of
from swiglu_calls import activation, check

from fe_gemm import GemmSwiglu, gemm_swiglu_jax, gemm_swiglu_wrapper
from fe_runtime import testing
from fe_runtime.arrays import Device, capability

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

COLUMNS = (192, 320, 448)
"""N: no multiples of a tile."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


@dataclass(frozen=True)
class Kind:
    """What selects a kernel: dtype or format of the operands, their majors and C's, dtypes of AB12 and C."""

    name: str
    ab12: str = "bfloat16"
    c: str = "bfloat16"
    majors: str = "kk"
    c_major: str = "n"

    def __str__(self) -> str:
        return "-".join((self.name, self.ab12, self.c, self.majors, self.c_major))

    @property
    def rows(self) -> tuple[int, ...]:
        """M that the majors allow."""
        return EVEN_ROWS if self.majors[0] == "m" or self.c_major == "m" else ROWS_OF_ALL_KINDS

    @property
    def options(self) -> dict[str, Any]:
        found = {"ab12_dtype": self.ab12, "c_dtype": self.c, "c_major": self.c_major}
        return found | ({"sf_vec_size": FORMATS[self.name][2]} if self.name in FORMATS else {})


@dataclass
class Case:
    """Operands of one problem."""

    kind: Kind
    a: Any
    b: Any
    alpha: float

    @classmethod
    def of(cls, kind: Kind, shape: tuple[int, int, int, int], size: float = 1.0, alpha: float = 1.0) -> Case:
        a, b, rest = sides(kind.name, shape, size)
        return cls(kind, a, b, alpha * rest)

    @classmethod
    def whole(cls, kind: Kind, shape: tuple[int, int, int, int], seed: int = 0) -> Case:
        """Return a case with exact sums, whose gates are 0 or so large that their sigmoid is 0 or 1 in float32."""
        a, b, _ = sides(kind.name, shape, whole=True, seed=seed)
        return cls(kind, a, b, 512.0)

    @property
    def extents(self) -> tuple[int, int, int]:
        """M, N, L."""
        a, b = self.a.exact().shape, self.b.exact().shape
        return a[0], b[0], a[2]

    def given(self, pad: int = 0, outside: float = np.nan, seed: int = 0, form: str = "logical") -> dict[str, Any]:
        """Return the operands on the GPU by name, with other numbers around them; ``seed``: of padding of scales."""
        a, b = (
            placed(side.elements(major if major == "k" else "rows"), major, pad, outside)
            for side, major in zip((self.a, self.b), self.kind.majors, strict=True)
        )
        more = scales(self.a, self.b, seed, form) if isinstance(self.a, Operand) else {}
        return {"a_tensor": a, "b_tensor": b, **more}

    def run(self, given: dict[str, Any] | None = None, **options: Any) -> Any:
        """Call the wrapper; it must be a kernel that answers."""
        given = self.given() if given is None else given
        return gemm_swiglu_wrapper(**given, **{"alpha": self.alpha, "backend": BACKEND, **self.kind.options, **options})

    def exact(self) -> tuple[Any, Any]:
        """Return the product in float64, and the error allowed to it."""
        sums, error = product(self.a.exact(), self.b.exact(), self.kind.name)
        alpha = float(np.float32(self.alpha))
        return alpha * sums, abs(alpha) * error

    def check(self, result: Any) -> None:
        """Compare results with float64, and the maximum if there has to be one."""
        has_amax = self.kind.name in FORMATS and "fp4" in self.kind.name and self.kind.c == "bfloat16"
        assert (result["amax_tensor"] is not None) == has_amax
        assert result["sfc_tensor"] is None
        check([*map(host, result)], *self.exact())

    def check_exactly(self, result: Any) -> None:
        """Compare the results of whole numbers with float64, rounded once."""
        x, _ = self.exact()
        c = cast(activation(x), "float32")
        np.testing.assert_array_equal(value_of(host(result["ab12_tensor"])), cast(x, self.kind.ab12))
        np.testing.assert_array_equal(value_of(host(result["c_tensor"])), cast(c, self.kind.c))
        if result["amax_tensor"] is not None:
            assert result["amax_tensor"].item() == np.abs(c).max()


BF16 = Kind("bfloat16")
UNSCALED = [
    BF16,
    Kind("bfloat16", "float32", "float16", "mk", "n"),
    Kind("bfloat16", "float16", "bfloat16", "kn", "n"),
    Kind("bfloat16", E4M3, "float16", "mn", "n"),
    Kind("bfloat16", E5M2, "bfloat16", "kk", "m"),
    Kind("bfloat16", "float32", "bfloat16", "mk", "m"),
    Kind("bfloat16", "float16", "float16", "kn", "m"),
    Kind("bfloat16", "bfloat16", "float16", "mn", "m"),
    Kind("float16", "float32", "float16", "kk", "n"),
    Kind("float16", "bfloat16", "bfloat16", "mn", "m"),
    Kind("float16", E5M2, "float16", "mk", "n"),
    Kind(E4M3, "bfloat16", "bfloat16", "kk", "n"),
    Kind(E4M3, "float32", "float16", "kk", "m"),
    Kind(E5M2, E4M3, "bfloat16", "kk", "n"),
    Kind(E5M2, "float16", "float16", "kk", "m"),
    Kind(E4M3, "bfloat16", "bfloat16", "mk"),
    Kind(E5M2, "float32", "float16", "kn", "m"),
    Kind("float32", "float32", "float16"),
    Kind("float32", "bfloat16", "bfloat16", "mn", "m"),
]
SCALED = [
    Kind("mxfp8_e4m3"),
    Kind("mxfp8_e4m3", "float32", "float32", "mn", "n"),
    Kind("mxfp8_e4m3", E4M3, "float16", "kk", "m"),
    Kind("mxfp8_e5m2", "float32", "float16", "mk", "n"),
    Kind("mxfp8_e5m2", E5M2, "float32", "kn", "m"),
    Kind("mxfp4"),
    Kind("mxfp4", E4M3, "float32"),
    Kind("nvfp4"),
    Kind("nvfp4", "float32", "float16"),
    Kind("fp4_e8m0_16", "float16", "bfloat16"),
]
QUANTISED = [
    Kind("mxfp8_e4m3", "bfloat16", E4M3),
    Kind("mxfp8_e5m2", "float32", E5M2, "mn", "m"),
    Kind("mxfp4", E4M3, E4M3),
]


@pytest.mark.parametrize("kind", [*UNSCALED, *SCALED], ids=str)
def test_every_operand_and_result(kind: Kind) -> None:
    """Sums near 1, results near 1e-5, and sums near 1e-5; where fp8 has no such numbers, 1/4 instead."""
    sizes = (1.0, 0.25) if kind.ab12 in LARGEST else (1.0, 4e-3, 1e-5)
    for number, shape in enumerate(shapes(kind.name, COLUMNS, kind.rows)):
        size, alpha = sizes[number % len(sizes)], (1.0, -0.7, 1.0)[number % 3]
        case = Case.of(kind, shape, size, alpha)
        case.check(case.run(case.given(pad=16 * (number % 4), outside=(np.nan, 1e4)[number % 2])))
    for shape in [*shapes(kind.name, COLUMNS, kind.rows)][-2:]:
        case = Case.whole(kind, shape)
        case.check_exactly(case.run())


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_quantised_c_has_the_bytes_of_the_recipe(kind: Kind) -> None:
    for number, shape in enumerate(shapes(kind.name, COLUMNS, kind.rows)):
        case, norm_const = Case.whole(kind, shape), (1.0, 0.3)[number % 2]
        if shape[0] > 3:
            case.a.codes[3] = 0  # blocks of zeros
        given = case.given(pad=16 * (number % 3), seed=number)
        result = case.run(given, norm_const_tensor=torch.tensor([norm_const], device=DEVICE))
        x, _ = case.exact()
        c = cast(activation(x), "float32")
        np.testing.assert_array_equal(value_of(host(result["ab12_tensor"])), cast(x, kind.ab12))
        assert result["amax_tensor"] is None
        assert_quantised(*_codes(result, c), kind.c, norm_const)


def _codes(result: Any, c: Any) -> tuple[Any, Any, Any]:
    """Return codes, scales and what they stand for; the sign of a zero is that of its factors, and not compared."""
    codes = host(result["c_tensor"]).view(np.uint8)
    assert str(result["sfc_tensor"].dtype).endswith(E8M0)
    return np.where(codes == 0x80, 0, codes), host(result["sfc_tensor"]), np.where(np.abs(c) < 1e-6, 0, c)


DEEP = [
    (BF16, (65, 64, 40, 3)),
    (BF16, (17, 128, 1040, 1)),
    (BF16, (129, 320, 1544, 1)),
    (BF16, (40, 16384, 64, 1)),
    (Kind(E4M3), (33, 64, 144, 2)),
    (Kind(E4M3), (17, 320, 2064, 1)),
    (Kind("nvfp4"), (65, 64, 96, 1)),
    (Kind("mxfp8_e4m3"), (129, 192, 1072, 1)),
]


@pytest.mark.parametrize(("kind", "shape"), DEEP, ids=str)
def test_narrow_deep_and_wide_products(kind: Kind, shape: tuple[int, int, int, int]) -> None:
    """Where other tiles are chosen; M is varied around that of the problem."""
    for m in (shape[0], 1, 128, 200):
        case = Case.of(kind, (m, *shape[1:]))
        case.check(case.run())


# --- NaN, padding, what never matters -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "mxfp4"])
def test_a_nan_scale_spoils_its_row_or_column_only(name: str) -> None:
    case = Case.whole(Kind(name), (130, 192, 96, 2))
    nan = 0x7F if case.a.scale == E4M3 else 0xFF
    clean = [host(x) for x in [*case.run()][:2]]
    case.a.scales[7, 1, 0] = nan
    case.b.scales[64 + 32 + 5, 2, 1] = nan  # the gate of column 37
    result = case.run()
    wrong = [np.zeros(x.shape, bool) for x in clean]
    for x, column in zip(wrong, (64 + 32 + 5, 32 + 5), strict=True):
        x[7, :, 0], x[:, column, 1] = True, True
    for got, want, nans in zip(map(host, result), clean, wrong, strict=False):
        values = got.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(values), nans)
        np.testing.assert_array_equal(values[~nans], want.astype(np.float32)[~nans])
    assert result["amax_tensor"] is None or np.isnan(result["amax_tensor"].item())


def test_nan_in_a_quantised_block_counts_nowhere_else() -> None:
    kind = QUANTISED[0]
    case = Case.whole(kind, (65, 192, 96, 1))
    case.a.scales[7, 1, 0], case.b.scales[64 + 3, 0, 0] = 0xFF, 0xFF  # a row; up of column 35
    result = case.run(norm_const_tensor=torch.ones(1, 1, device=DEVICE))
    x, _ = case.exact()
    with np.errstate(invalid="ignore"):
        c = cast(activation(x), "float32")
    assert np.isnan(c[7]).all()
    codes, sfc, c = _codes(result, c)
    assert_quantised(np.where(np.isnan(c), codes & 0x7F, codes), sfc, c, kind.c, 1.0)


@pytest.mark.parametrize("kind", [Kind("mxfp8_e4m3"), Kind("nvfp4"), QUANTISED[0]], ids=str)
def test_padding_of_the_scales_never_matters(kind: Kind) -> None:
    case = Case.of(kind, (130, 192, 96, 2), alpha=0.3)
    more = {"norm_const_tensor": torch.ones(1, device=DEVICE)} if kind in QUANTISED else {}
    first = case.run(case.given(), **more)
    for seed, form in ((1, "logical"), (2, "physical")):
        assert_same(case.run(case.given(seed=seed, form=form), **more), first)


def test_spellings_of_operands_give_the_same() -> None:
    """Pairs of e2m1 as torch's own or as bytes, scales of e8m0 as bytes, hints."""
    case = Case.of(Kind("mxfp4"), (65, 192, 96, 1))
    given = case.given()
    want = case.run(given)
    own = {name: given[name].view(torch.float4_e2m1fn_x2) for name in ("a_tensor", "b_tensor")}
    as_bytes = {name: given[name].view(torch.uint8) for name in ("sfa_tensor", "sfb_tensor")}
    before = compiles()
    for other in ({**given, **own}, {**given, **as_bytes}):
        assert_same(case.run(other), want)
    assert_same(case.run(given, mma_tiler_mn=(256, 256), vector_f32=True, ab12_stages=2), want)
    assert compiles() == before


def test_half_precision_accumulator_may_be_better() -> None:
    for kind in (UNSCALED[9], UNSCALED[11]):
        case = Case.of(kind, (80, 320, 272, 1))
        x, error = case.exact()
        _, sizes = product(case.a.exact(), case.b.exact(), E4M3)  # 2^-11 of the magnitudes
        check([*map(host, case.run(acc_dtype="float16"))], x, error + abs(case.alpha) * 4 * sizes)


# --- runtime values -------------------------------------------------------------------------------------------------


def test_any_rows_and_any_alpha_compile_once() -> None:
    case = Case.of(BF16, (40 * 7, 320, 72, 1))
    given = case.given()
    case.run(given)
    before = compiles()
    for number in range(40):
        m = 1 + 7 * number
        part = Case(BF16, type(case.a)(case.a.values[:m]), case.b, 0.01 * (number - 20))
        result = part.run({**given, "a_tensor": given["a_tensor"][:m]})
        if number % 5 == 0 or m in (64, 71, 127, 134):
            part.check(result)
    assert compiles() == before


def test_nothing_is_launched_for_no_rows() -> None:
    before = compiles()
    for kind in (Kind("float16", "bfloat16", "float16", "kn"), Kind("nvfp4", "float16", "bfloat16")):
        for m, batch in ((0, 1), (5, 0)):
            result = Case.of(kind, (m, 192, 96, batch)).run()
            assert tuple(result["ab12_tensor"].shape) == (m, 192, batch)
            assert tuple(result["c_tensor"].shape) == (m, 96, batch)
            if kind.name == "nvfp4":
                assert result["amax_tensor"].item() == -np.inf
    assert compiles() == before  # not even loaded


@pytest.mark.parametrize("kind", [BF16, UNSCALED[15], UNSCALED[17], SCALED[0]], ids=str)
def test_strict_mode(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_STRICT", "1")
    case = Case.of(kind, (80, 192, 80, 1))
    case.check(case.run(backend="auto"))


# --- class ----------------------------------------------------------------------------------------------------------


class Object:
    """A compiled object that writes into watched results of a caller."""

    def __init__(self, case: Case, norm_const: Any = None, amax: Any = None) -> None:
        self.norm_const, self.amax = norm_const, amax
        given, (guards, sfc) = case.given(), self.results(case)
        samples = {**given, "sfc_tensor": sfc, "norm_const_tensor": norm_const, "amax_tensor": amax}
        a, b = samples.pop("a_tensor"), samples.pop("b_tensor")
        self.op = GemmSwiglu(
            a,
            b,
            *(guard.array for guard in guards),
            **{f"sample_{name.removesuffix('_tensor')}": x for name, x in samples.items()},
            sf_vec_size=case.kind.options.get("sf_vec_size", 16),
            backend=BACKEND,
        )
        self.op.compile()

    def results(self, case: Case) -> tuple[Any, Any]:
        """Return watched AB12 and C, and scales of C where it is quantised."""
        kind, (m, n, batch) = case.kind, case.extents
        guards = [
            guarded_rows((m, columns, batch), dtype, kind.c_major)
            for columns, dtype in ((n, kind.ab12), (n // 2, kind.c))
        ]
        if kind.c not in LARGEST:
            return guards, None
        shape = (batch, -(-m // 128), -(-n // 2 // 128), 32, 4, 4)
        return guards, torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)

    def execute(self, case: Case, **options: Any) -> Any:
        """Execute; return results like the wrapper's after what lies around them has been checked."""
        given, (guards, sfc) = case.given(), self.results(case)
        ab12, c = (guard.array for guard in guards)
        more = {"sfc_tensor": sfc, "norm_const_tensor": self.norm_const, "amax_tensor": self.amax}
        self.op.execute(given.pop("a_tensor"), given.pop("b_tensor"), ab12, c, **given, **more, **options)
        for guard in guards:
            guard.check_surroundings()
        return ab12, c, None if sfc is None else sfc.permute(3, 4, 1, 5, 2, 0), self.amax


@pytest.mark.parametrize("kind", [BF16, UNSCALED[5], SCALED[0]], ids=str)
def test_class_takes_any_rows_and_alpha(kind: Kind) -> None:
    """The object multiplies by the alpha of each execution, 1 if there is none."""
    op, before = None, 0
    for number, m in enumerate(reversed(kind.rows)):
        case = Case.of(kind, (m, 320, 144, 2))
        case.alpha = (1.0, -0.7)[number % 2]
        op = op or Object(case)
        ab12, c, *_ = op.execute(case, **({} if case.alpha == 1.0 else {"alpha": case.alpha}))
        assert_same((ab12, c), [*case.run()][:2])
        before = before or compiles()
    assert compiles() == before


def test_class_quantises() -> None:
    kind, norm_const = QUANTISED[0], torch.full((1, 1), 0.3, device=DEVICE)
    op = Object(Case.whole(kind, (300, 192, 96, 1)), norm_const)
    for m in (300, 1, 129, 64):
        case = Case.whole(kind, (m, 192, 96, 1))
        ab12, c, sfc, _ = op.execute(case, alpha=case.alpha)
        want = case.run(norm_const_tensor=norm_const)
        assert_same((ab12, c), [*want][:2])
        assert torch.equal(bits(sfc), bits(want["sfc_tensor"]))


@pytest.mark.parametrize("kind", [SCALED[7], SCALED[0]], ids=str)
def test_class_raises_what_amax_holds(kind: Kind) -> None:
    """For FP4 operands, and for any others with scales where the sample asks for it."""
    case = Case.whole(kind, (129, 192, 96, 1))
    largest = np.abs(cast(activation(case.exact()[0]), "float32")).max()
    amax = torch.zeros(1, 1, 1, 1, device=DEVICE)
    op = Object(case, amax=amax)
    for preset, want in ((-np.inf, largest), (0.0, largest), (2 * largest, 2 * largest), (np.nan, np.nan)):
        amax.fill_(preset)
        op.execute(case, alpha=case.alpha)
        np.testing.assert_array_equal(amax.item(), want)
    amax.fill_(5.0)
    op.execute(Case.whole(kind, (0, 192, 96, 1)))
    assert amax.item() == 5.0


# --- graphs, streams, repetition ------------------------------------------------------------------------------------


def norm_const_for(kind: Kind) -> dict[str, Any]:
    return {"norm_const_tensor": torch.full((1,), 0.3, device=DEVICE)} if kind.c in LARGEST else {}


def assert_equal_in_numpy(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("kind", [BF16, SCALED[7], QUANTISED[0]], ids=str)
def test_graph_replays_with_changed_data(kind: Kind) -> None:
    case, other = (Case.whole(kind, (129, 192, 96, 1), seed=seed) for seed in (0, 1))
    given, changed, more = case.given(), other.given(), norm_const_for(kind)

    def change() -> None:
        for name, x in given.items():
            as_bytes(x).copy_(as_bytes(changed[name]))

    replayed, eager = testing.cuda_graph_replay(lambda: there(case.run(given, **more)), change)
    assert_equal_in_numpy(replayed, eager)
    assert_equal_in_numpy(eager, [testing.to_numpy(x) for x in there(other.run(**more))])


def test_class_in_a_graph() -> None:
    case, other = (Case.whole(BF16, (65, 192, 96, 1), seed=seed) for seed in (0, 1))
    op, given, changed = Object(case), case.given(), other.given()
    ab12, c = (guard.array for guard in op.results(case)[0])

    def call() -> Any:
        op.op.execute(given["a_tensor"], given["b_tensor"], ab12, c, alpha=case.alpha)
        return ab12, c

    replayed, eager = testing.cuda_graph_replay(call, lambda: [x.copy_(changed[name]) for name, x in given.items()])
    assert_equal_in_numpy(replayed, eager)
    other.check_exactly({"ab12_tensor": ab12, "c_tensor": c, "amax_tensor": None})


@pytest.mark.parametrize("kind", [BF16, SCALED[7]], ids=str)
def test_current_and_explicit_streams_are_followed(kind: Kind) -> None:
    case = Case.of(kind, (300, 320, 544, 1))
    given = case.given()
    want = [testing.to_numpy(x) for x in there(case.run(given))]
    late = {**given, "a_tensor": torch.zeros_like(given["a_tensor"])}
    for current in (True, False):
        got = testing.run_on_side_stream(
            lambda stream, given=not current: there(case.run(late, stream=stream if given else None)),
            produce=lambda: late["a_tensor"].copy_(given["a_tensor"]),
            current=current,
        )
        assert_equal_in_numpy(got, want)


@pytest.mark.parametrize("kind", [BF16, UNSCALED[11], SCALED[7], QUANTISED[0]], ids=str)
def test_results_are_bit_identical(kind: Kind) -> None:
    for shape in ((1000, 768, 512, 1), (40, 768, 512, 2)):
        case, more = Case.of(kind, shape), norm_const_for(kind)
        given = case.given()
        testing.repeat_identical(lambda case=case, given=given, more=more: there(case.run(given, **more)), 20)


# --- frameworks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BF16, SCALED[0], SCALED[7], QUANTISED[0]], ids=str)
def test_jax_calls_the_same_kernel(kind: Kind) -> None:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case = Case.of(kind, (130, 192, 96, 1))
    given = case.given() | norm_const_for(kind)
    want, arrays = case.run(given), jax_arrays(given)
    options = {name: value for name, value in case.kind.options.items() if name != "c_major"}

    def call(arrays: Any) -> Any:
        return gemm_swiglu_jax(**arrays, alpha=case.alpha, **options, all_outputs=True, backend=BACKEND)

    for result in (call(arrays), jax.jit(call)(arrays), case.run(arrays)):
        assert_same_in_jax(result, want)
    assert_same_in_jax(gemm_swiglu_jax(**arrays, alpha=case.alpha, **options), [*want][:2])


@pytest.mark.parametrize("kind", [BF16, SCALED[7]], ids=str)
def test_torch_compile(kind: Kind) -> None:
    case = Case.of(kind, (130, 192, 96, 1))
    alpha, options = case.alpha, kind.options

    @torch.compile(fullgraph=True)
    def model(given: Any) -> Any:
        return tuple(gemm_swiglu_wrapper(**given, alpha=alpha, **options, backend=BACKEND).values())

    assert_same(model(case.given()), case.run())


# --- far apart ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("kind", [BF16, SCALED[0]], ids=str)
def test_rows_far_apart(kind: Kind) -> None:
    """The last rows of A and of the results lie beyond 2^31 elements."""
    case = Case.whole(kind, (3, 192, 96, 1))
    given = case.given()
    given["a_tensor"] = far_copy(given["a_tensor"], FAR)
    results = [far_copy(x, FAR) for x in [*case.run(given)][:2]]
    scaled = {f"sample_{name.removesuffix('_tensor')}": x for name, x in given.items() if name.startswith("sf")}
    a, b = given.pop("a_tensor"), given.pop("b_tensor")
    op = GemmSwiglu(a, b, *results, **scaled, sf_vec_size=32, backend=BACKEND)
    for x in results:
        x.zero_()
    op(a, b, *results, **given, alpha=case.alpha)
    case.check_exactly({"ab12_tensor": results[0], "c_tensor": results[1], "amax_tensor": None})


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("kind", [BF16, SCALED[0]], ids=str)
def test_batches_far_apart(kind: Kind) -> None:
    """The last matrices of A and B start beyond 2^31 elements."""
    case = Case.whole(kind, (17, 192, 96, 3))
    given = case.given()
    for name in ("a_tensor", "b_tensor"):
        given[name] = far_copy(given[name], FAR, dimension=2)
    case.check_exactly(case.run(given))
