"""Which kernel a call of ``causal_conv1d`` gets: what compiles once for many calls, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from fe_conv import causal_conv1d_last_route, sequence
from fe_conv.sequence import BACKWARD, CHANNEL_LAST, CHANNEL_LAST_BACKWARD, OPERATION
from fe_runtime import TensorDesc
from fe_runtime.plan import Target

LAYOUTS = [False, True]


def on_gpu(dtype: str, *shape: int, stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def arrays(
    channel_last: bool, batch: int = 2, length: int = 500, channels: int = 256, width: int = 4, **changed: Any
) -> list[Any]:
    dtype = changed.get("dtype", "bfloat16")
    shape = (batch, length, channels) if channel_last else (batch, channels, length)
    offsets = changed.get("offsets")
    rows = batch if offsets is None else offsets - 1
    return [
        on_gpu(dtype, *shape, stride=changed.get("stride")),
        on_gpu(changed.get("weight_dtype", dtype), channels, width),
        on_gpu(dtype, channels) if changed.get("bias") else None,
        on_gpu("int32", batch, length) if changed.get("labels") else None,
        None if offsets is None else on_gpu(changed.get("kind", "int32"), offsets),
        on_gpu(dtype, rows, channels, width - 1) if changed.get("states") else None,
    ]


def kernel(operation: Any, given: list[Any], target: Target | None = None, **options: Any) -> Any:
    plan = operation.plan(operation.bind(given, options), target=target)
    assert plan.kernel is not None, plan.explain()
    return plan.kernel


def backward_kernel(channel_last: bool, final: bool, **known: Any) -> Any:
    x, *rest = arrays(channel_last, **known)
    rows = known["offsets"] - 1 if "offsets" in known else x.shape[0]
    channels, width = rest[0].shape
    dfinal = on_gpu(x.dtype, rows, width - 1, channels) if final else None
    operation = CHANNEL_LAST_BACKWARD if channel_last else BACKWARD
    return kernel(operation, [x, dfinal, x, *rest], activation="silu")


@pytest.mark.parametrize("channel_last", LAYOUTS)
def test_batches_and_offsets_are_not_in_the_kernel_key(channel_last: bool) -> None:
    operation = CHANNEL_LAST if channel_last else OPERATION
    specs = {kernel(operation, arrays(channel_last, batch=n), activation="silu").spec for n in (1, 2, 77)}
    assert len(specs) == 1
    specs = {kernel(operation, arrays(channel_last, batch=1, offsets=n)).spec for n in (2, 3, 1000)}
    assert len(specs) == 1
    assert len({backward_kernel(channel_last, True, batch=1, offsets=n, states=True).spec for n in (2, 9)}) == 1


def test_lengths_are_not_in_the_kernel_key() -> None:
    assert len({kernel(CHANNEL_LAST, arrays(True, length=n)).spec for n in (1, 2, 3, 63, 64, 8192, 2**21)}) == 1
    assert len({backward_kernel(True, False, length=n).spec for n in (1, 2, 3, 63, 64, 8192, 2**21)}) == 1
    # with the tokens inside, their number decides how wide the loads may be
    assert len({kernel(OPERATION, arrays(False, length=n)).spec for n in (8, 64, 8192, 2**21)}) == 1


@pytest.mark.parametrize("channel_last", LAYOUTS)
def test_what_changes_the_code_is_in_the_kernel_key(channel_last: bool) -> None:
    operation = CHANNEL_LAST if channel_last else OPERATION
    specs = [
        kernel(operation, arrays(channel_last)).spec,
        kernel(operation, arrays(channel_last), activation="silu").spec,
        kernel(operation, arrays(channel_last), return_final_states=True).spec,
        kernel(operation, arrays(channel_last, bias=True)).spec,
        kernel(operation, arrays(channel_last, labels=True)).spec,
        kernel(operation, arrays(channel_last, states=True)).spec,
        kernel(operation, arrays(channel_last, batch=1, offsets=5)).spec,
        kernel(operation, arrays(channel_last, batch=1, offsets=5, kind="int64")).spec,
        kernel(operation, arrays(channel_last, width=3)).spec,
        kernel(operation, arrays(channel_last, dtype="float32")).spec,
        kernel(operation, arrays(channel_last, dtype="float64")).spec,
        kernel(operation, arrays(channel_last, weight_dtype="float32")).spec,
    ]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("channel_last", LAYOUTS)
def test_the_form_is_that_of_the_given_arrays(channel_last: bool) -> None:
    given = arrays(channel_last, batch=1, offsets=5, states=True, bias=True)
    form = kernel(CHANNEL_LAST if channel_last else OPERATION, given, return_final_states=True).form
    assert form.inputs == tuple(None if a is None else tuple(a.shape) for a in given)
    assert form.outputs == (tuple(given[0].shape), (4, 3, 256))
    assert form.scalars == ()


def test_scratch_of_the_gradient_grows_with_the_tokens() -> None:
    """The partial sums of weight and bias, which a second kernel adds in a fixed order."""
    sizes = [backward_kernel(True, False, length=n).form.scratch[0][0] for n in (64, 64 * 1024)]
    assert sizes[1][0] > sizes[0][0]
    assert sizes[1][1] == sizes[0][1]


@pytest.mark.parametrize("channel_last", LAYOUTS)
@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm120")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str, channel_last: bool) -> None:
    operation = CHANNEL_LAST if channel_last else OPERATION
    bound = operation.bind(arrays(channel_last), {"activation": "silu"})
    assert operation.plan(bound, target=Target(capability, 100)).backend == backend


@pytest.mark.parametrize("channel_last", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_combination_has_a_kernel(dtype: str, channel_last: bool) -> None:
    for width in (2, 3, 4, 5, 7, 64, 128):
        for known in ({}, {"bias": True, "states": True}, {"labels": True}, {"batch": 1, "offsets": 4, "states": True}):
            given = arrays(channel_last, width=width, dtype=dtype, channels=33, length=77, **known)
            kernel(CHANNEL_LAST if channel_last else OPERATION, given)
            backward_kernel(channel_last, not known.get("labels"), width=width, dtype=dtype, channels=33, **known)


def test_the_route_of_a_call_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"activation": "silu", "return_final_states": False}
    for needs_gradient, route in ((True, "native-autograd"), (False, "native-inference")):
        monkeypatch.setattr(sequence, "_last", (CHANNEL_LAST, arrays(True), options, "auto", needs_gradient))
        assert causal_conv1d_last_route() == route
    monkeypatch.setattr(sequence, "_last", (CHANNEL_LAST, arrays(True), options, "reference", False))
    assert causal_conv1d_last_route() == "generic"
