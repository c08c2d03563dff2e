"""What is static about a matrix product with what follows it, and which matrices leave a tile in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CELL", "DEPTH_BYTES", "EPILOGUES", "Problem", "Sheet"]

CELL = 64
"""Accumulators are finished in cells of 64 rows and 64 columns."""

DEPTH_BYTES = 128
"""Bytes along K of a tile of A or B."""

EPILOGUES = ("none", "swiglu", "srelu", "dsrelu")

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float4_e2m1fn": 4}
_STAGED = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A matrix that is staged through shared memory on its way to or from global memory, in cells.

    Parameters
    ----------
    name
        ``"pre"``, ``"c"`` or ``"upstream"``.
    dtype, major
        Of its values; ``"n"``: rows are contiguous, ``"m"``: columns are.
    columns
        How many of its columns belong to 64 columns of accumulators.
    cell_columns
        Columns of a cell; it has 64 rows.
    """

    name: str
    dtype: str
    major: str
    columns: int = CELL
    cell_columns: int = CELL

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return _BITS[self.dtype]

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell."""
        return CELL * self.cell_columns * self.bits // 8

    @property
    def line_bytes(self) -> int:
        """Bytes of a contiguous line of a cell in shared memory: a row, a column, or a part of one."""
        return min(128, (self.cell_columns if self.major == "n" else CELL) * self.bits // 8)


@dataclass(frozen=True, slots=True)
class Problem:
    """A product X = alpha A B^T of matrices (M, K), (N, K) and (M, N), in batches, and what is made of X.

    Parameters
    ----------
    dtype
        Of A and B: bfloat16, float16, float8_e4m3fn or float8_e5m2; the 8-bit ones contiguous along K.
    c_dtype
        Of the result C: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, or float4_e2m1fn (two to a byte).
    a_major, b_major, c_major
        The contiguous dimension: ``"k"`` or ``"m"``, ``"k"`` or ``"n"``, ``"n"`` or ``"m"``; the last holds for every
        matrix with the rows of C.
    epilogue
        ``"none"``: C = X. ``"swiglu"``: C has N / 2 columns, up * silu(gate) of blocks of 32 columns. ``"srelu"``:
        C = relu(X)^2 * prob. ``"dsrelu"``: C = (relu(X) * 2) * (upstream * prob), and dprob, the sums over the rows of
        relu(X)^2 * upstream.
    pre_dtype
        Of X, if it is stored too.
    upstream_dtype
        Of the matrix (M, N) that dsrelu reads: float32, float16 or bfloat16.
    alpha
        Whether there is a factor alpha, a scalar of each call; otherwise it is one.
    gate_first
        Whether the gate comes first in each pair of blocks, and not up.
    amax
        Whether the largest magnitude of C before rounding is wanted.
    scale_dtype, scale_vector
        If C, of 8 bits, is quantised by recipe Q-NC: the dtype of its scales, float8_e8m0fnu or float8_e4m3fn, and how
        many consecutive columns share one.
    accumulates
        Whether amax and dprob are joined with what the arrays hold, and not written anew.
    """

    dtype: str = "bfloat16"
    c_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "k"
    c_major: str = "n"
    epilogue: str = "none"
    pre_dtype: str | None = None
    upstream_dtype: str | None = None
    alpha: bool = False
    gate_first: bool = False
    amax: bool = False
    scale_dtype: str | None = None
    scale_vector: int = 32
    accumulates: bool = False

    @property
    def grouped(self) -> bool:
        """Whether the rows of A are in groups, each with a B of its own, and alpha is a number for each group."""
        return False

    @property
    def bias_dtype(self) -> str | None:
        """Of a bias for each group, if there is one."""
        return None

    @property
    def activation(self) -> str | None:
        """A gated activation, if its gates are the first of two blocks of columns in a group's product."""
        return None

    @property
    def sum_bytes(self) -> int:
        """Shared memory in which a warp group adds up columns."""
        return 0

    @property
    def adds_dprob(self) -> bool:
        """Whether the sums of rows are added to what is there."""
        return self.accumulates

    @property
    def adds_dbias(self) -> bool:
        """Whether the sums of columns are added to what is there."""
        return False

    @property
    def rounds(self) -> bool:
        """Whether X is rounded to the dtype of A before anything is made of it."""
        return False

    @property
    def depth(self) -> int:
        """Depth of a tile of A or B: 128 bytes."""
        return DEPTH_BYTES * 8 // _BITS[self.dtype]

    @property
    def promotes(self) -> bool:
        """Whether partial sums are added up outside the tensor cores, which keep about 13 bits of them for 8-bit
        operands: of every 128 products."""
        return _BITS[self.dtype] == 8

    @property
    def plain(self) -> bool:
        """Whether C is the rounded product, in 16 bits, and nothing else is wanted."""
        return self == Problem(self.dtype, self.c_dtype, self.a_major, self.b_major, self.c_major) and (
            _BITS[self.c_dtype] == 16
        )

    @property
    def result_columns(self) -> int:
        """How many columns of C belong to 64 columns of X."""
        return CELL // 2 if self.epilogue == "swiglu" else CELL

    @property
    def outputs(self) -> tuple[Sheet, ...]:
        """The matrices that leave, in the order in which the pieces of a strip do."""
        sheets = []
        if self.pre_dtype is not None:
            sheets.append(self._output("pre", self.pre_dtype, CELL))
        return (*sheets, self._output("c", self.c_dtype, self.result_columns))

    @property
    def upstream(self) -> Sheet | None:
        """The matrix that comes in beside the product."""
        return None if self.upstream_dtype is None else Sheet("upstream", self.upstream_dtype, self.c_major)

    @property
    def strip(self) -> int:
        """Neighbouring cells of accumulators that are finished together, so that every output gets whole cells."""
        return max(1, *(sheet.cell_columns // sheet.columns for sheet in self.outputs))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that are read besides A and B, in the order of the operations' inputs."""
        wanted = {
            "upstream": self.upstream_dtype is not None,
            "prob": self.epilogue in ("srelu", "dsrelu"),
            "norm_const": self.scale_dtype is not None,
        }
        return tuple(name for name, present in wanted.items() if present)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the arrays that are written, in the order of the operation's outputs."""
        wanted = {
            "pre": self.pre_dtype is not None,
            "c": True,
            "dprob": self.epilogue == "dsrelu",
            "amax": self.amax,
            "scales": self.scale_dtype is not None,
        }
        names = [name for name, present in wanted.items() if present]
        if self.epilogue == "swiglu":
            names.sort(key=lambda name: {"scales": 1, "amax": 2}.get(name, 0))
        return tuple(names)

    @property
    def scratch(self) -> tuple[str, ...]:
        """Names of the workspaces: for dsrelu ``"partials"``, float32 (parts, batches, M), one part for the
        columns of each warp group: ceil(N / group_columns)."""
        return ("partials",) if self.epilogue == "dsrelu" else ()

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars of a call."""
        return ("alpha",) if self.alpha else ()

    @property
    def is_consistent(self) -> bool:
        """Whether the parts fit together."""
        scaled = self.scale_dtype is not None
        return (
            self.dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
            and not (self.promotes and (self.a_major, self.b_major) != ("k", "k"))
            and self.c_dtype in _BITS
            and self.pre_dtype in (None, *_BITS)
            and self.upstream_dtype in (None, *_STAGED)
            and self.epilogue in EPILOGUES
            and (self.upstream_dtype is not None) == (self.epilogue == "dsrelu")
            and not (self.pre_dtype is not None and self.epilogue in ("none", "dsrelu"))
            and not (self.gate_first and self.epilogue != "swiglu")
            and not (self.c_major == "m" and "float4_e2m1fn" in (self.c_dtype, self.pre_dtype))
            and not (scaled and self.c_dtype not in ("float8_e4m3fn", "float8_e5m2"))
            and not (scaled and self.scale_dtype not in ("float8_e8m0fnu", "float8_e4m3fn"))
            and self.scale_vector in (16, 32)
            and not (self.accumulates and not (self.amax or self.epilogue == "dsrelu"))
        )

    def _output(self, name: str, dtype: str, columns: int) -> Sheet:
        return Sheet(name, dtype, self.c_major, columns, CELL // 2 if dtype == "float32" else CELL)
