"""The compiled functions of the dense products take the arguments that their plans name, and refuse others.

They check them before they use a GPU. Here there is none: a call whose arguments are all right ends where the driver is
needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dense_plans import FEW_ROWS, SAMPLE, Call
from device_arrays import ADDRESS, DeviceArray

import fe_runtime
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import load
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits
from fe_runtime.plan import Kernel


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    try:
        capability(Device("cuda", 0))
    except RuntimeError:
        return
    pytest.skip("a GPU would run kernels on arrays that are not there")


def stored(dtype: str) -> str:
    """Return the dtype in which a kernel sees an array."""
    return "uint8" if bits(dtype) <= 8 else dtype


def seen(shape: tuple[int, ...], given: Sequence[int], stride: Sequence[int]) -> Sequence[int] | None:
    """Return the strides of an array that a kernel sees in another shape: as bytes of FP4 pairs, or as a vector."""
    if len(shape) == len(given) == 3 and shape[1] != given[1]:
        return stride[0] // 2, 1, stride[2] // 2
    return stride if shape == tuple(given) else None


def arrays_of(bound: Bound, kernel: Kernel) -> list[DeviceArray]:
    """Return what the runtime would pass: inputs, outputs to accumulate into, outputs, scratch."""
    shapes = [shape for shape in kernel.form.inputs if shape is not None]
    inputs = [
        DeviceArray(shape, stored(desc.dtype), seen(shape, desc.shape, desc.stride))
        for shape, desc in zip(shapes, bound.arrays.values(), strict=True)
    ]
    outputs = [
        (DeviceArray(shape, stored(spec.dtype), seen(shape, spec.shape, spec.stride)), spec.accumulate)
        for shape, spec in zip(kernel.form.outputs, bound.outputs, strict=True)
        if shape is not None and spec is not None
    ]
    return [
        *inputs,
        *(array for array, accumulates in outputs if accumulates),
        *(array for array, _ in outputs),
        *(DeviceArray(*known) for known in kernel.form.scratch),
    ]


class Compiled:
    """The compiled function of a call."""

    def __init__(self, call: Call) -> None:
        plan = call.plan()
        assert isinstance(plan, Kernel)
        self.call, self.run = call, load(plan.spec)
        self.names = dict(plan.spec.config)["arguments"].split()

    def arrays(self, m: int) -> dict[str, DeviceArray]:
        """Return the right arrays for M rows, by the names of the arguments."""
        call = replace(self.call, m=m)
        plan = call.plan()
        assert isinstance(plan, Kernel)
        arrays = arrays_of(call.bound(), plan)
        return dict(zip(self.names, arrays, strict=len(self.names) == len(arrays)))

    def __call__(self, arrays: dict[str, DeviceArray], without: int = 0) -> None:
        import tvm_ffi

        arguments: list[Any] = [tvm_ffi.from_dlpack(array) for array in arrays.values()]
        arguments += [1.0] * (len(self.names) - len(arrays))
        self.run(*arguments[: len(arguments) - without])

    def accepts(self, arrays: dict[str, DeviceArray]) -> None:
        with pytest.raises(RuntimeError, match="CUDA"):
            self(arrays)

    def refuses(self, arrays: dict[str, DeviceArray]) -> bool:
        try:
            self(arrays)
        except (TypeError, ValueError):
            return True
        except RuntimeError:
            return False
        return False


def check(call: Call) -> None:
    compiled = Compiled(call)
    for m in (16, 48, 1024, 100_000):
        compiled.accepts(compiled.arrays(m))
    right = compiled.arrays(48)
    with pytest.raises(TypeError):
        compiled(right, without=1)
    for name, array in right.items():
        changes = {
            "another dtype": DeviceArray(array.shape, "float16" if array.dtype != "float16" else "uint8", array.stride),
            "another rank": DeviceArray((1, 1, 1, 1), array.dtype),
        }
        if name not in ("prob", "dprob", "old_dprob", "norm_const", "amax", "old_amax", "partials"):
            changes["another address"] = DeviceArray(array.shape, array.dtype, array.stride, ADDRESS + 4)
        if name.endswith("_values") or name == "sums":
            lines, length = array.shape
            changes["another pitch"] = DeviceArray((lines, length + (2 if name == "sums" else 4)), array.dtype)
        if name in ("a", "b", "c", "pre", "upstream"):
            changes["gaps everywhere"] = DeviceArray(array.shape, array.dtype, [2 * step for step in array.stride])
        for what, wrong in changes.items():
            assert compiled.refuses(right | {name: wrong}), f"{call}: {name} with {what} is taken"


@pytest.mark.parametrize("call", [SAMPLE[3], SAMPLE[-1], FEW_ROWS[0]], ids=str)
def test_sample(call: Call) -> None:
    check(call)


@pytest.mark.compile
@pytest.mark.parametrize("call", [*SAMPLE, *FEW_ROWS], ids=str)
def test_every_kind_of_operands_and_every_epilogue(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("call", [SAMPLE[2]], ids=str)
def test_strides_of_single_rows_mean_nothing(call: Call) -> None:
    compiled = Compiled(replace(call, majors="kn"))
    right = compiled.arrays(1)
    for stride in (1, 3, 7):
        matrices = {
            name: DeviceArray(array.shape, array.dtype, (stride, *array.stride[1:]))
            for name, array in right.items()
            if name in ("a", "c", "pre")
        }
        compiled.accepts(right | matrices)
