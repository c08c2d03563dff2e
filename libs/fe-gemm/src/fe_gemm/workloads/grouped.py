"""The grouped products as the ``fe`` command sees them.

A case has E experts of M rows each (which need not be a multiple of any tile). Its dtype is ``bfloat16``, or ``mxfp8``:
float8_e4m3fn with e8m0 scales of 32.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fe_runtime import formats
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from .operands import allowed_in, as_dtype

__all__ = ["GROUPED_GEMM", "GROUPED_GEMM_DGLU", "GROUPED_GEMM_GLU", "GROUPED_GEMM_WGRAD"]

BLOCK = 32
"""Columns of a product that are all gate or all up; elements of a scale."""
EPILOGUE = 2.0**-18
"""Share of a result that the fp32 arithmetic after the product may change."""

Plain = Callable[[Any, str, Case, Arrays], dict[str, Any]]
"""``plain(library, framework, case, arrays)``: the results by name."""


# --- arrays -----------------------------------------------------------------------------------------------------------


def _is_scaled(case: Case) -> bool:
    return case.dtype == "mxfp8"


def _rows(case: Case) -> int:
    return case.dims["E"] * case.dims["M"]


def _spans(case: Case) -> Iterator[tuple[int, slice]]:
    """Yield each expert with its rows."""
    m = case.dims["M"]
    return ((e, slice(e * m, (e + 1) * m)) for e in range(case.dims["E"]))


def _operands(case: Case) -> Operands:
    experts, n, k = (case.dims[letter] for letter in ("E", "N", "K"))
    dtype = "float8_e4m3fn" if _is_scaled(case) else "bfloat16"
    known: dict[str, tuple[tuple[int, ...], str]] = {
        "a_tensor": ((_rows(case), k), dtype),
        "padded_offsets": ((experts,), "int32"),
        "alpha_tensor": ((experts,), "float32"),
        "b_tensor": ((experts, n, k), dtype),
        "prob_tensor": ((_rows(case),), "float32"),
    }
    if _is_scaled(case):
        count = formats.scales_per_row(k, BLOCK)
        known["sfa_tensor"] = formats.scale_shape(_rows(case), count), "float8_e8m0fnu"
        known["sfb_tensor"] = formats.scale_shape(n, count, experts), "float8_e8m0fnu"
    return known


def _inputs(case: Case, source: Source) -> Arrays:
    experts, n, k = (case.dims[letter] for letter in ("E", "N", "K"))
    ends = (np.arange(experts) + 1) * case.dims["M"]
    arrays: dict[str, Any] = {
        "padded_offsets": source.array(ends.astype(np.int32)),
        "alpha_tensor": source.weights((experts,), "float32"),
        "prob_tensor": source.weights((_rows(case),), "float32"),
    }
    if not _is_scaled(case):
        arrays["a_tensor"] = source.activations((_rows(case), k), "bfloat16")
        arrays["b_tensor"] = source.normal((experts, n, k), "bfloat16", k**-0.5)
        return arrays
    a, b = source.activations((_rows(case), k), "float32"), source.normal((experts * n, k), "float32", k**-0.5)
    arrays["a_tensor"], scales = formats.quantize_mx(a, "float8_e4m3fn")
    arrays["sfa_tensor"] = formats.to_blocked(scales[None])
    elements, scales = formats.quantize_mx(b, "float8_e4m3fn")
    arrays["b_tensor"] = elements.reshape(experts, n, k)
    arrays["sfb_tensor"] = formats.to_blocked(scales.reshape(experts, n, k // BLOCK))
    return arrays


def _gradient_operands(case: Case) -> Operands:
    known = {**_operands(case), "c_tensor": ((_rows(case), 2 * case.dims["N"]), "bfloat16")}
    return {**known, "beta_tensor": ((case.dims["E"],), "float32")}


def _gradient_inputs(case: Case, source: Source) -> Arrays:
    made = dict(_inputs(case, source))
    made["c_tensor"] = source.normal((_rows(case), 2 * case.dims["N"]), "bfloat16")
    made["beta_tensor"] = source.weights((case.dims["E"],), "float32")
    return made


def _wgrad_operands(case: Case) -> Operands:
    return {
        "a_tensor": ((case.dims["N"], _rows(case)), "bfloat16"),
        "b_tensor": ((_rows(case), case.dims["K"]), "bfloat16"),
        "offsets_tensor": ((case.dims["E"],), "int32"),
    }


def _wgrad_strides(case: Case) -> Mapping[str, tuple[int, ...]]:
    return {"a_tensor": (1, case.dims["N"])}


def _wgrad_inputs(case: Case, source: Source) -> Arrays:
    gradients = source.normal((_rows(case), case.dims["N"]), "bfloat16")
    ends = (np.arange(case.dims["E"]) + 1) * case.dims["M"]
    return {
        "a_tensor": gradients.T,
        "b_tensor": source.activations((_rows(case), case.dims["K"]), "bfloat16"),
        "offsets_tensor": source.array(ends.astype(np.int32)),
    }


# --- formulas, in functions that numpy, torch and JAX all have --------------------------------------------------------


def _dequantised(framework: str, case: Case, elements: Any, blocked: Any, dtype: str) -> Any:
    """Return elements times scales, both of leading dimensions, in a dtype; bfloat16 operands as they are."""
    values = as_dtype(elements, dtype, framework)
    if not _is_scaled(case):
        return values
    batch, row_tiles, scale_tiles, *_ = blocked.shape
    factors = as_dtype(blocked, "float32", framework)
    order = (0, 1, 4, 3, 2, 5)
    plain = factors.permute(order) if framework == "torch" else factors.transpose(order)
    shaped = values.reshape(batch, -1, values.shape[-1] // BLOCK, BLOCK)
    plain = plain.reshape(batch, 128 * row_tiles, 4 * scale_tiles)[:, : shaped.shape[1], : shaped.shape[2], None]
    return (shaped * as_dtype(plain, dtype, framework)).reshape(elements.shape)


def _products(library: Any, framework: str, case: Case, arrays: Arrays) -> Any:
    """Return ``alpha * A B_e^T`` (E M, N) in float32, expert by expert."""
    dtype = "float32" if framework == "numpy" else "bfloat16"
    a = _dequantised(framework, case, arrays["a_tensor"], arrays.get("sfa_tensor"), dtype)
    b = _dequantised(framework, case, arrays["b_tensor"], arrays.get("sfb_tensor"), dtype)
    parts = [as_dtype(a[rows] @ b[e].T, "float32", framework) * arrays["alpha_tensor"][e] for e, rows in _spans(case)]
    return library.concatenate(parts)


def _separated(x: Any) -> tuple[Any, Any]:
    pairs = x.reshape(x.shape[0], -1, 2, BLOCK)
    gate, up = pairs[:, :, 0], pairs[:, :, 1]
    return gate.reshape(x.shape[0], -1), up.reshape(x.shape[0], -1)


def _interleaved(library: Any, gate: Any, up: Any) -> Any:
    parts = [part.reshape(part.shape[0], -1, 1, BLOCK) for part in (gate, up)]
    return library.concatenate(parts, 2).reshape(gate.shape[0], -1)


def _unfused(library: Any, framework: str, case: Case, arrays: Arrays) -> dict[str, Any]:
    d = _products(library, framework, case, arrays) * arrays["prob_tensor"][:, None]
    return {"d_tensor": as_dtype(d, "bfloat16", framework)}


def _glu(library: Any, framework: str, case: Case, arrays: Arrays) -> dict[str, Any]:
    h = _products(library, framework, case, arrays)
    gate, up = _separated(h)
    x = up * (gate / (1 + library.exp(-gate))) * arrays["prob_tensor"][:, None]
    results = {"d_tensor": as_dtype(x, "bfloat16", framework)}
    if case.options.get("generate_c") or _is_scaled(case):
        results["c_tensor"] = as_dtype(h, "bfloat16", framework)
    if _is_scaled(case):
        maxima = [library.abs(x[rows]).max().reshape(1, 1) for _, rows in _spans(case)]
        results["amax_tensor"] = library.concatenate(maxima)
    return results


def _dglu(library: Any, framework: str, case: Case, arrays: Arrays) -> dict[str, Any]:
    r, c = _products(library, framework, case, arrays), as_dtype(arrays["c_tensor"], "float32", framework)
    alpha, beta = (_of_rows(library, case, arrays[name]) for name in ("alpha_tensor", "beta_tensor"))
    r, prob = r * alpha, arrays["prob_tensor"][:, None]
    gate, up = _separated(c * beta)
    s = 1 / (1 + library.exp(-gate))
    d = _interleaved(library, r * prob * up * s * (1 + gate * (1 - s)), r * prob * gate * s)
    return {"d_row_tensor": as_dtype(d, "bfloat16", framework), "dprob_tensor": (r * gate * s * up).sum(-1)}


def _wgrad(library: Any, framework: str, case: Case, arrays: Arrays) -> dict[str, Any]:
    dtype = "float32" if framework == "numpy" else "bfloat16"
    a, b = (as_dtype(arrays[name], dtype, framework) for name in ("a_tensor", "b_tensor"))
    return {
        "wgrad_tensor": as_dtype(
            library.stack([a[:, tokens] @ b[tokens] for _, tokens in _spans(case)]), "bfloat16", framework
        )
    }


def _of_rows(library: Any, case: Case, values: Any) -> Any:
    """Return the experts' numbers for each row, (E M, 1)."""
    return library.stack([values] * case.dims["M"], 1).reshape(-1, 1)


# --- the same in float64, and what rounding may change ----------------------------------------------------------------


def _exact(case: Case, arrays: Arrays) -> tuple[Any, Any]:
    """Return the products in float64 and how far the accumulator may be off."""
    a = _dequantised("numpy", case, arrays["a_tensor"], arrays.get("sfa_tensor"), "float64")
    b = _dequantised("numpy", case, arrays["b_tensor"], arrays.get("sfb_tensor"), "float64")
    alpha = arrays["alpha_tensor"].astype(np.float64)
    share = 2.0**-18 + case.dims["K"] * 2.0**-28
    x = np.concatenate([a[rows] @ b[e].T * alpha[e] for e, rows in _spans(case)])
    size = np.concatenate([abs(a[rows]) @ abs(b[e]).T * abs(alpha[e]) for e, rows in _spans(case)])
    return x, share * size


def _joined(results: Mapping[str, tuple[Any, Any, str]]) -> Expected:
    values = [np.ravel(value) for value, _, _ in results.values()]
    allowed = [np.ravel(allowed_in(value, error, dtype)) for value, error, dtype in results.values()]
    return Expected(np.concatenate(values), np.concatenate(allowed))


def _expected_unfused(case: Case, arrays: Arrays) -> Expected:
    x, error = _exact(case, arrays)
    prob = arrays["prob_tensor"].astype(np.float64)[:, None]
    return _joined({"d": (x * prob, error * abs(prob) + EPILOGUE * abs(x * prob), "bfloat16")})


def _expected_glu(case: Case, arrays: Arrays) -> Expected:
    h, error = _exact(case, arrays)
    prob = arrays["prob_tensor"].astype(np.float64)[:, None]
    gate, up = _separated(h)
    off_gate, off_up = _separated(error)
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-gate))
    x = up * gate * s * prob
    off = (abs(gate * s) * off_up + abs(up) * 1.1 * off_gate + 1.1 * off_gate * off_up) * abs(prob)
    off = off + EPILOGUE * abs(x) + 2.0**-119 * abs(up)
    known = {"d": (x, off, "bfloat16")}
    if case.options.get("generate_c") or _is_scaled(case):
        known = {"c": (h, error, "bfloat16"), **known}
    if _is_scaled(case):
        largest = np.array([abs(x[rows]).max() for _, rows in _spans(case)])
        slack = np.array([off[rows].max() for _, rows in _spans(case)])
        known["amax"] = largest, slack + 2.0**-16 * largest, "float32"
    return _joined(known)


def _expected_dglu(case: Case, arrays: Arrays) -> Expected:
    r, error = _exact(case, arrays)
    each = case.dims["M"]
    alpha, beta = (np.repeat(arrays[k].astype(np.float64), each)[:, None] for k in ("alpha_tensor", "beta_tensor"))
    r, error, prob = r * alpha, error * abs(alpha), arrays["prob_tensor"].astype(np.float64)[:, None]
    gate, up = _separated(arrays["c_tensor"].astype(np.float64) * beta)
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-gate))
    slopes = up * s * (1 + gate * (1 - s)), gate * s
    d = _interleaved(np, *(r * prob * slope for slope in slopes))
    size = _interleaved(np, *((error + 2.0**-16 * abs(r)) * abs(prob * slope) for slope in slopes))
    sums, slack = (r * slopes[1] * up).sum(-1), ((error + 2.0**-16 * abs(r)) * abs(slopes[1] * up)).sum(-1)
    return _joined({"d": (d, size + 2.0**-20, "bfloat16"), "dprob": (sums, slack + 2.0**-20, "float32")})


def _expected_wgrad(case: Case, arrays: Arrays) -> Expected:
    a, b = (arrays[name].astype(np.float64) for name in ("a_tensor", "b_tensor"))
    w = np.stack([a[:, tokens] @ b[tokens] for _, tokens in _spans(case)])
    size = np.stack([abs(a[:, tokens]) @ abs(b[tokens]) for _, tokens in _spans(case)])
    return _joined({"w": (w, (2.0**-18 + case.dims["M"] * 2.0**-28) * size, "bfloat16")})


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([np.asarray(result).astype(np.float64).ravel() for result in outputs.values()])


# --- plain expressions and peers --------------------------------------------------------------------------------------


def _plain(framework: str, formula: Plain) -> Callable[[Case, Arrays], Any]:
    def run(case: Case, arrays: Arrays) -> Any:
        library: Any = (
            importlib.import_module("jax").numpy if framework == "jax" else importlib.import_module(framework)
        )
        with np.errstate(over="ignore"):  # of exp, far from any gate
            return formula(library, framework, case, arrays)

    return _jitted(run) if framework == "jax" else run


def _jitted(run: Callable[[Case, Arrays], Any]) -> Callable[[Case, Arrays], Any]:
    made: dict[str, Any] = {}

    def call(case: Case, arrays: Arrays) -> Any:
        key = f"{case.shape} {case.format}"
        if key not in made:
            jax: Any = importlib.import_module("jax")
            made[key] = jax.jit(functools.partial(run, case))
        return made[key](dict(arrays))

    return call


def _grouped_mm(case: Case) -> Callable[[Arrays], Any]:
    """Return torch's grouped product of bfloat16 operands, dequantised before."""
    torch: Any = importlib.import_module("torch")
    ready: dict[int, Any] = {}

    def call(arrays: Arrays) -> Any:
        key = id(arrays["a_tensor"])
        if key not in ready:
            sides = (("a_tensor", "sfa_tensor"), ("b_tensor", "sfb_tensor"))
            ready[key] = [_dequantised("torch", case, arrays[x], arrays.get(scales), "bfloat16") for x, scales in sides]
        a, b = ready[key]
        return torch._grouped_mm(a, b.transpose(1, 2), offs=arrays["padded_offsets"])

    return call


def _dequantise_and_multiply(case: Case) -> Callable[[Arrays], Any]:
    """Return the product of block-scaled operands that are dequantised in each call, and torch's grouped product."""
    if not _is_scaled(case):
        raise NotImplementedError("the operands have no scales")
    torch: Any = importlib.import_module("torch")
    torch.compiler.reset()
    expand = torch.compile(lambda x, scales: _dequantised("torch", case, x, scales, "bfloat16"), dynamic=False)

    def call(arrays: Arrays) -> Any:
        a, b = (expand(arrays[f"{side}_tensor"], arrays[f"sf{side}_tensor"]) for side in "ab")
        return torch._grouped_mm(a, b.transpose(1, 2), offs=arrays["padded_offsets"])

    return call


def _loop(case: Case) -> Callable[[Arrays], Any]:
    """Return the product by one torch product for each expert, of groups that are known on the host."""
    if _is_scaled(case):
        raise NotImplementedError("the operands have scales")
    spans = list(_spans(case))
    return lambda arrays: [arrays["a_tensor"][rows] @ arrays["b_tensor"][e].T for e, rows in spans]


def _wgrad_grouped_mm(case: Case) -> Callable[[Arrays], Any]:
    del case
    torch: Any = importlib.import_module("torch")
    return lambda arrays: torch._grouped_mm(arrays["a_tensor"], arrays["b_tensor"], offs=arrays["offsets_tensor"])


def _wgrad_loop(case: Case) -> Callable[[Arrays], Any]:
    spans = list(_spans(case))
    return lambda arrays: [arrays["a_tensor"][:, tokens] @ arrays["b_tensor"][tokens] for _, tokens in spans]


def _peers(formula: Plain) -> tuple[Peer, ...]:
    return (
        Peer("torch._grouped_mm", "the product only, of bf16 operands", _grouped_mm, same_work=False),
        Peer("torch", "the products only, expert by expert", _loop, same_work=False),
        Peer("torch._grouped_mm", "dequantise, then the product only", _dequantise_and_multiply, same_work=False),
        Peer("torch.compile", "the plain expression", torch_compiled(_plain("torch", formula))),
    )


# --- classes ----------------------------------------------------------------------------------------------------------


class _Executed:
    """A class form called with all arrays by the contract's names, of which it takes those it has."""

    def __init__(self, made: Any, absent: tuple[str, ...], dropped: tuple[str, ...]) -> None:
        self._made, self._dropped = made, dropped
        self._absent = dict.fromkeys(absent)
        self.compile = made.compile

    def execute(self, **arrays: Any) -> None:
        """Execute without what the class has no parameter for, with ``None`` for what the case has not."""
        self._made.execute(**self._absent, **{key: x for key, x in arrays.items() if key not in self._dropped})


def _class_of(
    name: str, stands_for: Mapping[str, str], absent: tuple[str, ...] = (), dropped: tuple[str, ...] = ()
) -> Callable[[Arrays, Arrays, Mapping[str, object]], Any]:
    """Return ``make_class``.

    Parameters
    ----------
    name
        Of the class.
    stands_for
        Samples of buffers that a class wants and does not write: another array has their metadata.
    absent
        Parameters without a default that bfloat16 operands have no array for.
    dropped
        Results that are no parameter of the class.
    """

    def make(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
        known = {**inputs, **outputs}
        nothing = tuple(key for key in absent if known.get(key) is None)
        for missing, other in stands_for.items():
            known[missing] = known[other] if known.get(missing) is None else known[missing]
        samples: dict[str, Any] = dict.fromkeys(f"sample_{key.removesuffix('_tensor')}" for key in nothing)
        for key, array in known.items():
            if array is not None and key not in dropped:
                samples[f"sample_{key.removesuffix('_tensor')}"] = array
        kept = {key: value for key, value in options.items() if not key.endswith("_dtype") and key != "with_dprob"}
        made = getattr(importlib.import_module("fe_gemm"), name)(**samples, **kept)
        passed = tuple(key for key in nothing if key not in outputs)
        return _Executed(made, passed, dropped)

    return make


def _with_dprob(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward's wrapper with a new dprob in each call."""

    def call(**arguments: Any) -> Any:
        del arguments["with_dprob"]
        prob = arguments["prob_tensor"]
        in_jax = type(prob).__module__.startswith("jax")
        result = wrapper(**{"sfa_tensor": None, **arguments, "dprob_tensor": None if in_jax else prob * 0})
        return {key: result[key] for key in ("d_row_tensor", "dprob_tensor", "amax_tensor") if result[key] is not None}

    return call


def _with_scales(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper whose scales may be left out."""
    return lambda **arguments: wrapper(**{"sfa_tensor": None, "sfb_tensor": None, **arguments})


def _wgrad_adapted(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: wrapper(sfa_tensor=None, sfb_tensor=None, **arguments)


# --- cases ------------------------------------------------------------------------------------------------------------


def _case(e: int, m: int, n: int, k: int, dtype: str = "bfloat16", **options: object) -> Case:
    scaled = {"sf_vec_size": 32} if dtype == "mxfp8" else {}
    return Case({"E": e, "M": m, "N": n, "K": k}, dtype, {**scaled, **options})


LARGE = ((8, 4096, 4096, 7168), (32, 1024, 4096, 7168), (64, 256, 4096, 2048), (128, 512, 1536, 2048))
"""DeepSeek-V3, Kimi-K2 and Qwen3 layers: experts, rows of each, N, K."""
DECODE = (256, 32, 4096, 7168)
SMALL = (4, 40, 64, 64)


def _workload(name: str, class_name: str, summary: str, formula: Plain, **others: Any) -> Workload:
    module = {"grouped_gemm": "unfused"}.get(name, name.removeprefix("grouped_gemm_"))
    known: dict[str, Any] = {"operands": _operands, "inputs": _inputs, "peers": _peers(formula), **others}
    return Workload(
        operation=f"fe_gemm.grouped.{module}:OPERATION",
        wrapper=f"fe_gemm:{name}_wrapper",
        title=name,
        summary=summary,
        dims=("E", "M", "N", "K"),
        decode=_decode,
        plain={framework: _plain(framework, formula) for framework in ("numpy", "torch", "jax")},
        flops=lambda case: 2 * _rows(case) * case.dims["N"] * case.dims["K"],
        **known,
    )


GROUPED_GEMM = _workload(
    "grouped_gemm",
    "GroupedGemm",
    "alpha[e] * A B_e^T * prob of the rows of each expert e",
    _unfused,
    expected=_expected_unfused,
    demo=(_case(*SMALL), _case(3, 1, 40, 48)),
    bench=tuple(_case(*shape) for shape in (*LARGE, (8, 4096, 7168, 2048), DECODE)),
    host=_case(8, 64, 256, 256),
    presets={"default": (_case(*LARGE[0]), _case(*DECODE))},
    make_class=_class_of("GroupedGemm", {"c_tensor": "d_tensor"}),
)

GROUPED_GEMM_GLU = _workload(
    "grouped_gemm_glu",
    "GroupedGemmGlu",
    "up * silu(gate) * prob of 32-column blocks of alpha[e] * A B_e^T",
    _glu,
    expected=_expected_glu,
    adapt=_with_scales,
    demo=(_case(*SMALL, generate_c=True), _case(3, 40, 128, 64, "mxfp8", generate_c=True)),
    bench=(
        *(_case(*shape, generate_c=True) for shape in LARGE),
        _case(*LARGE[0]),
        _case(*LARGE[0], "mxfp8", generate_c=True),
        _case(*DECODE),
    ),
    host=_case(8, 64, 256, 256, generate_c=True),
    presets={"default": (_case(*LARGE[0], generate_c=True), _case(*LARGE[0], "mxfp8", generate_c=True))},
    make_class=_class_of("GroupedGemmGlu", {}, ("sfa_tensor", "d_col_tensor")),
)

GROUPED_GEMM_DGLU = _workload(
    "grouped_gemm_dglu",
    "GroupedGemmDglu",
    "gradients of gate and up, and dprob, from R = alpha[e]^2 * A B_e^T and the forward's C",
    _dglu,
    operands=_gradient_operands,
    inputs=_gradient_inputs,
    expected=_expected_dglu,
    adapt=_with_dprob,
    demo=(_case(4, 40, 32, 64, with_dprob=True),),
    bench=tuple(
        _case(e, m, n // 2, k, with_dprob=True) for e, m, n, k in ((8, 4096, 4096, 7168), (128, 512, 1536, 2048))
    ),
    host=_case(8, 64, 128, 256, with_dprob=True),
    presets={"default": (_case(8, 4096, 2048, 7168, with_dprob=True),)},
    make_class=_class_of("GroupedGemmDglu", {}, ("sfa_tensor", "d_col_tensor")),
)

GROUPED_GEMM_WGRAD = _workload(
    "grouped_gemm_wgrad",
    "GroupedGemmWgrad",
    "A B over the tokens of each expert: A (N, E M), B (E M, K), results (E, N, K)",
    _wgrad,
    operands=_wgrad_operands,
    inputs=_wgrad_inputs,
    strides=_wgrad_strides,
    expected=_expected_wgrad,
    adapt=_wgrad_adapted,
    demo=(_case(*SMALL), _case(3, 24, 40, 48)),
    bench=tuple(_case(*shape) for shape in ((8, 4096, 7168, 4096), (32, 1024, 4096, 7168), (128, 512, 1536, 2048))),
    host=_case(8, 64, 256, 256),
    presets={"default": (_case(8, 4096, 7168, 4096),)},
    peers=(
        Peer("torch._grouped_mm", "the same products", _wgrad_grouped_mm),
        Peer("torch", "one product for each expert", _wgrad_loop),
        Peer("torch.compile", "the plain expression", torch_compiled(_plain("torch", _wgrad))),
    ),
    make_class=_class_of("GroupedGemmWgrad", {}, ("sfa_tensor", "sfb_tensor"), ("token",)),
)
