"""``rmsnorm_rht_amax``: RMSNorm, scale, Hadamard rotation of 16 channels and the largest magnitude of each group of
rows, as NVFP4 quantisation in training wants it prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import is_jax_array
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Plan, Target
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.tuple_dict import TupleDict

from . import launch_rht as launch

__all__ = [
    "OPERATION",
    "RmsNormRhtAmax",
    "best_num_threads",
    "pick_rows_per_cta",
    "rmsnorm_rht_amax_jax",
    "rmsnorm_rht_amax_wrapper",
]

FLOATS = ("bfloat16", "float16", "float32")
BLOCK = 16
"""Channels that are rotated together."""
FEWEST_GROUPS = 148
"""Part of the shape contract: of how many groups there must be at least to fold more rows into one."""
TUNED_THREADS = {2048: 128, 4096: 256, 7168: 128, 8192: 512, 16384: 1024, 32768: 512}
"""What ``num_threads=None`` stands for at these row lengths."""


def rmsnorm_rht_amax_wrapper(
    x_tensor: Any,
    w_tensor: Any,
    eps: float = 1e-5,
    num_threads: int | None = None,
    rows_per_cta: int | None = None,
    current_stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Apply RMSNorm and scale to each row, rotate every 16 channels, and find the largest magnitudes.

    ``y = (x * 1/sqrt(mean_N(x^2) + eps)) * w``, ``o = H16 @ y / 4`` for each 16 channels, all in fp32, rounded once;
    ``amax`` is the largest ``|H16 @ y / 4|``, before that rounding, of each ``rows_per_cta`` rows.

    Parameters
    ----------
    x_tensor
        (M, N) or (M, N, 1), N a multiple of 16; bfloat16, float16 or float32; rows of stride 1, at any stride >= 0.
    w_tensor
        (N,) or (N, 1), contiguous; bfloat16, float16 or float32, whatever x is.
    eps
        Added to the mean square; >= 0. A new value never compiles anything.
    num_threads
        Accepted and checked, without effect on the result: kernels choose their threads themselves.
    rows_per_cta
        Rows that share an entry of ``amax_tensor``; divides M. ``None``: ``pick_rows_per_cta(M)``, or 1 if that does
        not divide M.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``o_tensor`` (M, N), dtype of x; ``amax_tensor`` (M / rows_per_cta,), float32.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    ``H16[i, j] = (-1)^popcount(i & j)``; there are no random signs. NaN is left out of ``amax``; a group of nothing
    but NaN gives 0. Deterministic: each entry has one writer. Not differentiable: a gradient is neither recorded nor
    refused.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + RHT + amax.

    Examples
    --------
    >>> import numpy as np
    >>> o, amax = rmsnorm_rht_amax_wrapper(np.ones((4, 32), np.float32), np.ones(32, np.float32), eps=0.0)
    >>> o[0, 0], o[0, 1], amax
    (np.float32(4.0), np.float32(0.0), array([4., 4.], dtype=float32))
    """
    options = {"eps": eps, "num_threads": num_threads, "rows_per_cta": rows_per_cta}
    return OPERATION((x_tensor, w_tensor), options, stream=current_stream, backend=backend)


class RmsNormRhtAmax(APIBase):
    """RMSNorm, scale, rotation and maxima into the caller's outputs; see :func:`rmsnorm_rht_amax_wrapper`.

    The number of rows may change between executions, to any multiple of ``rows_per_cta``. After ``check_support`` the
    attributes ``num_threads``, ``rows_per_cta`` and ``n`` hold the resolved values; ``num_threads`` stays ``None`` for
    a row length that suits no number of threads.
    """

    def __init__(
        self,
        sample_x: Any,
        sample_w: Any,
        sample_o: Any,
        sample_amax: Any,
        eps: float = 1e-5,
        num_threads: int | None = None,
        rows_per_cta: int | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        self.num_threads: int | None = num_threads
        self.rows_per_cta: int | None = rows_per_cta
        self.n: int | None = None
        options = {"eps": eps, "num_threads": num_threads, "rows_per_cta": rows_per_cta}
        super().__init__(OPERATION, (sample_x, sample_w), (_squeezed(sample_o), sample_amax), options, backend)

    def execute(
        self, x_tensor: Any, w_tensor: Any, o_tensor: Any, amax_tensor: Any, current_stream: Any = None
    ) -> None:
        """Write the result into ``o_tensor`` and ``amax_tensor``; no synchronisation."""
        self._execute((x_tensor, w_tensor), (_squeezed(o_tensor), amax_tensor), current_stream)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        options: Mapping[str, Any] = bound.options
        self.n, self.rows_per_cta = bound.dim("N"), options["rows_per_cta"]
        self.num_threads = options["num_threads"] or TUNED_THREADS.get(self.n) or best_num_threads(self.n)


def rmsnorm_rht_amax_jax(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-5,
    num_threads: int | None = None,
    rows_per_cta: int | None = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`rmsnorm_rht_amax_wrapper`; all options are static.

    Returns
    -------
    tuple
        ``(o, amax)``.
    """
    from fe_runtime.jax.entry import entry

    options = {"eps": eps, "num_threads": num_threads, "rows_per_cta": rows_per_cta}
    o, amax = entry(OPERATION, (x, weight), options, backend)
    return o, amax


def best_num_threads(n: int) -> int | None:
    """Return the most threads, a power of two from 1024 down to 64, that share ``n`` values in multiples of 8.

    ``None`` if there is no such number.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + RHT + amax, tuning.
    """
    return next((threads for threads in (1024, 512, 256, 128, 64) if _shares(n, threads)), None)


def pick_rows_per_cta(m: int) -> int:
    """Return how many of ``m`` rows share a maximum by default: 8, 4 or 2, as many as leave 148 groups, else 2.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + RHT + amax, tuning.
    """
    return next((rows for rows in (8, 4, 2) if m % rows == 0 and m // rows >= FEWEST_GROUPS), 2)


def _squeezed(o: Any) -> Any:
    """Return an output without a trailing unit dimension: a view, or the descriptor of one.

    JAX has no views: the array goes on as it is, and is refused.
    """
    shape = tuple(getattr(o, "shape", ()))
    if len(shape) != 3 or shape[-1] != 1 or is_jax_array(o):
        return o
    if isinstance(o, TensorDesc):
        return TensorDesc.of(o.dtype, shape[:2], o.stride[:2], device=o.device)
    return o[..., 0]


def _shares(n: int, threads: int) -> bool:
    """Whether each thread gets a positive multiple of 8 of ``n`` values."""
    return n > 0 and n % (8 * threads) == 0


def _resolve_rows(bound: Bound) -> int:
    rows = pick_rows_per_cta(bound.dim("M"))
    return rows if bound.dim("M") % rows == 0 else 1


def _option(bound: Bound, name: str) -> int:
    value = bound.options[name]
    if not isinstance(value, int):
        raise KeyError(name)
    return value


def _cut(call: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """Cut the channels of a valid call, to build one that breaks a rule on their number."""
    return {**call, "x_tensor": call["x_tensor"][:, :columns], "w_tensor": call["w_tensor"][:columns]}


def _with_too_many_rows(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "rows_per_cta": call["x_tensor"].shape[0] + 1}


CONTRACT = Contract(
    operation="rmsnorm_rht_amax",
    inputs=(
        Input("x_tensor", "M N", FLOATS, UNIT_INNER, also=("M N 1",), doc="activations"),
        Input("w_tensor", "N", FLOATS, also=("N 1",), doc="scale per channel"),
    ),
    options=(
        Option(
            "eps",
            float,
            1e-5,
            holds=lambda eps: isinstance(eps, float) and 0 <= eps < float("inf"),
            rule="be a finite number >= 0",
            invalid=(-1.0, float("nan"), float("inf")),
            runtime=True,
            doc="added to the mean square",
        ),
        Option(
            "num_threads",
            int,
            holds=lambda threads: isinstance(threads, int) and 0 < threads <= 1024 and threads % 32 == 0,
            rule="be a positive multiple of 32 up to 1024",
            invalid=(0, -32, 48, 1056),
            doc="checked, without effect",
        ),
        Option(
            "rows_per_cta",
            int,
            holds=lambda rows: isinstance(rows, int) and rows > 0,
            rule="be positive",
            invalid=(0, -2),
            resolve=_resolve_rows,
            doc="rows that share a maximum; None: by the number of rows",
        ),
    ),
    outputs=(
        Output(
            "o_tensor",
            lambda bound: OutputSpec((bound.dim("M"), bound.dim("N")), bound.arrays["x_tensor"].dtype),
            doc="rotated rows",
        ),
        Output(
            "amax_tensor",
            lambda bound: OutputSpec((bound.dim("M") // _option(bound, "rows_per_cta"),), "float32"),
            doc="largest magnitude of each group of rows",
        ),
    ),
    rules=(
        Rule(
            "x_tensor",
            "have a positive multiple of 16 columns",
            holds=lambda bound: bound.dim("N") > 0 and bound.dim("N") % BLOCK == 0,
            given=lambda bound: f"shape {bound.given['x_tensor']}",
            fix="Pad the channels.",
            violation=lambda call: _cut(call, 24),
        ),
        Rule(
            "num_threads",
            "share the columns in multiples of 8",
            holds=lambda bound: (
                bound.options["num_threads"] is None or _shares(bound.dim("N"), _option(bound, "num_threads"))
            ),
            given=lambda bound: f"{bound.options['num_threads']} for N = {bound.dim('N')}",
            fix="Leave it out: it does not change the result.",
            violation=lambda call: {**call, "num_threads": 1024},
        ),
        Rule(
            "rows_per_cta",
            "divide the number of rows",
            holds=lambda bound: bound.dim("M") % _option(bound, "rows_per_cta") == 0,
            given=lambda bound: f"{bound.options['rows_per_cta']} for M = {bound.dim('M')}",
            fix="Pass a divisor of M, or pad the rows.",
            violation=_with_too_many_rows,
        ),
    ),
    dynamic=("M",),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one per row length, dtypes, alignment and ``rows_per_cta`` (up to 16), for any rows."""
    rows, rows_per_cta = bound.dim("M"), _option(bound, "rows_per_cta")
    group = launch.folded_rows(rows_per_cta)
    problem = launch.Problem(
        columns=bound.dim("N"),
        group=group,
        has_partials=group != rows_per_cta,
        x_dtype=bound.arrays["x_tensor"].dtype,
        weight_dtype=bound.arrays["w_tensor"].dtype,
        x_alignment=bound.alignments["x_tensor"],
        o_alignment=bound.alignments["o_tensor"],
        weight_alignment=bound.alignments["w_tensor"],
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of("fe_norm.rmsnorm_rht_amax", "fe_norm.kernels.rmsnorm_rht_amax:build", target.arch, **config)
    form = Form(
        inputs=((rows, problem.columns), (problem.columns,)),
        outputs=tuple(None if output is None else output.shape for output in bound.outputs),
        scalars=("eps",),
        scratch=(((rows // group,), "float32"),) if problem.has_partials else (),
    )
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_norm",
    CONTRACT,
    reference="fe_norm.reference.rmsnorm_rht_amax:rmsnorm_rht_amax",
    find_kernel=find_kernel,
    jax_entry="fe_norm.rmsnorm_rht_amax_jax",
    stream_argument="current_stream",
)
