"""Equality, identity and checks of KernelSpec; architecture names."""

from __future__ import annotations

import pickle

import pytest

from fe_runtime.compile import KernelSpec, arch_for


def make(**config: object) -> KernelSpec:
    return KernelSpec.of("fe_x.op", "fe_x.kernels.op:build", "sm_90a", **config)  # type: ignore[arg-type]


def test_order_of_arguments_does_not_matter() -> None:
    assert make(a=1, b="x") == make(b="x", a=1)
    assert hash(make(a=1, b="x")) == hash(make(b="x", a=1))
    assert make(a=1, b="x").config == (("a", 1), ("b", "x"))


@pytest.mark.parametrize("other", [1.0, True, "1", None, 2], ids=repr)
def test_values_of_different_kind_differ(other: object) -> None:
    assert make(a=1) != make(a=other)
    assert len({make(a=1), make(a=other)}) == 2


def test_each_field_counts() -> None:
    base = KernelSpec.of("o", "m:f", "sm_80", a=1)
    for changed in (("p", "m:f", "sm_80"), ("o", "m:g", "sm_80"), ("o", "m:f", "sm_90a")):
        assert KernelSpec.of(*changed, a=1) != base


def test_identity_round_trip() -> None:
    spec = make(flag=True, none=None, number=3, real=0.1, text="é\"'\n", big=float("inf"))
    assert KernelSpec.from_identity(spec.identity) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("value", [[1], (1,), b"x", object()], ids=lambda value: type(value).__name__)
def test_other_kinds_of_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="config value a must be"):
        make(a=value)


def test_subclasses_of_int_are_refused() -> None:
    import numpy as np

    with pytest.raises(TypeError, match="int64"):
        make(a=np.int64(1))


@pytest.mark.parametrize(
    ("operation", "builder", "arch", "named"),
    [
        ("../etc", "m:f", "sm_80", "operation"),
        ("a..b", "m:f", "sm_80", "operation"),
        ("o", "m.f", "sm_80", "builder"),
        ("o", "m:f", "90a", "arch"),
        ("o", "m:f", "sm_90a/..", "arch"),
    ],
)
def test_malformed_names_are_refused(operation: str, builder: str, arch: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KernelSpec.of(operation, builder, arch)


def test_unsorted_config_is_refused() -> None:
    with pytest.raises(ValueError, match="sorted"):
        KernelSpec("o", "m:f", (("b", 1), ("a", 2)), "sm_80")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_arch_for(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch
