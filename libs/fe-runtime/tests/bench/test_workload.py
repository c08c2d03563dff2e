from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_runtime.bench.workload import Case, Peer, Workload

CASES = {
    "bf16": Case({"T": 4, "C": 8}, "bfloat16"),
    "bf16 -> fp8": Case({"T": 4, "C": 8}, "bfloat16", {"out_dtype": "float8_e4m3fn"}),
    "fp32 -> nvfp4 + bias": Case({"T": 4, "C": 8}, "float32", {"out_dtype": "nvfp4"}, ("bias_tensor",)),
    "fp16, causal=True": Case({"T": 4, "C": 8}, "float16", {"causal": True}),
}


@pytest.mark.parametrize("text", CASES)
def test_format_says_what_differs_from_the_defaults(text: str) -> None:
    assert CASES[text].format == text
    assert CASES[text].shape == "4x8"


def test_names_come_from_the_target(scale: Workload) -> None:
    assert (scale.name, scale.library) == ("scale", "fe_example")
    assert scale.load_operation().qualified_name == "fe_example.scale"
    assert Peer("liger", "norm only", lambda case: print).label == "liger (norm only)"


def test_wrapper_of_another_signature_is_adapted(scale: Workload) -> None:
    doubled = replace(scale, title="twice", adapt=lambda function: lambda **given: {"o_tensor": function, **given})
    assert doubled.name == "twice"
    wrapper = doubled.load_wrapper()
    assert wrapper(x_tensor=1) == {"o_tensor": scale.load_wrapper(), "x_tensor": 1}
    assert wrapper.__name__ == "scale_wrapper"


def test_declaring_a_workload_loads_no_framework() -> None:
    code = "import sys, fe_runtime.bench.workload, fe_runtime.bench.accuracy; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for framework in ("torch", "jax", "cutlass", "matplotlib", "rich"):
        assert f"'{framework}'" not in loaded
