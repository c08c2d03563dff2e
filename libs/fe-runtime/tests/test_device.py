"""The Device value and its conversions."""

from types import SimpleNamespace

import jax
import pytest
import torch

from fe_runtime.device import Device, as_device


@pytest.mark.parametrize(
    ("device", "text"), [(Device("cuda", 0), "cuda:0"), (Device("cpu"), "cpu"), (Device("unknown"), "unknown")]
)
def test_prints_like_torch(device: Device, text: str) -> None:
    assert str(device) == text
    assert as_device(text) == device


def test_is_a_frozen_value() -> None:
    assert Device("cuda", 1) == Device("cuda", 1)
    assert len({Device("cuda", 1), Device("cuda", 1), Device("cuda")}) == 2
    with pytest.raises(AttributeError):
        Device("cpu").index = 1  # type: ignore[misc]


def test_torch_devices() -> None:
    assert as_device(torch.device("cuda:3")) == Device("cuda", 3)
    assert as_device(torch.device("cuda")) == Device("cuda")
    assert as_device(torch.device("cpu", 0)) == as_device(torch.device("cpu")) == Device("cpu")
    assert as_device(torch.device("meta")) == Device("meta")


def test_jax_devices() -> None:
    cpu = jax.devices("cpu")[0]
    assert as_device(cpu) == Device("cpu", cpu.id)
    # The second of the processes of one run: its first GPU is number 8 of the run, and ordinal 0 for CUDA.
    assert as_device(SimpleNamespace(platform="gpu", id=8, local_hardware_id=0)) == Device("cuda", 0)
    assert as_device(SimpleNamespace(platform="gpu", id=3)) == Device("cuda", 3)


@pytest.mark.parametrize("wrong", [None, 0, 1.5, "", "cuda:", "cuda:x", "cuda:-1", "GPU 0", [], {}, object()])
def test_anything_else_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match="device must be"):
        as_device(wrong)


def test_unhashable_devices_convert() -> None:
    class Unhashable:
        type = "cuda"
        index = 2
        __hash__ = None  # type: ignore[assignment]

    assert as_device(Unhashable()) == Device("cuda", 2)
