"""Looks at values on the device: when they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fe_runtime import env, values
from fe_runtime.arrays import Device
from fe_runtime.contract import Bound
from fe_runtime.values import with_value_check

VARIABLE = "PEER_CHECKS_VALUES"


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("peer", [False, True])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_when_values_are_looked_at(
    device: str, ours: bool, peer: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(values, "_is_capturing", lambda: capturing)
    monkeypatch.setattr(env, "check_device_values", lambda: ours)
    if peer:
        monkeypatch.setenv(VARIABLE, "1")
    run = with_value_check(
        lambda _bound, read: looks.append(read("x")), Bound("op", device=Device(device)), ("x",), sum, VARIABLE
    )
    if device == "cuda" and peer and capturing:
        with pytest.raises(RuntimeError, match=f"op: {VARIABLE} asks for a look"):
            run([np.float32(3)])
        return
    assert run([np.float32(3)]) == 3
    assert bool(looks) == (device == "cpu" or (device == "cuda" and (peer or (ours and not capturing))))


def test_without_a_variable_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_is_capturing", lambda: True)
    run = with_value_check(_refuse, Bound("op", device=Device("cuda")), ("x",), sum)
    assert run([1]) == 1


def _refuse(_bound: Bound, _read: Any) -> None:
    raise AssertionError("values were looked at")
