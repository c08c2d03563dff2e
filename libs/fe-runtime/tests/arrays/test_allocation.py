"""Allocating, padding and reading arrays."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fe_runtime.arrays import (
    alignment,
    allocate_byte_workspace,
    describe,
    empty,
    overlap,
    pad_to_ndim,
    to_host_list,
)
from fe_runtime.device import Device
from fe_runtime.dtypes import DTYPES
from fe_runtime.tensor_desc import TensorDesc

STORED = [name for name in DTYPES if name != "float4_e2m1fn"]
NARROW = [name for name in STORED if not name.startswith("float4") and "64" not in name]


class TestEmpty:
    @pytest.mark.parametrize(
        ("framework", "dtype"),
        [
            *[("torch", name) for name in STORED],
            *[("numpy", name) for name in STORED if name != "float4_e2m1fn_x2"],
            *[("jax", name) for name in NARROW],
        ],
    )
    def test_is_what_was_asked_for(self, framework: str, dtype: str) -> None:
        array = empty(framework, (3, 4), dtype, Device("cpu"))
        device = next(iter(array.devices())) if framework == "jax" else "cpu"
        shape = (3, 8) if dtype == "float4_e2m1fn_x2" else (3, 4)
        assert describe(array) == TensorDesc.of(dtype.removesuffix("_x2"), shape, device=device)
        assert type(array) is {"torch": torch.Tensor, "numpy": np.ndarray}.get(framework, type(jnp.zeros(1)))

    def test_packed_pairs_are_bytes_in_numpy(self) -> None:
        assert empty("numpy", (3,), "float4_e2m1fn_x2", "cpu").dtype == np.uint8

    def test_torch_may_poison_it(self) -> None:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # with fill_uninitialized_memory, which is on by default
        try:
            assert torch.isnan(empty("torch", (3,), "float32", "cpu")).all()
        finally:
            torch.use_deterministic_algorithms(before)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="float4_e2m1fn_x2' with the extents in bytes"):
            empty("torch", (2,), "float4_e2m1fn", "cpu")
        with pytest.raises(ValueError, match="uint8 in jax"):
            empty("jax", (2,), "float4_e2m1fn_x2", "cpu")
        with pytest.raises(ValueError, match="device must be 'cpu' for numpy; got cuda:0"):
            empty("numpy", (2,), "float32", "cuda:0")
        with pytest.raises(ValueError, match="device must be one that jax sees; got cuda:7"):
            empty("jax", (2,), "float32", "cuda:7")
        with pytest.raises(ValueError, match="framework must be"):
            empty("unknown", (2,), "float32", "cpu")

    def test_jax_does_not_narrow_silently(self) -> None:
        with pytest.raises(ValueError, match="jax_enable_x64"):
            empty("jax", (2,), "int64", "cpu")
        jax.config.update("jax_enable_x64", True)
        try:
            assert empty("jax", (2,), "int64", "cpu").dtype == np.int64
        finally:
            jax.config.update("jax_enable_x64", False)

    def test_workspace(self) -> None:
        for framework in ("torch", "numpy", "jax"):
            desc = describe(allocate_byte_workspace(24, framework, "cpu"))
            assert (desc.dtype, desc.shape) == ("uint8", (24,))


def test_pad_to_ndim() -> None:
    for array in (torch.zeros(2, 3), np.zeros((2, 3)), jnp.zeros((2, 3)), TensorDesc.of("float32", (2, 3))):
        padded = pad_to_ndim(array, 4)
        assert tuple(padded.shape) == (2, 3, 1, 1)
        assert type(padded) is type(array)
        assert pad_to_ndim(array, 2) is array
        with pytest.raises(ValueError, match="at most 1 dimensions; got 2"):
            pad_to_ndim(array, 1)
    tensor = torch.zeros(2, 3)
    assert pad_to_ndim(tensor, 3).data_ptr() == tensor.data_ptr()


def test_to_host_list() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")  # only on Linux
    values = [[1, 2], [3, 4]]
    host = np.array(values, np.int32)
    for array in (host, torch.tensor(values), jnp.array(values), tvm_ffi.from_dlpack(host)):
        assert to_host_list(array) == values


@pytest.mark.gpu
class TestOnGpu:
    def test_torch(self) -> None:
        array = empty("torch", (3, 4), "bfloat16", "cuda:0")
        assert describe(array) == TensorDesc.of("bfloat16", (3, 4), device="cuda:0")
        assert overlap(array, array[1:])
        assert alignment(array) == 16
        array.fill_(1)
        assert to_host_list(array) == [[1.0] * 4] * 3

    def test_current_device_and_stream_of_the_caller_are_kept(self) -> None:
        last = torch.cuda.device_count() - 1
        with torch.cuda.device(0):
            assert empty("torch", (2,), "float32", f"cuda:{last}").device.index == last
            assert torch.cuda.current_device() == 0

    def test_jax(self) -> None:
        # In a process of its own: jax would take most of the memory for the rest of the run.
        program = """
from fe_runtime.arrays import alignment, capability, describe, empty, overlap
import jax
array = empty("jax", (3, 4), "bfloat16", "cuda:0")
assert str(describe(array).device) == "cuda:0", describe(array)
assert overlap(array, array) and not overlap(array, array + 1) and alignment(array) == 16
found = next(iter(array.devices()))
assert capability(found) == tuple(int(n) for n in found.compute_capability.split("."))
"""
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment.pop("JAX_PLATFORMS", None)
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
