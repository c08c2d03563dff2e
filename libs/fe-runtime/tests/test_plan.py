"""Which backend serves a call: the table of the contract, the fallback and its warning, purity."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import fe_dummy
import numpy as np
import pytest
from fe_dummy import CONTRACT, OPERATION
from hypothesis import given

from fe_runtime import arrays, env, plan
from fe_runtime.contract import Bound, bind
from fe_runtime.errors import FallbackWarning, InvalidArgumentError, NotSupportedError
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Plan, Target, backend_of, check_backend, choose, fall_back
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import Call, valid_calls

AMPERE = Target((8, 0), 108)
OLD = Target((7, 5), 40)


def described(device: str = "cuda:0", rows: int = 4, **options: Any) -> Bound:
    x = TensorDesc.of("bfloat16", (rows, 8), device=device)
    return bind(CONTRACT, (x, TensorDesc.of("bfloat16", (8,), device=device), None, None), options)


def never(bound: Bound, target: Target) -> Kernel | NoKernel:
    raise AssertionError("the kernels were asked although nobody wants one")


# The table


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("device", ["cpu", "unknown"])
def test_without_a_gpu_the_reference_serves_silently(device: str, backend: str) -> None:
    found = choose(described(device), backend, never, None)
    assert found == Plan("scale_rows", "reference")


def test_with_a_kernel_the_kernel_serves() -> None:
    found = choose(described(), "auto", fe_dummy.find_kernel, HOPPER)
    assert (found.backend, found.missing, found.target) == ("sm90", None, HOPPER)
    assert found.kernel is not None
    assert found.kernel.spec.arch == "sm_90a"


@pytest.mark.parametrize(("target", "name"), [(HOPPER, "sm90"), (AMPERE, "sm80"), (Target((12, 0), 188), "sm120")])
def test_a_kernel_asked_for_by_its_name(target: Target, name: str) -> None:
    assert choose(described(), name, fe_dummy.find_kernel, target).backend == name


def test_the_reference_asked_for_asks_no_kernel() -> None:
    assert choose(described(), "reference", never, HOPPER) == Plan("scale_rows", "reference")


@pytest.mark.parametrize(("target", "options"), [(OLD, {}), (HOPPER, {"mode": "exotic"})])
def test_without_a_kernel_the_reference_serves_and_says_why(target: Target, options: dict[str, Any]) -> None:
    found = choose(described(**options), "auto", fe_dummy.find_kernel, target)
    assert (found.backend, found.kernel) == ("reference", None)
    assert found.missing is not None


def refusal(bound: Bound, backend: str, target: Target | None) -> NotSupportedError:
    with pytest.raises(NotSupportedError) as caught:
        choose(bound, backend, fe_dummy.find_kernel, target)
    return caught.value


def test_a_kernel_asked_for_never_falls_back() -> None:
    limit = refusal(described(mode="exotic"), "sm90", HOPPER)
    assert str(limit) == (
        "scale_rows: backend must have a kernel for this call; got 'sm90': mode 'exotic' has no kernel. "
        "Use mode='plain'."
    )
    assert (limit.reason, limit.found) == ("mode 'exotic' has no kernel", (9, 0))


def test_a_kernel_asked_for_on_another_architecture() -> None:
    other = refusal(described(), "sm90", AMPERE)
    assert "compute capability 8.0" in str(other)
    assert (other.found, other.supported) == ((8, 0), ((9, 0),))


@pytest.mark.parametrize("device", ["cpu", "unknown"])
def test_a_kernel_asked_for_without_a_gpu(device: str) -> None:
    error = refusal(described(device), "sm90", None)
    assert f"the arrays are on {device}, which has no kernels" in str(error)
    assert error.found is None


# The operation finds the target itself


def test_arrays_on_the_host_have_no_target() -> None:
    assert OPERATION.plan(described("cpu")).target is None


def test_without_a_driver_plans_are_made_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_device: object) -> Any:
        raise RuntimeError("CUDA is not available")

    monkeypatch.setattr(plan, "capability", unavailable)
    found = OPERATION.plan(described())
    assert (found.backend, found.target) == ("sm90", HOPPER)


def test_the_target_is_the_device_of_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(plan, "capability", lambda device: asked.append(device) or (12, 0))
    monkeypatch.setattr(plan, "sm_count", lambda _device: 188)
    assert OPERATION.plan(described("cuda:3")).backend == "sm120"
    assert asked == [arrays.Device("cuda", 3)]


def test_the_reference_asks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "capability", never)
    assert OPERATION.plan(described(), "reference").backend == "reference"


@pytest.mark.parametrize("backend", [None, 1, ["sm90"], b"auto"])
def test_a_backend_is_a_string(backend: object) -> None:
    with pytest.raises(TypeError, match=r"scale_rows: backend must be a string; got .* Leave it out"):
        check_backend("scale_rows", backend)


@pytest.mark.parametrize("backend", ["", "cuda", "SM90", "sm_90a", "sm89"])
def test_an_unknown_backend(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"backend must be one of auto, reference, sm80.*; got "):
        OPERATION.plan(described("cpu"), backend)


@pytest.mark.parametrize(
    ("arch", "backend"),
    [
        ("sm_80", "sm80"),
        ("sm_86", "sm80"),
        ("sm_89", "sm80"),
        ("sm_90a", "sm90"),
        ("sm_100a", "sm100"),
        ("sm_103a", "sm100"),
        ("sm_120a", "sm120"),
    ],
)
def test_backend_names(arch: str, backend: str) -> None:
    assert backend_of(arch) == backend
    assert backend in plan.BACKENDS


# Falling back


def fallback(operation: str = "op", reason: str = "N is odd") -> Plan:
    return Plan(operation, "reference", None, NoKernel(reason, "Pad N."), HOPPER)


def test_nothing_is_said_about_a_kernel_or_a_wanted_reference() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fall_back(Plan("op", "reference"))
        fall_back(choose(described(), "auto", fe_dummy.find_kernel, HOPPER))


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_the_warning_names_operation_constraint_and_fix() -> None:
    with pytest.warns(FallbackWarning) as caught:
        fall_back(fallback())
    assert str(caught[0].message) == (
        "op: runs the reference on the GPU: N is odd. Pad N. Set FE_STRICT=1 to make this an error."
    )
    assert caught[0].filename == __file__
    assert issubclass(FallbackWarning, UserWarning)


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_once_per_operation_and_reason() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fall_back(fallback())
            fall_back(fallback("other"))
            fall_back(fallback(reason="M is odd"))
    assert len(caught) == 3


@pytest.mark.usefixtures("fallback_not_yet_warned")
@pytest.mark.parametrize("how", ["environment", "configure"])
def test_strict_mode_raises_each_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(FallbackWarning):
        fall_back(fallback())
    if how == "environment":
        monkeypatch.setenv("FE_STRICT", "1")
    else:
        env.configure(strict=True)
    try:
        for _ in range(2):
            with pytest.raises(
                NotSupportedError, match=r"op: backend must have a kernel for this call; got 'auto': N is"
            ):
                fall_back(fallback())
    finally:
        env.configure(strict=None)


# In words


def test_explain_a_kernel() -> None:
    x = TensorDesc.of("bfloat16", (2, 3, 8), (100, 8, 1), "cuda:0")
    bound = bind(CONTRACT, (x, TensorDesc.of("bfloat16", (8,), device="cuda:0"), None, None), {})
    text = choose(bound, "auto", fe_dummy.find_kernel, HOPPER).explain()
    assert text.splitlines()[0] == "scale_rows: backend sm90"
    assert "  architecture sm_90a" in text
    assert "  channels = 8" in text
    assert "  copies x first: its leading dimensions do not merge" in text


def test_explain_a_fallback() -> None:
    text = choose(described(mode="exotic"), "auto", fe_dummy.find_kernel, HOPPER).explain()
    assert text == "scale_rows: backend reference\n  no kernel: mode 'exotic' has no kernel. Use mode='plain'."
    assert dataclasses.replace(fallback(), missing=NoKernel("it is")).explain().endswith("no kernel: it is.")


# Purity


def on_gpu(call: Call) -> list[TensorDesc | None]:
    """The metadata of a call, on a GPU, as new objects."""
    return [
        None if a is None else TensorDesc.of(a.dtype, a.shape, [s // a.itemsize for s in a.strides], "cuda:0")
        for a in call.arrays
    ]


@given(valid_calls(CONTRACT))
def test_the_same_metadata_give_the_same_plan(call: Call) -> None:
    first = choose(bind(CONTRACT, on_gpu(call), call.options), "auto", fe_dummy.find_kernel, HOPPER)
    again = choose(bind(CONTRACT, on_gpu(call), dict(call.options)), "auto", fe_dummy.find_kernel, HOPPER)
    assert first == again
    assert first.explain() == again.explain()


@given(valid_calls(CONTRACT))
def test_neither_data_nor_row_counts_change_the_kernel(call: Call) -> None:
    x = call.arrays[0]
    assert x is not None
    if x.ndim != 2:
        return
    plans = []
    for rows in (x.shape[0], x.shape[0] + 3):
        other = call._replace(arrays=(np.zeros((rows, x.shape[1]), x.dtype), *call.arrays[1:]))
        plans.append(choose(bind(CONTRACT, on_gpu(other), other.options), "auto", fe_dummy.find_kernel, HOPPER))
    specs = [found.kernel and found.kernel.spec for found in plans]
    assert specs[0] == specs[1]


def test_planning_touches_no_gpu() -> None:
    # On a machine without one this is all that can be done, and it must give the whole answer.
    found = choose(described(rows=2**40), "auto", fe_dummy.find_kernel, HOPPER)
    assert found.kernel is not None
    assert found.kernel.form.inputs[0] == (2**40, 8)
