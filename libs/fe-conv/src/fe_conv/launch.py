"""Which kernel serves a call of ``causal_conv1d`` or of its gradient, and in which form it gets the operands."""

from __future__ import annotations

from math import gcd

from fe_runtime import KernelSpec
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits
from fe_runtime.plan import Form, Kernel, NoKernel, Target

from . import tiles

__all__ = ["CHANNEL_FIRST", "CHANNEL_LAST", "backward_kernel", "forward_kernel", "kernel_spec"]

CHANNEL_LAST = "channel_last"
"""Layout of x as (B, T, D)."""

CHANNEL_FIRST = "channel_first"
"""Layout of x as (B, D, T)."""

FORWARD_INPUTS = ("x", "weight", "bias", "seq_idx", "cu_seqlens", "initial_states")
BACKWARD_INPUTS = ("dy", "dfinal", *FORWARD_INPUTS)


def forward_kernel(bound: Bound, layout: str, target: Target) -> Kernel | NoKernel:
    """Plan the convolution.

    Parameters
    ----------
    bound
        A checked call with the inputs ``x, weight, bias, seq_idx, cu_seqlens, initial_states``, the option
        ``activation`` and the outputs y (contiguous) and final states (N, W-1, D).
    layout
        :data:`CHANNEL_LAST` or :data:`CHANNEL_FIRST`; the last dimension of x has stride 1.
    target
        The GPU.

    Notes
    -----
    The kernel depends on dtypes, width, activation, layout, alignment, on which operands there are, and on the number
    of channels as far as it decides which vectors and blocks fit. It never depends on the number of tokens.
    """
    problem = _problem(bound, layout, backward=False)
    return _too_large(bound, layout) or _kernel(bound, layout, target, problem, FORWARD_INPUTS)


def backward_kernel(bound: Bound, layout: str, target: Target) -> Kernel | NoKernel:
    """Plan the gradient; as :func:`forward_kernel`.

    The inputs are those of the convolution after ``dy`` (in x's layout, last stride 1) and ``dfinal`` (N, W-1, D); the
    outputs are dx (contiguous), dweight, dbias where there is a bias, dinitial where there are initial states.
    """
    problem = _problem(bound, layout, backward=True)
    return _too_large(bound, layout) or _kernel(bound, layout, target, problem, BACKWARD_INPUTS)


def kernel_spec(problem: tiles.Problem, launch: tiles.Launch, arch: str) -> KernelSpec:
    """Return what is compiled for a problem and a launch."""
    operation = "causal_conv1d_backward" if problem.backward else "causal_conv1d"
    direction = "backward" if problem.backward else "forward"
    config = tiles.config(problem, launch)
    return KernelSpec.of(f"fe_conv.{operation}", f"fe_conv.kernels.{direction}:build", arch, **config)


_MOST = (1 << 31) - (1 << 16)  # of a dimension, and of the sums: the kernels count in 32 bits, and round up to tiles


def _problem(bound: Bound, layout: str, backward: bool) -> tiles.Problem:
    x, weight, offsets = bound.arrays["x"], bound.arrays["weight"], bound.dtype("cu_seqlens")
    aligned = bound.alignments
    return tiles.Problem(
        backward=backward,
        channel_last=layout == CHANNEL_LAST,
        x_dtype=x.dtype,
        weight_dtype=weight.dtype,
        width=weight.shape[1],
        activation="silu" if bound.options["activation"] in ("silu", "swish") else "identity",
        has_bias=bound.has("bias"),
        has_labels=bound.has("seq_idx"),
        has_initial=bound.has("initial_states"),
        has_final=bound.has("dfinal") if backward else bound.outputs[1] is not None,
        offsets=offsets,
        load_alignment=min(aligned["x"], aligned.get("dy", 16)),
        store_alignment=gcd(16, x.shape[2] * bits(x.dtype) // 8),
        parameter_alignment=min(aligned["weight"], aligned.get("bias", 16)),
    )


def _kernel(bound: Bound, layout: str, target: Target, problem: tiles.Problem, inputs: tuple[str, ...]) -> Kernel:
    batch, tokens, channels = _extents(bound, layout)
    launch = tiles.choose(problem, channels, target.arch)
    wide = "float64" if problem.x_dtype == "float64" else "float32"
    scratch: list[tuple[tuple[int, ...], str]] = []
    if problem.backward:
        scratch.append((tiles.partials_shape(problem, launch, batch, tokens, channels), wide))
        if launch.kernel == "any":
            scratch.append((tuple(bound.arrays["x"].shape), wide))
    return Kernel(
        kernel_spec(problem, launch, target.arch),
        Form(
            inputs=tuple(tuple(bound.arrays[n].shape) if bound.has(n) else None for n in inputs),
            outputs=tuple(None if output is None else tuple(output.shape) for output in bound.outputs),
            scratch=tuple(scratch),
        ),
    )


def _extents(bound: Bound, layout: str) -> tuple[int, int, int]:
    """Return the numbers of rows, tokens and channels."""
    batch, *inner = bound.arrays["x"].shape
    tokens, channels = inner if layout == CHANNEL_LAST else reversed(inner)
    return batch, tokens, channels


def _too_large(bound: Bound, layout: str) -> NoKernel | None:
    batch, tokens, channels = _extents(bound, layout)
    width = bound.arrays["weight"].shape[1]
    # No kernel has blocks of fewer than 4 channels and 64 tokens, or than these, 256 tokens and one tap.
    blocks = batch * -(-channels // 4) * max(-(-tokens // 64), -(-tokens // 256) * (width + 1))
    if max(batch, tokens, channels * (width + 1), blocks) <= _MOST:
        return None
    return NoKernel("the extents or the number of blocks pass 2^31", "Split it into several calls.")
