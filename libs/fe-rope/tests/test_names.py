"""What the library exports: the version, its operations, and the peer's names as the same objects."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import fe_rope

PEER = (
    "RopeQDQInplace",
    "TailRoPEForward",
    "VisionRoPEBackward",
    "rope_qdq_inplace",
    "tail_rope",
    "vision_rope_backward_wrapper",
)
OURS = ("rope_qdq_jax", "tail_rope_jax", "vision_rope_backward_jax")


def test_version_is_the_distributions() -> None:
    assert fe_rope.__version__ == version("fe-rope")


def test_public_names() -> None:
    assert fe_rope.__all__ == [*sorted((*PEER, *OURS, "compat")), "__version__"]
    assert set(fe_rope.__all__) <= set(dir(fe_rope))


def test_the_peers_names_are_the_same_objects() -> None:
    assert sorted(fe_rope.compat.__all__) == sorted(PEER)
    for name in PEER:
        assert getattr(fe_rope.compat, name) is getattr(fe_rope, name)


@pytest.mark.parametrize("first", ["fe_rope.tail_rope", "fe_rope.kernels", "fe_rope.compat"])
def test_a_name_that_a_module_shares_is_the_function(first: str) -> None:
    code = f"import {first}, fe_rope; assert callable(fe_rope.tail_rope), fe_rope.tail_rope"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_loads_no_framework() -> None:
    code = (
        "import sys, fe_rope; fe_rope.tail_rope, fe_rope.rope_qdq_inplace, fe_rope.compat.VisionRoPEBackward;"
        "print([name for name in ('torch', 'jax', 'cutlass', 'tvm_ffi', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
