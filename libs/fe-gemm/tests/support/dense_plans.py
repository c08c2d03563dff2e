"""Calls of the dense products by what they are made of, on descriptors; and every combination that is legal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fe_gemm.dense import amax, dsrelu, srelu, swiglu
from fe_gemm.planning.dense import Operands
from fe_runtime.contract import Bound
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc

E4M3, E5M2, E2M1, E8M0 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"
FP8 = (E4M3, E5M2)
WIDE = ("float32", "float16", "bfloat16")
FORMATS = [(E4M3, E8M0, 32), (E5M2, E8M0, 32), (E2M1, E8M0, 32), (E2M1, E8M0, 16), (E2M1, E4M3, 16)]
OPERATIONS: dict[str, Operation] = {
    "amax": amax.OPERATION,
    "swiglu": swiglu.OPERATION,
    "srelu": srelu.OPERATION,
    "dsrelu": dsrelu.OPERATION,
}
M, N, K, L = 48, 192, 160, 2


def on_gpu(dtype: str, shape: tuple[int, int, int], by_row: bool = True) -> TensorDesc:
    """Return a matrix (rows, columns, L) with contiguous rows, or contiguous columns; FP4 in pairs."""
    rows, columns, batches = shape
    if dtype == E2M1:
        dtype, columns = "uint8", columns // 2
    stride = (columns, 1, rows * columns) if by_row else (1, rows, rows * columns)
    return TensorDesc.of(dtype, (rows, columns, batches), stride, device="cuda")


def scales(dtype: str, rows: int, k: int, batches: int, vec: int) -> TensorDesc:
    tiles = -(-rows // 128), -(-k // (4 * vec))
    return TensorDesc.of(dtype, (batches, *tiles, 32, 4, 4), device="cuda")


@dataclass(frozen=True)
class Call:
    """A call of an operation: its operands, and what it stores."""

    operation: str
    element: str = "bfloat16"
    scale: str | None = None
    vec: int = 16
    majors: str = "kk"
    results: tuple[str, ...] = ()
    major: str = "n"
    m: int = M
    k: int = K
    batches: int = L

    def __str__(self) -> str:
        known = (self.operation, self.element, self.scale, self.vec, self.majors, *self.results, self.major)
        return " ".join(map(str, known))

    @property
    def is_quantised(self) -> bool:
        """Whether the last result, fp8, has scales."""
        return self.operation != "amax" and self.results[-1] in FP8

    @property
    def has_amax(self) -> bool:
        if self.operation == "amax":
            return True
        wide = ("bfloat16",) if self.operation == "swiglu" else WIDE
        return self.element == E2M1 and self.results[-1] in wide

    def bound(self) -> Bound:
        a, b = (
            on_gpu(self.element, (rows, self.k, self.batches), major == "k")
            for rows, major in zip((self.m, N), self.majors, strict=True)
        )
        factors = [None, None]
        if self.scale is not None:
            factors = [scales(self.scale, rows, self.k, self.batches, self.vec) for rows in (self.m, N)]
        norm_const = TensorDesc.of("float32", (1,), device="cuda") if self.is_quantised else None
        prob = TensorDesc.of("float32", (self.m, 1, self.batches), device="cuda")
        upstream = None
        if self.operation == "dsrelu":
            upstream = on_gpu(self.results[0], (self.m, N, self.batches), self.major == "n")
        arrays: dict[str, list[Any]] = {
            "amax": [a, b, *factors],
            "swiglu": [a, b, *factors, norm_const],
            "srelu": [a, b, *factors, prob, norm_const],
            "dsrelu": [a, b, upstream, *factors, prob, norm_const],
        }
        return OPERATIONS[self.operation].bind(arrays[self.operation], self.options)

    @property
    def options(self) -> dict[str, object]:
        dtypes = {
            "amax": ("c_dtype",),
            "swiglu": ("ab12_dtype", "c_dtype"),
            "srelu": ("c_dtype", "d_dtype"),
            "dsrelu": ("", "d_dtype"),
        }[self.operation]
        found: dict[str, object] = dict(zip(dtypes, self.results, strict=True))
        found.pop("", None)
        return found | {"d_major" if self.operation == "dsrelu" else "c_major": self.major, "sf_vec_size": self.vec}

    def plan(self, target: Target = HOPPER) -> Kernel | NoKernel:
        return OPERATIONS[self.operation].find_kernel(self.bound(), target)

    @property
    def operands(self) -> Operands:
        """How the operands have to be brought to the core."""
        if self.scale is not None:
            return Operands("blocks", self.element, self.scale, self.vec)
        if self.element == "float32":
            return Operands("split", "float32")
        if self.element in FP8 and self.majors != "kk":
            return Operands("values", self.element)
        return Operands()

    @property
    def has_few_rows(self) -> bool:
        """Whether there are kernels for few rows, which leave sums."""
        return self.scale is not None and self.majors == "kk" and self.k >= 256

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of what the kernel has to get."""
        scaled, own = self.scale is not None, self.operands.way != "direct"
        alpha = self.operation != "amax"
        amax, scales = self.has_amax, self.is_quantised
        names = {
            "a b": True,
            "upstream": self.operation == "dsrelu",
            "sfa sfb": scaled,
            "prob": self.operation in ("srelu", "dsrelu"),
            "norm_const": scales,
            "old_dprob": self.operation == "dsrelu",
            "old_amax": amax,
            "pre": self.operation in ("swiglu", "srelu"),
            "c": True,
            "dprob": self.operation == "dsrelu",
        }
        last = {"scales": scales, "amax": amax} if self.operation == "swiglu" else {"amax": amax, "scales": scales}
        rest = {
            "a_values b_values": own,
            "sums": self.has_few_rows,
            "partials": self.operation == "dsrelu",
            "alpha": alpha,
        }
        return tuple(" ".join(name for name, there in (names | last | rest).items() if there).split())

    def workspace(self, rows: int, major: str) -> tuple[tuple[int, int], str]:
        """Return the shape of an operand's bf16 workspace, and its dtype."""
        depth = 3 * self.k if self.operands.way == "split" else self.k
        lines, length = (rows, depth) if major == "k" else (depth, rows)
        return (lines * self.batches, -(-length // 8) * 8), "bfloat16"


def blocks_of(operation: str) -> Iterator[Call]:
    """Yield every combination of format, majors and dtypes of results of a block-scaled product."""
    stored = (*WIDE, *FP8)
    for (element, scale, vec), major in itertools.product(FORMATS, "nm"):
        fp4 = element == E2M1
        if operation == "amax":
            results = [
                (dtype,) for dtype in (*stored, *(["float4_e2m1fn_x2", "uint8"] if fp4 and major == "n" else []))
            ]
        else:
            first = WIDE if operation == "dsrelu" else stored
            fits = [dtype for dtype in stored if dtype in WIDE or (scale == E8M0 and vec == 32)]
            results = list(itertools.product(first, fits))
        if operation == "swiglu" and fp4 and major == "m":
            continue
        for majors, dtypes in itertools.product(["kk"] if fp4 else ["kk", "kn", "mk", "mn"], results):
            yield Call(operation, element, scale, vec, majors, dtypes, major)


def unscaled() -> Iterator[Call]:
    """Yield every combination of dtypes and majors of gemm_swiglu without scales."""
    elements, stored = (*WIDE, *FP8), (*WIDE, *FP8)
    for element, majors, ab12, c, major in itertools.product(
        elements, ("kk", "kn", "mk", "mn"), stored, ("float16", "bfloat16"), "nm"
    ):
        yield Call("swiglu", element, None, 16, majors, (ab12, c), major)


CALLS = {name: [*blocks_of(name)] for name in OPERATIONS}
CALLS["swiglu"] += unscaled()

SAMPLE = [
    Call("swiglu", majors="mn", results=("float32", "float16"), major="m"),
    Call("swiglu", E4M3, majors="kk", results=("bfloat16", "bfloat16")),
    Call("swiglu", E4M3, majors="mk", results=("bfloat16", "bfloat16")),
    Call("swiglu", "float32", majors="mk", results=("float32", "float16")),
    Call("swiglu", E4M3, E8M0, 32, "kn", ("bfloat16", E4M3)),
    Call("amax", E2M1, E4M3, 16, results=("float32",)),
    Call("srelu", E5M2, E8M0, 32, "mn", ("bfloat16", "bfloat16"), "m"),
    Call("dsrelu", E2M1, E8M0, 16, "kk", ("float32", "float16")),
]
"""One call of every kind of operands and of every epilogue."""

FEW_ROWS = [
    Call("amax", E4M3, E8M0, 32, results=("float32",), k=512, batches=1),
    Call("amax", E2M1, E4M3, 16, results=("uint8",), k=512, batches=1),
    Call("swiglu", E2M1, E8M0, 32, results=("bfloat16", "bfloat16"), k=512, batches=1),
    Call("swiglu", E5M2, E8M0, 32, results=("float16", E4M3), k=512, batches=1),
    Call("srelu", E2M1, E4M3, 16, results=("bfloat16", "bfloat16"), major="m", k=512, batches=1),
    Call("dsrelu", E4M3, E8M0, 32, results=("bfloat16", E4M3), k=512, batches=1),
    Call("dsrelu", E2M1, E8M0, 16, results=("float32", "float16"), k=512, batches=1),
]
"""Calls that kernels for few rows may serve, of every format and every epilogue."""
