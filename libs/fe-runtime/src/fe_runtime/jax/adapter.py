"""``call``: a caller's own ``@cute.jit`` function as a JAX function, through the kernel language's JAX bridge.

Our own operations do not come this way; see :mod:`fe_runtime.jax.lowering`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tensor_desc import TensorDesc

__all__ = [
    "TensorSpec",  # noqa: F822 - loaded by __getattr__
    "call",
    "gemm_operand_spec",
    "neg_inf_init",
    "row_major_desc",
    "sf_atom_spec",
    "zeros_init",
]

Init = Callable[[Any], Any]


def call(
    fn: Callable[..., None],
    *,
    output_shape_dtype: Any,
    input_spec: Any = None,
    output_spec: Any = None,
    initialized_outputs: Mapping[int, Init] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    allow_cuda_graph: bool = True,
    compile_options: str | None = None,
    use_static_tensors: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function of arrays that runs ``fn`` on XLA's stream and returns its outputs.

    Parameters
    ----------
    fn
        ``@cute.jit`` function, called as ``fn(stream, *inputs, *outputs, **kwargs)``; outputs are buffers to write.
    output_shape_dtype
        One ``jax.ShapeDtypeStruct``, or a tuple or list of them; the result has the same container.
    input_spec, output_spec
        A :class:`TensorSpec` per operand, or ``None`` for row-major.
    initialized_outputs
        Output index to ``init(ShapeDtypeStruct) -> array``: what the buffer holds when ``fn`` starts. For outputs that
        ``fn`` accumulates into.
    input_output_aliases
        Input index to the index of the output that takes over its buffer.
    allow_cuda_graph
        Whether XLA may capture the call in a CUDA graph.
    compile_options, use_static_tensors
        Handed to the bridge.
    **kwargs
        Compile-time constants of ``fn``.

    Raises
    ------
    ImportError
        The bridge is missing or JAX is too old for it.
    InvalidArgumentError
        An index out of range, nested outputs with initialised ones, or an initialised output that is also aliased.

    Notes
    -----
    Runs on GPUs only. Neither differentiable nor mappable.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, cudnn.jax.call.
    """
    bridge = _bridge()
    common = {
        "output_shape_dtype": output_shape_dtype,
        "output_spec": output_spec,
        "allow_cuda_graph": allow_cuda_graph,
        "compile_options": compile_options,
        "use_static_tensors": use_static_tensors,
        **kwargs,
    }
    if not initialized_outputs:
        aliases = dict(input_output_aliases or {})
        call_: Callable[..., Any] = bridge.cutlass_call(
            fn, input_spec=input_spec, input_output_aliases=aliases, **common
        )
        return call_
    structs = _flat_structs(output_shape_dtype)
    aliases = dict(input_output_aliases or {})
    _check_indices(initialized_outputs, aliases, len(structs))
    places = sorted(initialized_outputs)
    order = tuple(
        places.index(number) if number in places else None
        for number in range(len(structs))
        if number not in aliases.values()
    )

    def run(*arrays: Any) -> Any:
        starts = [initialized_outputs[place](structs[place]) for place in places]
        donated = {len(arrays) + number: place for number, place in enumerate(places)}
        specs = [*_spec_list(input_spec, len(arrays)), *(_spec_list(output_spec, len(structs))[p] for p in places)]
        adapted = _with_starts(fn, len(arrays), order)
        function = bridge.cutlass_call(adapted, input_spec=specs, input_output_aliases=aliases | donated, **common)
        return function(*arrays, *starts)

    return run


def row_major_desc(shape: Sequence[int], dtype: object, name: str = "") -> TensorDesc:
    """Return the descriptor of a row-major array on ``cuda:0``, for ``check_support`` from abstract values."""
    return TensorDesc.of(dtype, tuple(shape), device="cuda:0", name=name)


def zeros_init(struct: Any) -> Any:
    """Return zeros of a ``ShapeDtypeStruct``: an initial value for sums."""
    return jnp.zeros(struct.shape, struct.dtype)


def neg_inf_init(struct: Any) -> Any:
    """Return minus infinity everywhere: an initial value for maxima."""
    return jnp.full(struct.shape, -jnp.inf, struct.dtype)


def gemm_operand_spec() -> Any:
    """Return the spec of a ``(MN, K, 1)`` GEMM operand whose K is innermost."""
    return _bridge().TensorSpec(layout=(1, 0, 2))


def sf_atom_spec() -> Any:
    """Return the spec that presents a C-contiguous ``(L, MN', K', 32, 4, 4)`` buffer as ``(32, 4, MN', 4, K', L)``."""
    return _bridge().TensorSpec(mode=(3, 4, 1, 5, 2, 0))


def __getattr__(name: str) -> Any:
    if name == "TensorSpec":
        return _bridge().TensorSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _bridge() -> Any:
    try:
        bridge = importlib.import_module("cutlass.jax")
    except ImportError as error:
        raise ImportError(_REQUIREMENT) from error
    if not bridge.is_available():
        raise ImportError(f"{_REQUIREMENT} Found jax {jax.__version__}.")
    return bridge


_REQUIREMENT = "fe_runtime.jax.call needs nvidia-cutlass-dsl >= 4.8 and jax >= 0.6."


@functools.cache
def _with_starts(fn: Callable[..., None], inputs: int, order: tuple[int | None, ...]) -> Callable[..., None]:
    """Return ``fn`` for a call in which initial values follow the inputs and are the outputs' buffers.

    The bridge passes no buffer for an output that takes over an input's. ``order`` has an entry for each output that
    ``fn`` expects: the number of its initial value, or ``None`` for a buffer of its own.
    """
    cute: Any = importlib.import_module("cutlass.cute")
    starts = sum(number is not None for number in order)

    def initialized(stream: Any, *operands: Any, **constants: Any) -> None:
        own = iter(operands[inputs + starts :])
        outputs = [next(own) if number is None else operands[inputs + number] for number in order]
        fn(stream, *operands[:inputs], *outputs, **constants)

    adapted: Callable[..., None] = cute.jit(initialized)
    return adapted


def _flat_structs(output_shape_dtype: Any) -> list[Any]:
    structs = list(output_shape_dtype) if isinstance(output_shape_dtype, (tuple, list)) else [output_shape_dtype]
    for struct in structs:
        if not (hasattr(struct, "shape") and hasattr(struct, "dtype")):
            rule = "be one ShapeDtypeStruct or a flat tuple or list of them, with initialized_outputs"
            raise _error("output_shape_dtype", rule, type(struct).__name__)
    return structs


def _check_indices(starts: Mapping[int, Init], aliases: Mapping[int, int], outputs: int) -> None:
    for place in starts:
        if not 0 <= place < outputs:
            raise _error("initialized_outputs", f"name outputs 0 to {outputs - 1}", place)
        if place in aliases.values():
            raise _error("initialized_outputs", "not name an output that input_output_aliases names", place)


def _spec_list(spec: Any, count: int) -> list[Any]:
    if spec is None:
        return [None] * count
    return list(spec) if isinstance(spec, (tuple, list)) else [spec]


def _error(argument: str, rule: str, given: object) -> InvalidArgumentError:
    return InvalidArgumentError(explain("call", argument, rule, given))
