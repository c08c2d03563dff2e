"""``gemm_amax``, ``gemm_swiglu``, ``gemm_srelu`` and ``gemm_dsrelu`` as the ``fe`` command sees them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from . import operands as shared

__all__ = ["GEMM_AMAX", "GEMM_DSRELU", "GEMM_SRELU", "GEMM_SWIGLU"]

BLOCK = 32
"""Columns of a product that are all up or all gate."""
EPILOGUE = 2.0**-18
"""Share of a result that the fp32 arithmetic after the product may change: some roundings, exp and reciprocal."""

Plain = Callable[[Any, str, Case, Any, Arrays], dict[str, Any]]
"""``plain(library, framework, case, x, inputs)``: the results by name, from the product x (M, N) in float32."""


# --- formulas, in functions that numpy, torch and JAX all have -------------------------------------------------------


def _gated(library: Any, x: Any) -> Any:
    pairs = x.reshape(x.shape[0], -1, 2, BLOCK)
    up, gate = pairs[:, :, 0], pairs[:, :, 1]
    return (up * (gate / (1 + library.exp(-gate)))).reshape(x.shape[0], -1)


def _amax(library: Any, framework: str, case: Case, x: Any, inputs: Arrays) -> dict[str, Any]:
    del inputs
    c = shared.as_dtype(x, str(case.options.get("c_dtype", "float32")), framework)
    return {"c_tensor": c[..., None], "amax_tensor": library.abs(x).max().reshape(1, 1, 1)}


def _swiglu(library: Any, framework: str, case: Case, x: Any, inputs: Arrays) -> dict[str, Any]:
    del inputs
    stored = shared.as_dtype(x, str(case.options["ab12_dtype"]), framework)
    gated = _gated(library, x)
    c = shared.as_dtype(gated, str(case.options["c_dtype"]), framework)
    results = {"ab12_tensor": stored[..., None], "c_tensor": c[..., None]}
    if _wants_amax(case):
        results["amax_tensor"] = library.abs(gated).max().reshape(1, 1, 1)
    return results


def _srelu(library: Any, framework: str, case: Case, x: Any, inputs: Arrays) -> dict[str, Any]:
    positive = x.clip(0)
    d = positive * positive * inputs["prob_tensor"][:, :, 0]
    stored = (shared.as_dtype(result, "bfloat16", framework)[..., None] for result in (x, d))
    results = dict(zip(("c_tensor", "d_tensor"), stored, strict=True))
    if _wants_amax(case):
        results["amax_tensor"] = library.abs(d).max().reshape(1)
    return results


def _dsrelu(library: Any, framework: str, case: Case, x: Any, inputs: Arrays) -> dict[str, Any]:
    positive, gradient = x.clip(0), shared.as_dtype(inputs["c_tensor"][..., 0], "float32", framework)
    d = positive * 2 * (gradient * inputs["prob_tensor"][:, :, 0])
    dprob = (positive * positive * gradient).sum(-1)
    results = {"d_tensor": shared.as_dtype(d, "bfloat16", framework)[..., None], "dprob_tensor": dprob[:, None, None]}
    if _wants_amax(case):
        results["amax_tensor"] = library.abs(d).max().reshape(1)
    return results


def _wants_amax(case: Case) -> bool:
    """Whether the wrappers of the activations return a maximum: for FP4 operands."""
    return case.dtype in ("mxfp4", "nvfp4")


# --- the same in float64, and what rounding may change ---------------------------------------------------------------


def _product_and_error(case: Case, inputs: Arrays) -> tuple[Any, Any]:
    """Return the exact product in float64 and how far the accumulator may be off."""
    a, b = shared.dequantised("numpy", case, inputs, "float64")
    share = {"float32": 2.0**-9, "float8_e4m3fn": 2.0**-11}.get(case.dtype, 2.0**-18 + case.dims["K"] * 2.0**-28)
    return a @ b.T, share * (np.abs(a) @ np.abs(b).T)


def _joined(case: Case, results: Mapping[str, tuple[Any, Any, str]]) -> Expected:
    """Join values, their errors before they are stored, and the dtypes in which they are."""
    del case
    values = [np.asarray(value, np.float64).ravel() for value, _, _ in results.values()]
    allowed = [np.ravel(shared.allowed_in(value, error, dtype)) for value, error, dtype in results.values()]
    return Expected(np.concatenate(values), np.concatenate(allowed))


def _largest(values: Any, error: Any) -> tuple[Any, Any, str]:
    """Return the largest magnitude: off by no more than the largest error, whichever element has it."""
    return np.abs(values).max(), np.max(error) + 2.0**-16 * np.abs(values).max(), "float32"


def _expected_amax(case: Case, inputs: Arrays) -> Expected:
    x, error = _product_and_error(case, inputs)
    dtype = str(case.options.get("c_dtype", "float32"))
    return _joined(case, {"c": (x, error, dtype), "amax": _largest(x, error)})


def _expected_swiglu(case: Case, inputs: Arrays) -> Expected:
    x, error = _product_and_error(case, inputs)
    pairs, errors = (values.reshape(len(x), -1, 2, BLOCK) for values in (x, error))
    up, gate = pairs[:, :, 0], pairs[:, :, 1]
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
    value = up * gate * sigmoid
    slope = np.abs(up * sigmoid * (1 + gate * (1 - sigmoid)))
    off = np.abs(gate * sigmoid) * errors[:, :, 0] + slope * errors[:, :, 1] + errors[:, :, 0] * errors[:, :, 1]
    off = off + EPILOGUE * np.abs(value) + 2.0**-119 * np.abs(up)
    known = {"ab12": (x, error, str(case.options["ab12_dtype"])), "c": (value, off, str(case.options["c_dtype"]))}
    return _joined(case, known | ({"amax": _largest(value, off)} if _wants_amax(case) else {}))


def _expected_srelu(case: Case, inputs: Arrays) -> Expected:
    x, error = _product_and_error(case, inputs)
    prob = inputs["prob_tensor"][:, :, 0].astype(np.float64)
    positive = np.maximum(x, 0)
    d = positive**2 * prob
    off = (2 * positive * error + error**2) * np.abs(prob) + EPILOGUE * np.abs(d)
    known = {"c": (x, error, "bfloat16"), "d": (d, off, "bfloat16")}
    return _joined(case, known | ({"amax": _largest(d, off)} if _wants_amax(case) else {}))


def _expected_dsrelu(case: Case, inputs: Arrays) -> Expected:
    g, error = _product_and_error(case, inputs)
    prob, c = inputs["prob_tensor"][:, :, 0].astype(np.float64), inputs["c_tensor"][..., 0].astype(np.float64)
    positive = np.maximum(g, 0)
    d = 2 * positive * c * prob
    off = 2 * error * np.abs(c * prob) + EPILOGUE * np.abs(d)
    dprob = (positive**2 * c).sum(-1)
    sums = ((2 * positive * error + error**2 + EPILOGUE * positive**2) * np.abs(c)).sum(-1)
    known = {"d": (d, off, "bfloat16"), "dprob": (dprob, sums, "float32")}
    return _joined(case, known | ({"amax": _largest(d, off)} if _wants_amax(case) else {}))


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([np.asarray(result).astype(np.float64).ravel() for result in outputs.values()])


# --- inputs, plain expressions, peers --------------------------------------------------------------------------------


def _srelu_operands(case: Case) -> Operands:
    return {**shared.operands(case), "prob_tensor": ((case.dims["M"], 1, 1), "float32")}


def _srelu_inputs(case: Case, source: Source) -> Arrays:
    return {**shared.inputs(case, source), "prob_tensor": source.weights((case.dims["M"], 1, 1), "float32")}


def _dsrelu_operands(case: Case) -> Operands:
    m, n = case.dims["M"], case.dims["N"]
    return {**_srelu_operands(case), "c_tensor": ((m, n, 1), "bfloat16")}


def _dsrelu_inputs(case: Case, source: Source) -> Arrays:
    m, n = case.dims["M"], case.dims["N"]
    return {**_srelu_inputs(case, source), "c_tensor": source.normal((m, n, 1), "bfloat16")}


def _plain(framework: str, epilogue: Plain) -> Callable[[Case, Arrays], Any]:
    """Return the plain expression: dequantise if need be, multiply, and what follows."""

    def run(case: Case, inputs: Arrays) -> Any:
        library: Any = (
            importlib.import_module("jax").numpy if framework == "jax" else importlib.import_module(framework)
        )
        with np.errstate(over="ignore"):  # of exp, far from any gate
            return epilogue(library, framework, case, shared.product(framework, case, inputs), inputs)

    return _jitted(run) if framework == "jax" else run


def _jitted(run: Callable[[Case, Arrays], Any]) -> Callable[[Case, Arrays], Any]:
    made: dict[str, Any] = {}

    def call(case: Case, inputs: Arrays) -> Any:
        key = f"{case.shape} {case.format}"
        if key not in made:
            jax: Any = importlib.import_module("jax")
            made[key] = jax.jit(functools.partial(run, case))
        return made[key](dict(inputs))

    return call


def _product_alone(case: Case) -> Callable[[Arrays], Any]:
    """Return the product of operands that were dequantised to bf16 before, by torch's library."""
    ready: dict[int, Any] = {}

    def call(arrays: Arrays) -> Any:
        key = id(arrays["a_tensor"])
        if key not in ready:
            ready[key] = shared.dequantised("torch", case, arrays, "bfloat16")
        a, b = ready[key]
        return a @ b.T

    return call


def _scaled_mm(epilogue: Plain) -> Callable[[Case], Callable[[Arrays], Any]]:
    """Return the maker of torch's product of fp8 matrices, followed by the compiled epilogue."""

    def make(case: Case) -> Callable[[Arrays], Any]:
        if not case.dtype.startswith("float8"):
            raise NotImplementedError("it multiplies fp8 operands without block scales")
        torch: Any = importlib.import_module("torch")
        torch.compiler.reset()

        def run(arrays: dict[str, Any]) -> Any:
            a, b = (arrays[name][..., 0] for name in ("a_tensor", "b_tensor"))
            one = torch.ones((), device=a.device)
            x = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
            return epilogue(torch, "torch", case, x.float(), arrays)

        compiled = torch.compile(run, dynamic=False)
        return lambda arrays: compiled(dict(arrays))

    return make


def _quack_gated(case: Case) -> Callable[[Arrays], Any]:
    if case.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError("it has no such input format")
    gemm_gated: Any = importlib.import_module("quack.gemm_interface").gemm_gated
    return lambda arrays: gemm_gated(
        arrays["a_tensor"][..., 0], arrays["b_tensor"][..., 0].T, activation="swiglu", store_preact=True, tuned=False
    )


def _quack_product(case: Case) -> Callable[[Arrays], Any]:
    if case.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError("it has no such input format")
    gemm: Any = importlib.import_module("quack.gemm_interface").gemm
    return lambda arrays: gemm(arrays["a_tensor"][..., 0], arrays["b_tensor"][..., 0].T, tuned=False)


def _peers(epilogue: Plain) -> tuple[Peer, ...]:
    return (
        Peer("torch.compile", "the plain expression", torch_compiled(_plain("torch", epilogue))),
        Peer("torch", "the product only, of bf16 operands", _product_alone, same_work=False),
    )


# --- classes ---------------------------------------------------------------------------------------------------------


def _class_of(name: str) -> Callable[[Arrays, Arrays, Mapping[str, object]], Any]:
    """Return ``make_class``: samples by the constructor's names, and the options that it has."""

    def make(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
        samples = {
            f"sample_{key.removesuffix('_tensor')}": array
            for key, array in {**inputs, **outputs}.items()
            if array is not None
        }
        kept = {key: value for key, value in options.items() if not key.endswith(("_dtype", "_major"))}
        return getattr(importlib.import_module("fe_gemm"), name)(**samples, **kept)

    return make


# --- cases -----------------------------------------------------------------------------------------------------------

HALVES = {"ab12_dtype": "bfloat16", "c_dtype": "bfloat16"}
"""The fast way of gemm_swiglu: most of its traffic is AB12."""


def _case(m: int, n: int, k: int, dtype: str, **options: object) -> Case:
    return Case({"M": m, "N": n, "K": k}, dtype, options)


def _activated(m: int, n: int, k: int, dtype: str) -> Case:
    """Return a case of the squared ReLU, whose ``sf_vec_size`` is 16 by default."""
    return _case(m, n, k, dtype, **({"sf_vec_size": 32} if shared.FORMATS[dtype][2] == 32 else {}))


def _swiglu_case(m: int, n: int, k: int, dtype: str) -> Case:
    vec = shared.FORMATS[dtype][2] if dtype in shared.FORMATS else 16
    return _case(m, n, k, dtype, **HALVES, **({"sf_vec_size": 32} if vec == 32 else {}))


def _amax_case(m: int, n: int, k: int, dtype: str) -> Case:
    vec = shared.FORMATS[dtype][2]
    return _case(m, n, k, dtype, c_dtype="bfloat16", **({"sf_vec_size": 16} if vec == 16 else {}))


LARGE = ((8192, 8192, 8192), (4096, 28672, 8192), (8192, 4096, 4096))
"""What every product is measured by."""
FEW_ROWS = ((16, 28672, 8192), (128, 8192, 8192))


def _workload(name: str, class_name: str, summary: str, epilogue: Plain, **others: Any) -> Workload:
    operation = name.removeprefix("gemm_")
    known: dict[str, Any] = {
        "operands": shared.operands,
        "inputs": shared.inputs,
        "peers": _peers(epilogue),
        **others,
    }
    return Workload(
        operation=f"fe_gemm.dense.{operation}:OPERATION",
        wrapper=f"fe_gemm:{name}_wrapper",
        title=name,
        summary=summary,
        dims=("M", "N", "K"),
        decode=_decode,
        plain={framework: _plain(framework, epilogue) for framework in ("numpy", "torch", "jax")},
        make_class=_class_of(class_name),
        flops=lambda case: 2 * case.dims["M"] * case.dims["N"] * case.dims["K"],
        **known,
    )


GEMM_AMAX = _workload(
    "gemm_amax",
    "GemmAmax",
    "A B^T of block-scaled matrices and its largest magnitude",
    _amax,
    expected=_expected_amax,
    demo=(_amax_case(160, 144, 256, "mxfp8"), _amax_case(160, 144, 256, "nvfp4"), _case(72, 48, 128, "mxfp8")),
    bench=(
        *(_amax_case(*shape, "mxfp8") for shape in (*LARGE, *FEW_ROWS, (8192, 7168, 16384), (128, 24576, 1536))),
        *(_amax_case(*shape, "nvfp4") for shape in (LARGE[0], *FEW_ROWS)),
        _amax_case(512, 256, 256, "mxfp8"),
    ),
    host=_amax_case(64, 256, 256, "mxfp8"),
    presets={"default": tuple(_amax_case(*LARGE[0], dtype) for dtype in ("mxfp8", "mxfp4", "nvfp4"))},
)

GEMM_SWIGLU = _workload(
    "gemm_swiglu",
    "GemmSwiglu",
    "A B^T and up * silu(gate) of its columns",
    _swiglu,
    expected=_expected_swiglu,
    demo=(
        _swiglu_case(160, 256, 256, "bfloat16"),
        _swiglu_case(100, 128, 128, "float8_e4m3fn"),
        _swiglu_case(160, 128, 256, "mxfp8"),
        _swiglu_case(100, 128, 128, "nvfp4"),
    ),
    bench=(
        *(_swiglu_case(*shape, "bfloat16") for shape in LARGE),
        _swiglu_case(8192, 7168, 8192, "bfloat16"),
        _swiglu_case(4096, 28672, 4096, "bfloat16"),
        _swiglu_case(4096, 4096, 7168, "bfloat16"),
        _swiglu_case(64, 28672, 4096, "bfloat16"),
        *(_swiglu_case(*shape, "bfloat16") for shape in FEW_ROWS),
        *(_swiglu_case(*LARGE[0], dtype) for dtype in ("float8_e4m3fn", "mxfp8", "nvfp4")),
    ),
    host=_swiglu_case(64, 256, 256, "bfloat16"),
    presets={"default": tuple(_swiglu_case(*LARGE[0], dtype) for dtype in ("bfloat16", "float16", "mxfp8", "nvfp4"))},
    peers=(
        *_peers(_swiglu),
        Peer("torch._scaled_mm", "fp8 product, then the compiled activation", _scaled_mm(_swiglu)),
        Peer("quack-kernels", "product and SwiGLU of neighbouring columns", _quack_gated),
        Peer("quack-kernels", "the product only", _quack_product, same_work=False),
    ),
)

MODELS = ((8192, 24576, 6144), (4096, 9216, 18432), (8192, 21504, 4096), (2048, 1856, 2688))
"""Nemotron-4-15B, a part of Nemotron-4-340B, Nemotron-H-8B, one expert."""

RELU = {
    "demo": tuple(_activated(160, 144, 256, dtype) for dtype in ("mxfp8", "nvfp4")),
    "bench": (
        *(_activated(*shape, "mxfp8") for shape in (*LARGE, *MODELS, *FEW_ROWS)),
        _activated(*LARGE[0], "nvfp4"),
    ),
    "host": _activated(64, 256, 256, "mxfp8"),
    "presets": {"default": tuple(_activated(*LARGE[0], dtype) for dtype in ("mxfp8", "mxfp4", "nvfp4"))},
}

GEMM_SRELU = _workload(
    "gemm_srelu",
    "GemmSrelu",
    "A B^T of block-scaled matrices and relu(A B^T)^2 * prob",
    _srelu,
    operands=_srelu_operands,
    inputs=_srelu_inputs,
    expected=_expected_srelu,
    **RELU,
)

GEMM_DSRELU = _workload(
    "gemm_dsrelu",
    "GemmDsrelu",
    "2 relu(A B^T) * C * prob and the sums over n of relu(A B^T)^2 * C",
    _dsrelu,
    operands=_dsrelu_operands,
    inputs=_dsrelu_inputs,
    expected=_expected_dsrelu,
    **RELU,
)
