"""A process that compiles the kernels whose specs it reads, one JSON line each, and answers with one line each."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

from .cache import Origin, obtain
from .spec import KernelSpec

__all__ = ["main"]


def main() -> None:
    """Serve until the input ends. Whatever kernels and compiler print goes to standard error."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # the FFI would import it; seconds and memory for nothing
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_compile(KernelSpec.from_identity(line))), file=answers, flush=True)


def _compile(spec: KernelSpec) -> dict[str, object]:
    start = time.perf_counter()
    try:
        _, origin = obtain(spec, jit=True)
    except Exception as error:
        return {"error": "".join(traceback.format_exception_only(error)).strip()}
    if origin is Origin.UNSTORED:
        return {"error": "the kernel was compiled but could not be stored; see the log"}
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
