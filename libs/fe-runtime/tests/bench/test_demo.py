from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fe_runtime.bench.demo import demo_cases, run_case
from fe_runtime.bench.places import NumpyPlace
from fe_runtime.bench.workload import Expected, Workload


def test_a_right_operation_is_ok_and_timed(scale: Workload) -> None:
    (workload, case), _ = demo_cases([scale])
    row = run_case(workload, case, NumpyPlace())
    assert row.ok
    assert row.error is not None
    assert row.bound is not None
    assert row.error <= row.bound
    assert row.seconds is not None
    assert row.plain_seconds is not None
    assert row.seconds > 0
    assert row.plain_seconds > 0
    assert (row.operation, row.shape, row.format, row.backend) == ("scale", "3x16", "fp32", "reference on the CPU")


def test_a_wrong_operation_is_not_ok(scale: Workload) -> None:
    wrong = dataclasses.replace(
        scale, expected=lambda c, i: Expected(i["x_tensor"] * 2.001, np.abs(i["x_tensor"]) * 1e-4)
    )
    row = run_case(wrong, wrong.demo[0], NumpyPlace())
    assert not row.ok
    assert row.error == pytest.approx(5e-4, rel=0.01)


def test_an_operation_that_raises_becomes_a_row(scale: Workload) -> None:
    def failing(*_arguments: object) -> Expected:
        raise RuntimeError("no such thing")

    row = run_case(dataclasses.replace(scale, expected=failing), scale.demo[0], NumpyPlace())
    assert not row.ok
    assert row.note == "RuntimeError: no such thing"
    assert json.loads(json.dumps(row.as_json()))["error"] is None
