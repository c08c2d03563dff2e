"""What this library declares for the ``fe`` command is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys

import numpy as np
import pytest

from fe_norm.workloads import PEERS, RMSNORM_SILU, WORKLOADS
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.discover import find_workloads
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Arrays, Case
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

EVERY_CASE = [
    *RMSNORM_SILU.demo,
    *RMSNORM_SILU.bench,
    RMSNORM_SILU.host,
    *(case for cases in RMSNORM_SILU.presets.values() for case in cases),
]
SMALL = [dataclasses.replace(case, dims={"T": 5, "C": case.dims["C"]}) for case in RMSNORM_SILU.demo]


def _name(case: Case) -> str:
    return f"{case.shape} {case.format}"


def test_the_library_declares_its_operation() -> None:
    assert RMSNORM_SILU in WORKLOADS
    assert (RMSNORM_SILU.library, RMSNORM_SILU.name) == ("fe_norm", "rmsnorm_silu")
    assert callable(RMSNORM_SILU.load_wrapper())


def test_the_fe_command_finds_it() -> None:
    found = find_workloads()
    assert "fe_norm" not in found.broken
    assert found.named("rmsnorm_silu").operation == RMSNORM_SILU.operation
    assert len(found.of_library("fe-norm")) == len(WORKLOADS)


def test_declaring_it_loads_no_framework() -> None:
    code = "import sys, fe_norm.workloads; print([n for n in ('torch', 'jax', 'cutlass', 'quack') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_expected_is_the_formula(case: Case) -> None:
    inputs = RMSNORM_SILU.inputs(case, NumpyPlace().source(3))
    x, w = (inputs[name].astype(float).tolist() for name in ("x_tensor", "w_tensor"))
    bias = inputs["bias_tensor"].astype(float).tolist() if case.optional else [0.0] * len(w)
    values = RMSNORM_SILU.expected(case, inputs).values
    for row, found in zip(x, values, strict=True):
        rms = math.sqrt(math.fsum(v * v for v in row) / len(row) + 1e-5)
        z = [v / rms * gain + shift for v, gain, shift in zip(row, w, bias, strict=True)]
        np.testing.assert_allclose(found, [v / (1 + math.exp(-v)) for v in z], rtol=1e-12)


@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(case: Case) -> None:
    problem = Problem(RMSNORM_SILU, case, NumpyPlace(), seed=4, via_host=True)
    expected = RMSNORM_SILU.expected(case, problem.host_inputs)
    result = RMSNORM_SILU.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.3, expected).ok
    swapped = result.copy()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert not judge(swapped, expected).ok


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_the_plain_expression_computes_the_operation(case: Case, place: Place) -> None:
    inputs = RMSNORM_SILU.inputs(case, NumpyPlace().source(5))
    result = RMSNORM_SILU.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    arrays = result if isinstance(result, tuple) else (result,)
    outputs = dict(zip(("o_tensor", "sf_tensor"), map(place.get, arrays), strict=False))
    found = judge(RMSNORM_SILU.decode(case, outputs), RMSNORM_SILU.expected(case, inputs))
    # torch rounds to the dtype of x between the two steps, so its output is off by up to three roundings
    assert found.error < 3 * found.bound


@pytest.mark.parametrize("case", EVERY_CASE, ids=_name)
def test_every_case_meets_the_contract_and_has_a_kernel(case: Case) -> None:
    bound = describe_case(RMSNORM_SILU, case, Device("cuda", 0))
    assert bound.batch == (case.dims["T"],)
    kernel = plan_case(RMSNORM_SILU, case, HOPPER).kernel
    assert kernel is not None
    assert dict(kernel.spec.config)["columns"] == case.dims["C"]


def test_inputs_are_what_the_operands_say() -> None:
    for case in SMALL:
        inputs = RMSNORM_SILU.inputs(case, NumpyPlace().source(0))
        operands = RMSNORM_SILU.operands(case)
        assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == operands


@pytest.mark.parametrize(
    ("out_dtype", "per_element"), [(None, 4.0), ("float8_e4m3fn", 3.0), ("nvfp4", 2 + 1 / 2 + 1 / 16)]
)
def test_minimum_bytes(out_dtype: str | None, per_element: float) -> None:
    case = Case({"T": 1000, "C": 64}, "bfloat16", {"out_dtype": out_dtype} if out_dtype else {})
    assert minimum_bytes(describe_case(RMSNORM_SILU, case, Device("cpu"))) == 1000 * 64 * per_element + 64 * 2


def test_the_shapes_of_the_targets_are_measured() -> None:
    shapes = {(case.shape, case.format) for case in RMSNORM_SILU.bench}
    assert {("16384x8192", "bf16"), ("1048576x128", "bf16")} <= shapes
    for form in ("bf16", "bf16 -> fp8", "bf16 -> nvfp4"):
        assert ("399360x1024", form) in shapes


class FakeTorch:
    """Records what the peers call."""

    class nn:  # noqa: N801 - torch's name
        class functional:  # noqa: N801
            silu = staticmethod(lambda x: ("silu", x))

    class compiler:  # noqa: N801
        reset = staticmethod(lambda: None)

    compile = staticmethod(lambda function, dynamic: lambda arrays: ("compiled", dynamic, sorted(arrays)))


def _fake_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liger:
        class LigerRMSNormFunction:
            apply = staticmethod(lambda x, w, eps: ("liger", x, w, eps))

    class Quack:
        rmsnorm = staticmethod(lambda x, w, eps: ("quack", x, w, eps))

    fakes = {"torch": FakeTorch, "liger_kernel.ops": Liger, "quack": Quack}
    monkeypatch.setattr(importlib, "import_module", fakes.__getitem__)


def test_peers_call_their_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_libraries(monkeypatch)
    arrays: Arrays = {"x_tensor": "x", "w_tensor": "w"}
    called = {peer.label: peer.make(RMSNORM_SILU.bench[0])(arrays) for peer in PEERS}
    assert called == {
        "torch.compile (the plain expression)": ("compiled", False, ["w_tensor", "x_tensor"]),
        "liger-kernel (norm, then torch silu)": ("silu", ("liger", "x", "w", 1e-5)),
        "liger-kernel (norm only)": ("liger", "x", "w", 1e-5),
        "quack-kernels (norm, then torch silu)": ("silu", ("quack", "x", "w", 1e-5)),
        "quack-kernels (norm only)": ("quack", "x", "w", 1e-5),
    }
    assert [peer.same_work for peer in PEERS] == [True, True, False, True, False]


def test_peers_say_which_formats_they_lack() -> None:
    (fp8,) = [case for case in RMSNORM_SILU.demo if case.options.get("out_dtype") == "float8_e4m3fn"]
    for peer in PEERS[1:]:
        with pytest.raises(NotImplementedError, match="no such output format"):
            peer.make(fp8)


def test_torch_compile_of_the_plain_expression_agrees() -> None:
    case = SMALL[0]
    place = TorchPlace("cpu")
    inputs = RMSNORM_SILU.inputs(case, place.source(0))
    try:
        compiled = PEERS[0].make(case)(inputs)
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        pytest.skip(f"torch.compile has no C++ compiler here: {error}")
    assert place.difference(compiled, RMSNORM_SILU.plain["torch"](case, inputs)) < 2**-8
