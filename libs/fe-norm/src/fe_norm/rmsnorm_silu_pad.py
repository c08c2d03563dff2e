"""``rmsnorm_silu_pad``: pre-add, RMSNorm, SiLU, halo padding and temporal cache, between the convolutions of video
decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import CONTIGUOUS, Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import launch_pad as launch

__all__ = ["OPERATION", "RmsNormSiluPad", "rmsnorm_silu_pad_jax", "rmsnorm_silu_pad_wrapper"]

BF16 = ("bfloat16",)
FRAMES = 2
"""Frames before the first one, and the most that are cached."""


def rmsnorm_silu_pad_wrapper(
    input: Any,
    gamma: Any,
    input_bias: Any = None,
    previous: Any = None,
    residual: Any = None,
    residual_bias: Any = None,
    current_stream: Any = None,
    *,
    save_input: bool = False,
    backend: str = "auto",
) -> TupleDict:
    """Add, normalise the channels of each pixel, activate, and surround the frames for a causal convolution.

    ``v = (input + input_bias) + (residual + residual_bias)``, ``d = max(sqrt(sum_C v^2), 1e-12)``,
    ``g = ((v / d) * sqrt(C)) * gamma``, ``a = g / (1 + exp(-g))``: fp32, each step rounded to bfloat16.

    Parameters
    ----------
    input
        (N, T, H, W, C), contiguous, bfloat16, as all arrays here; no extent is 0.
    gamma
        (C,).
    input_bias
        (C,) or ``None``.
    previous
        (N, 1 or 2, H, W, C) or ``None``: activated frames before the first one, a former call's cache.
    residual
        (N, T, H, W, C) or ``None``.
    residual_bias
        (C,) or ``None``; needs ``residual``.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    save_input
        Return ``v`` also without a residual.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``padded_output`` (N, T+2, H+2, W+2, C): ``a`` with a border of zeros around each frame, after two frames that
        hold ``previous``, the last of it last, or zeros; ``cache_output`` (N, min(2, T + frames of previous), H, W, C):
        the last frames of ``previous`` and ``a``; ``residual_output``: ``v`` with a residual or ``save_input``, else
        ``None``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.
    RuntimeError
        A gradient is required: the operation is for inference.

    Notes
    -----
    NaN stays in its pixel. Deterministic. GPUs run a kernel up to 24576 channels (fewer where pixels are not aligned
    to 16 bytes).

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU + padding.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> frames = np.ones((1, 1, 2, 2, 16), ml_dtypes.bfloat16)
    >>> padded, cache, v = rmsnorm_silu_pad_wrapper(frames, frames[0, 0, 0, 0])
    >>> padded.shape, cache.shape, float(cache[0, 0, 0, 0, 0]), v
    ((1, 3, 4, 4, 16), (1, 1, 2, 2, 16), 0.73046875, None)
    """
    arrays = (input, gamma, input_bias, previous, residual, residual_bias)
    return OPERATION(arrays, {"save_input": save_input}, stream=current_stream, backend=backend)


class RmsNormSiluPad(APIBase):
    """The operation into the caller's outputs; see :func:`rmsnorm_silu_pad_wrapper`.

    ``sample_residual_output`` is required with ``sample_residual`` and stands for ``save_input`` without. Frames and
    their extents may change between executions; channels and which arrays there are may not.
    """

    def __init__(
        self,
        sample_input: Any,
        sample_gamma: Any,
        sample_padded_output: Any,
        sample_cache_output: Any,
        sample_input_bias: Any = None,
        sample_previous: Any = None,
        sample_residual: Any = None,
        sample_residual_bias: Any = None,
        sample_residual_output: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        inputs = (sample_input, sample_gamma, sample_input_bias, sample_previous, sample_residual, sample_residual_bias)
        outputs = (sample_padded_output, sample_cache_output, sample_residual_output)
        save_input = sample_residual is None and sample_residual_output is not None
        super().__init__(OPERATION, inputs, outputs, {"save_input": save_input}, backend)

    def execute(
        self,
        input: Any,
        gamma: Any,
        padded_output: Any,
        cache_output: Any,
        input_bias: Any = None,
        previous: Any = None,
        residual: Any = None,
        residual_bias: Any = None,
        residual_output: Any = None,
        current_stream: Any = None,
    ) -> tuple[Any, Any, Any]:
        """Write the result into the outputs and return them; no allocation, no synchronisation."""
        outputs = (padded_output, cache_output, residual_output)
        self._execute((input, gamma, input_bias, previous, residual, residual_bias), outputs, current_stream)
        return outputs


def rmsnorm_silu_pad_jax(
    input: Any,
    gamma: Any,
    input_bias: Any = None,
    previous: Any = None,
    residual: Any = None,
    residual_bias: Any = None,
    *,
    save_input: bool = False,
    backend: str = "auto",
) -> tuple[Any, Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`rmsnorm_silu_pad_wrapper`; ``save_input`` is static.

    Returns
    -------
    tuple
        ``(padded, cache, v)``; ``v`` is ``None`` without a residual and ``save_input``.
    """
    from fe_runtime.jax.entry import entry

    arrays = (input, gamma, input_bias, previous, residual, residual_bias)
    padded, cache, v = entry(OPERATION, arrays, {"save_input": save_input}, backend)
    return padded, cache, v


def _saves_input(bound: Bound) -> bool:
    return bound.has("residual") or bool(bound.options["save_input"])


def _earlier(bound: Bound) -> int:
    """Return the number of frames in ``previous``."""
    return bound.dim("P") if bound.has("previous") else 0


def _frames(bound: Bound, frames: int, border: int = 0) -> OutputSpec:
    height, width = bound.dim("H") + border, bound.dim("W") + border
    return OutputSpec((bound.dim("N"), frames, height, width, bound.dim("C")), "bfloat16")


def _empty_frames(call: Mapping[str, Any]) -> dict[str, Any]:
    """Cut all rows of a valid call, to build one that breaks the rule on extents."""
    cut = {name: call[name][:, :, :0] for name in ("input", "previous", "residual") if call[name] is not None}
    return {**call, **cut}


def _without_earlier_frames(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "previous": call["previous"][:, :0]}


PIXELS = "N T H W C"

CONTRACT = Contract(
    operation="rmsnorm_silu_pad",
    inputs=(
        Input("input", PIXELS, BF16, CONTIGUOUS, doc="frames"),
        Input("gamma", "C", BF16, doc="scale per channel"),
        Input("input_bias", "C", BF16, optional=True, doc="added to the input"),
        Input("previous", "N P H W C", BF16, optional=True, doc="activated frames before the first one"),
        Input("residual", PIXELS, BF16, optional=True, doc="added to the input"),
        Input("residual_bias", "C", BF16, optional=True, doc="added to the residual first"),
    ),
    options=(Option("save_input", bool, False, doc="return what was normalised also without a residual"),),
    outputs=(
        Output("padded_output", lambda bound: _frames(bound, bound.dim("T") + FRAMES, 2), doc="surrounded frames"),
        Output(
            "cache_output",
            lambda bound: _frames(bound, min(FRAMES, bound.dim("T") + _earlier(bound))),
            doc="last frames, not surrounded",
        ),
        Output(
            "residual_output",
            lambda bound: _frames(bound, bound.dim("T")) if _saves_input(bound) else None,
            doc="what was normalised",
        ),
    ),
    rules=(
        Rule(
            "input",
            "have positive extents",
            holds=lambda bound: 0 not in bound.arrays["input"].shape,
            given=lambda bound: f"shape {bound.given['input']}",
            fix="There is nothing to surround.",
            violation=_empty_frames,
        ),
        Rule(
            "previous",
            "have one or two frames",
            holds=lambda bound: not bound.has("previous") or bound.dim("P") in (1, FRAMES),
            given=lambda bound: f"shape {bound.given['previous']}",
            fix="Pass the last two.",
            violation=_without_earlier_frames,
        ),
        Rule(
            "residual_bias",
            "come with a residual",
            holds=lambda bound: bound.has("residual") or not bound.has("residual_bias"),
            given=lambda bound: "a bias alone",
            fix="Drop it, or pass the residual.",
            violation=lambda call: {**call, "residual": None},
        ),
    ),
    dynamic=("N", "T", "H", "W", "P"),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for the number of channels, the arrays there are and their alignment."""
    aligned = bound.alignments
    pixels = ("input", "previous", "residual", "padded_output", "cache_output", "residual_output")
    problem = launch.Problem(
        channels=bound.dim("C"),
        has_input_bias=bound.has("input_bias"),
        has_previous=bound.has("previous"),
        has_residual=bound.has("residual"),
        has_residual_bias=bound.has("residual_bias"),
        has_sum=_saves_input(bound),
        pixel_alignment=min(aligned.get(name, 16) for name in pixels),
        channel_alignment=min(aligned.get(name, 16) for name in ("gamma", "input_bias", "residual_bias")),
    )
    how = launch.choose(problem)
    if how is None:
        reason = f"{problem.channels} channels do not fit in the registers of a block"
        return NoKernel(reason, "Align the pixels to 16 bytes, or split the channels.")
    name, config = "rmsnorm_silu_pad", launch.config(problem, how)
    spec = KernelSpec.of(f"fe_norm.{name}", f"fe_norm.kernels.{name}:build", target.arch, **config)
    form = Form(
        inputs=tuple(bound.arrays[name].shape if bound.has(name) else None for name in CONTRACT.input_names),
        outputs=tuple(None if output is None else output.shape for output in bound.outputs),
    )
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_norm",
    CONTRACT,
    reference="fe_norm.reference.rmsnorm_silu_pad:rmsnorm_silu_pad",
    find_kernel=find_kernel,
    inference_only=True,
    jax_entry="fe_norm.rmsnorm_silu_pad_jax",
    stream_argument="current_stream",
)
