"""The helpers load a framework, hypothesis or pytest only when one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fe_runtime.testing

CODE = """
import sys
import fe_runtime.testing
from fe_runtime.testing import {names}
loaded = [name for name in ("torch", "jax", "hypothesis", "pytest", "cutlass", "tvm_ffi") if name in sys.modules]
sys.exit(str(loaded) if loaded else 0)
"""


def test_importing_every_helper_loads_no_framework() -> None:
    code = CODE.format(names=", ".join(fe_runtime.testing.__all__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", fe_runtime.testing.__all__)
def test_every_name_exists(name: str) -> None:
    assert callable(getattr(fe_runtime.testing, name))
