"""``shard_map`` over four devices: the operation works on local shards, and gradients sum over replicated inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_shard_map(tmp_path):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "FE_CACHE_DIR": str(tmp_path),
    }
    program = str(Path(__file__).with_name("sharded_program.py"))
    run = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.endswith("done\n"), run.stderr
