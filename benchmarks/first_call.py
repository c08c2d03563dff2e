"""Time the first call of an operation in fresh processes, with a kernel cache that was filled beforehand.

    fe compile fe-norm --arch sm_90a                 # on any machine
    python benchmarks/first_call.py --json out.json  # on the GPU, with the same FE_CACHE_DIR

Each process imports torch and makes its CUDA context first; what is timed is ``import fe_norm`` and the first call,
until the result is there. ``FE_NO_JIT=1`` is set, so a process that would have to compile a kernel fails. One more
process goes first, untimed: it leaves the bytecode that installing leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PROGRAM = """
import json, sys, time
import torch
x = torch.randn(1560, 1024, device="cuda").bfloat16()
w = torch.ones(1024, device="cuda").bfloat16()
torch.cuda.synchronize()
start = time.perf_counter()
from fe_norm import rmsnorm_silu_wrapper
o, _ = rmsnorm_silu_wrapper(x, w, backend="sm90")
torch.cuda.synchronize()
seconds = time.perf_counter() - start
v = x.double()
z = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
error = ((o.double() - z * torch.sigmoid(z)).norm() / z.norm()).item()
from importlib.util import find_spec
print(json.dumps({"seconds": seconds, "error": error, "compiler_imported": "cutlass" in sys.modules,
                  "compiler_installed": find_spec("cutlass") is not None, "gpu": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "python": sys.version.split()[0]}))
"""


def main() -> None:
    """Run the processes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--commit", default="unknown", help="recorded as it is")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _run()
    runs = [_run() for _ in range(options.processes)]
    seconds = sorted(run["seconds"] for run in runs)
    record = {
        "what": "first call of rmsnorm_silu in a fresh process, import included, kernel from the disk cache",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": options.commit,
        "median_seconds": seconds[len(seconds) // 2],
        "runs": runs,
    }
    print(json.dumps({key: value for key, value in record.items() if key != "runs"}), [round(s, 4) for s in seconds])
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def _run() -> dict[str, float]:
    env = {**os.environ, "FE_NO_JIT": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    run: dict[str, float] = json.loads(done.stdout)
    return run


if __name__ == "__main__":
    main()
