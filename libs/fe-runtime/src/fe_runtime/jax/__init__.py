"""The JAX bridge: every operation is a JAX primitive that lowers to its kernel on a GPU and to its reference elsewhere.

| module | concern |
|---|---|
| ``entry`` | :func:`entry`, the body of every ``<op>_jax``; :func:`prepare`, that of wrappers with JAX arrays |
| ``primitive`` | one call as a value, the primitive of an operation, its shapes, its errors under transformations |
| ``lowering`` | what a call becomes: the reference traced by JAX, or a custom call to the compiled kernel |
| ``targets`` | compiled kernels as XLA FFI targets |
| ``in_place`` | the class form on JAX arrays |
| ``adapter`` | :func:`call`, for callers who bring a ``@cute.jit`` function of their own |
"""

from __future__ import annotations

from fe_runtime._lazy import lazy_exports

_HOMES = {
    "adapter": (
        "TensorSpec",
        "call",
        "gemm_operand_spec",
        "neg_inf_init",
        "row_major_desc",
        "sf_atom_spec",
        "zeros_init",
    ),
    "entry": ("entry", "prepare", "reject"),
    "in_place": ("in_place_launch",),
}

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}:{name}" for home, names in _HOMES.items() for name in names}
)
