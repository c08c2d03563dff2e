"""``causal_conv1d`` as a part of torch: autograd, checkpointing, torch.compile, the registered operations, the
route."""

from __future__ import annotations

import threading
from typing import Any

import conv_oracle as oracle
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fe_conv
from fe_conv import causal_conv1d, sequence
from fe_runtime import NotSupportedError

D, T, W = 3, 11, 4
MODES = {
    "rows": {},
    "rows with states": {"states": True},
    "packed": {"offsets": [0, 1, 4, 4, 6, 11]},
    "packed with states": {"offsets": [0, 2, 2, 11], "states": True},
    "packed, tokens outside": {"offsets": [2, 3, 7]},
    "labels": {"labels": [[0, 0, 0, 1, 1, -1, -1, 1, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 4, 4, -3, 5]]},
}


class Case:
    """Leaves in float64 and the same as numpy, for one mode."""

    def __init__(self, mode: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        known = dict(MODES[mode])
        has_states = known.pop("states", False)
        self.where = {name: np.asarray(value, np.int32) for name, value in known.items()}
        batch = 1 if "offsets" in self.where else 2
        rows = len(self.where["offsets"]) - 1 if "offsets" in self.where else batch
        self.values = oracle.operands(batch, D, T, W, rows=rows, seed=seed)
        if not has_states:
            del self.values["states"]
        self.leaves = {
            name: torch.tensor(value, dtype=dtype, requires_grad=True) for name, value in self.values.items()
        }
        names = {"offsets": "cu_seqlens", "labels": "seq_idx"}
        self.metadata = {names[name]: torch.from_numpy(value) for name, value in self.where.items()}
        self.has_final = "labels" not in self.where

    def run(self, *leaves: Any, channel_last: bool = False, activation: str = "silu") -> tuple[Any, ...]:
        """Call the function on the leaves, or on others in their order."""
        given = dict(zip(self.values, leaves, strict=True)) if leaves else dict(self.leaves)
        x, states = given.pop("x"), given.pop("states", None)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if channel_last else x
        result = causal_conv1d(
            x,
            **given,
            activation=activation,
            initial_states=states,
            return_final_states=self.has_final,
            **self.metadata,
        )
        return result if self.has_final else (result,)

    def want(self, grads: Any) -> dict[str, Any]:
        """Return the gradients by naive loops."""
        dy, dfinal = [g.detach().numpy() for g in grads] if self.has_final else (grads[0].detach().numpy(), None)
        return oracle.backward(dy, dfinal, **self.values, activation="silu", **self.where)


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_naive_loop(mode: str, channel_last: bool) -> None:
    case = Case(mode)
    outputs = case.run(channel_last=channel_last)
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    want = case.want(grads)
    for name, leaf in case.leaves.items():
        np.testing.assert_allclose(leaf.grad.numpy(), want[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: str) -> None:
    """Finite differences in float64 of the operation itself."""
    case = Case(mode)
    for activation in ("identity", "silu"):
        assert torch.autograd.gradcheck(
            lambda *leaves, act=activation: case.run(*leaves, activation=act), tuple(case.leaves.values())
        )


def test_no_second_derivative() -> None:
    case = Case("rows with states")
    with pytest.raises(NotSupportedError, match="causal_conv1d_backward has no derivative"):
        torch.autograd.gradgradcheck(case.run, tuple(case.leaves.values()))


@pytest.mark.parametrize("make", ["expanded", "transposed", "every other", "permuted batch"])
def test_incoming_gradients_of_any_strides(make: str) -> None:
    case = Case("rows with states")
    outputs = case.run(channel_last=make == "permuted batch")
    grads = []
    for output in outputs:
        b, d, t = output.shape
        grads.append(
            {
                "expanded": lambda b=b, d=d, t=t: torch.randn(b, 1, 1, dtype=torch.float64).expand(b, d, t),
                "transposed": lambda b=b, d=d, t=t: torch.randn(b, t, d, dtype=torch.float64).transpose(1, 2),
                "every other": lambda b=b, d=d, t=t: torch.randn(b, d, 2 * t, dtype=torch.float64)[..., ::2],
                "permuted batch": lambda b=b, d=d, t=t: torch.randn(t, d, b, dtype=torch.float64).permute(2, 1, 0),
            }[make]()
        )
    torch.autograd.backward(outputs, grads)
    want = case.want(grads)
    for name, leaf in case.leaves.items():
        np.testing.assert_allclose(leaf.grad.numpy(), want[name], rtol=1e-11, atol=1e-11, err_msg=name)


def test_the_loss_may_use_one_output_only() -> None:
    for used in (0, 1):
        case = Case("packed with states")
        outputs = case.run()
        outputs[used].sum().backward()
        grads = [torch.ones_like(o) if n == used else torch.zeros_like(o) for n, o in enumerate(outputs)]
        want = case.want(grads)
        for name, leaf in case.leaves.items():
            np.testing.assert_allclose(leaf.grad.numpy(), want[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "states"])
def test_only_what_needs_a_gradient_gets_one(wanted: str) -> None:
    case = Case("rows with states")
    for name, leaf in case.leaves.items():
        leaf.requires_grad_(name == wanted)
    outputs = case.run()
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    want = case.want(grads)
    for name, leaf in case.leaves.items():
        assert (leaf.grad is None) == (name != wanted)
    np.testing.assert_allclose(case.leaves[wanted].grad.numpy(), want[wanted], rtol=1e-11, atol=1e-11)


def test_gradients_have_the_dtypes_of_their_operands() -> None:
    x = torch.randn(1, D, T, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(D, W, requires_grad=True)
    bias = torch.randn(D, dtype=torch.bfloat16, requires_grad=True)
    states = torch.randn(1, D, W - 1, dtype=torch.bfloat16, requires_grad=True)
    y = causal_conv1d(x, weight, bias, "silu", initial_states=states)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert [leaf.grad.dtype for leaf in (x, weight, bias, states)] == [  # type: ignore[union-attr]
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    ]


def test_gradient_through_a_final_state_of_the_caller() -> None:
    case = Case("rows")
    out = torch.zeros(2, D, W - 1, dtype=torch.float64)
    _, final = causal_conv1d(case.leaves["x"], case.leaves["weight"], return_final_states=True, final_states_out=out)
    assert final is out
    (out * 3).sum().backward()
    want = np.zeros((2, D, T))
    want[..., T - W + 1 :] = 3
    np.testing.assert_array_equal(case.leaves["x"].grad.numpy(), want)  # type: ignore[union-attr]


def test_states_hand_a_gradient_over_to_the_part_before() -> None:
    """Two halves with a state between them have the gradients of the whole."""
    case = Case("rows")
    x, weight, bias = case.leaves.values()
    whole = torch.autograd.grad(causal_conv1d(x, weight, bias, "silu").square().sum(), (x, weight, bias))
    first, states = causal_conv1d(x[..., :2], weight, bias, "silu", return_final_states=True)
    second = causal_conv1d(x[..., 2:], weight, bias, "silu", initial_states=states)
    parts = torch.autograd.grad(first.square().sum() + second.square().sum(), (x, weight, bias))
    for part, one in zip(parts, whole, strict=True):
        np.testing.assert_allclose(part.numpy(), one.numpy(), rtol=1e-10, atol=1e-12)


def test_activation_checkpointing_unpacks_once() -> None:
    case = Case("packed with states")
    unpacked: list[int] = []

    def unpack(tensor: Any) -> Any:
        unpacked.append(id(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        outputs = case.run()
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert len(unpacked) == 5  # x, weight, bias, offsets, states

    plain = {name: leaf.grad.clone() for name, leaf in case.leaves.items()}
    for leaf in case.leaves.values():
        leaf.grad = None
    outputs = checkpoint(case.run, *case.leaves.values(), use_reentrant=False)
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    for name, leaf in case.leaves.items():
        assert torch.equal(leaf.grad, plain[name])


def test_no_grad_and_autocast() -> None:
    case = Case("rows", torch.float32)
    with torch.no_grad():
        assert not case.run()[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        y = case.run()[0]
    assert y.dtype == torch.float32  # inputs are used as they are given
    assert torch.equal(y, case.run()[0])


# --- torch.compile and the registered operations ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_compiles_as_one_graph_with_its_gradient(mode: str) -> None:
    case, compiled = Case(mode), Case(mode)
    eager = case.run(channel_last=True)
    run = torch.compile(lambda *leaves: compiled.run(*leaves, channel_last=True), fullgraph=True, backend="aot_eager")
    outputs = run(*compiled.leaves.values())
    for got, want in zip(outputs, eager, strict=True):
        assert torch.equal(got, want)
        assert got.transpose(1, 2).is_contiguous()
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(eager, grads)
    for name, leaf in compiled.leaves.items():
        assert torch.equal(leaf.grad, case.leaves[name].grad), name


def test_another_length_is_compiled_once_more_and_no_more() -> None:
    count = 0

    def backend(graph: Any, _inputs: Any) -> Any:
        nonlocal count
        count += 1
        return graph

    run = torch.compile(causal_conv1d, fullgraph=True, backend=backend)
    weight = torch.randn(D, W)
    for length in (5, 6, 7, 12, 100):
        x = torch.randn(2, length, D).transpose(1, 2)
        assert torch.equal(run(x, weight), causal_conv1d(x, weight))
    assert count == 2


def test_compiled_code_writes_the_final_states_of_the_caller() -> None:
    x, weight, out = torch.randn(2, D, T), torch.randn(D, W), torch.zeros(2, D, W - 1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Any, weight: Any, out: Any) -> Any:
        y, _ = causal_conv1d(x, weight, return_final_states=True, final_states_out=out)
        return y

    run(x, weight, out)
    assert torch.equal(out, x[..., T - W + 1 :])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["causal_conv1d", "causal_conv1d_channel_last"])
def test_opcheck(operation: str, mode: str) -> None:
    case = Case(mode, torch.float32)
    x, states = case.leaves["x"], case.leaves.get("states")
    if operation.endswith("channel_last"):
        x = x.detach().transpose(1, 2).contiguous().requires_grad_()
    where = (case.metadata.get("seq_idx"), case.metadata.get("cu_seqlens"))
    arrays = (x, case.leaves["weight"], case.leaves["bias"], *where, states)
    options = {"activation": "silu", "return_final_states": case.has_final}
    torch.library.opcheck(getattr(torch.ops.fe_conv, operation).default, arrays, options)
    detached = [None if a is None else a.detach() for a in arrays]
    y, final = getattr(torch.ops.fe_conv, operation)(*detached, **options)
    grads = (torch.randn_like(y), None if final is None else torch.randn_like(final))
    backward = getattr(torch.ops.fe_conv, f"{operation}_backward").default
    torch.library.opcheck(backward, (*grads, *detached), {"activation": "silu"})


def test_vmap_says_that_it_cannot() -> None:
    x, weight = torch.randn(4, 2, D, T), torch.randn(D, W)
    with pytest.raises(NotSupportedError, match=r"causal_conv1d: torch\.vmap cannot map this call"):
        torch.vmap(lambda one: causal_conv1d(one, weight))(x)


# --- the route -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_last", None)


@pytest.mark.usefixtures("no_route")
def test_the_last_route() -> None:
    case = Case("rows")
    assert fe_conv.causal_conv1d_last_route() is None
    case.run()
    assert fe_conv.causal_conv1d_last_route() == "generic"
    causal_conv1d(np.ones((1, 2, 3)), np.ones((2, 2)))
    assert fe_conv.causal_conv1d_last_route() == "generic"


@pytest.mark.usefixtures("no_route")
def test_compiling_does_not_touch_the_last_route() -> None:
    x, weight = torch.randn(1, D, T), torch.randn(D, W)
    torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")(x, weight)
    torch.export.export(_Module(), (x, weight))
    assert fe_conv.causal_conv1d_last_route() is None


@pytest.mark.usefixtures("no_route")
def test_the_last_route_keeps_no_tensor_alive() -> None:
    import weakref

    x = torch.randn(1, D, T)
    causal_conv1d(x, torch.randn(D, W))
    alive = weakref.ref(x)
    del x
    assert alive() is None
    assert fe_conv.causal_conv1d_last_route() == "generic"


class _Module(torch.nn.Module):
    def forward(self, x: Any, weight: Any) -> Any:
        return causal_conv1d(x, weight, activation="silu")


def test_threads_get_their_own_results() -> None:
    weight = torch.randn(D, W)
    inputs = [torch.randn(1, D, T + n) for n in range(8)]
    want = [causal_conv1d(x, weight) for x in inputs]
    got: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(20):
            got[number] = causal_conv1d(inputs[number], weight)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[n], want[n]) for n in range(len(inputs)))
