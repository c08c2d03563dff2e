"""The registered op: schema, opcheck, torch.compile, torch.export."""

from __future__ import annotations

import fe_toy
import numpy as np
import pytest
import torch
from fe_toy import expected
from torch.fx.experimental.proxy_tensor import make_fx

from fe_runtime.tuple_dict import TupleDict

NAME = fe_toy.OPERATION.name  # loading the front door enters its operations into torch.ops
X = expected.sample(3, 4)
BIAS = np.float32([0.2, -0.4, 0.1, 0.6])


def arrays(*, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(X, requires_grad=grad), torch.tensor(BIAS, requires_grad=grad)


class Recorder:
    """A compiler backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module, _inputs):
        self.graphs.append(module)
        return module


@pytest.fixture
def recorder():
    torch._dynamo.reset()
    return Recorder()


def test_schema():
    schema = str(getattr(torch.ops.fe_toy, NAME).default._schema)
    assert schema == (
        "fe_toy::scale_clamp(Tensor x, Tensor? bias=None, *, float scale=1., float limit=1., bool mask=False, "
        'str? out_dtype=None, str backend="auto") -> (Tensor y, Tensor kept)'
    )


def test_direct_call():
    x, bias = arrays()
    y, kept = torch.ops.fe_toy.scale_clamp(x, bias, scale=2.0)
    np.testing.assert_allclose(y, expected.value(X, BIAS, 2.0), rtol=1e-6)
    assert kept is None


@pytest.mark.parametrize(
    ("name", "arguments", "keywords"),
    [
        pytest.param("scale_clamp", arrays()[:1], {}, id="one input"),
        pytest.param("scale_clamp", arrays(), {"mask": True, "out_dtype": "bfloat16"}, id="all outputs"),
        pytest.param("scale_clamp", arrays(grad=True), {"scale": 2.0, "mask": True}, id="gradient"),
        pytest.param("scale_clamp", arrays(grad=True), {"backend": "reference"}, id="backend"),
        pytest.param("scale_clamp", arrays(), {"out_dtype": "float8_e4m3fn"}, id="fp8"),
        pytest.param("scale_clamp_detached", arrays(grad=True), {}, id="no gradient"),
        pytest.param("scale_clamp_inference", arrays(), {}, id="inference"),
        pytest.param("scale_clamp_backward", (arrays()[0], *arrays()), {}, id="backward"),
    ],
)
def test_opcheck(name, arguments, keywords):
    torch.library.opcheck(getattr(torch.ops.fe_toy, name).default, arguments, keywords)


def call_by_position(x, bias):
    y, kept = fe_toy.scale_clamp(x, bias, 2.0, limit=0.5, mask=True)
    return y * 2, kept


def call_by_keyword(x, bias):
    result = fe_toy.scale_clamp(x=x, bias=bias, scale=2, limit=0.5, mask=True, out_dtype=torch.float32)
    return result["y"] * 2, result["kept"]


def call_and_return(x, bias):
    return fe_toy.scale_clamp(x, bias, 2.0, limit=0.5, mask=True)


@pytest.mark.parametrize("function", [call_by_position, call_by_keyword, call_and_return])
def test_compile_makes_one_graph(function, recorder):
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    made = compiled(*arrays())
    assert len(recorder.graphs) == 1
    assert sum(node.target == torch.ops.fe_toy.scale_clamp.default for node in recorder.graphs[0].graph.nodes) == 1
    factor = 1 if function is call_and_return else 2
    y, kept = made
    np.testing.assert_allclose(y, factor * expected.value(X, BIAS, 2.0, 0.5), rtol=1e-6)
    np.testing.assert_array_equal(kept, expected.kept(X, BIAS, 2.0, 0.5))
    assert isinstance(made, TupleDict) == (function is call_and_return)
    compiled(*arrays())
    assert len(recorder.graphs) == 1


def test_compile_trains():
    def loss(x, bias):
        y, kept = fe_toy.scale_clamp(x, bias, 2.0, mask=True)
        return (y.sin() * kept).sum()

    torch._dynamo.reset()
    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, bias = arrays(grad=True)
        function(x, bias).backward()
        found.append((x.grad, bias.grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)


def test_inductor_runs_absent_outputs():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fe_toy.scale_clamp(x), fullgraph=True)
    y, kept = compiled(arrays()[0])
    np.testing.assert_allclose(y, expected.value(X), rtol=1e-6)
    assert kept is None


def test_dynamic_rows_compile_once(recorder):
    compiled = torch.compile(lambda x, bias: fe_toy.scale_clamp(x, bias)["y"], fullgraph=True, backend=recorder)
    for rows in (3, 5, 17):
        x = torch.ones(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        assert compiled(x, torch.ones(4)).shape == (rows, 4)
    assert len(recorder.graphs) == 1


def test_dynamic_columns_compile_once(recorder):
    compiled = torch.compile(lambda x: fe_toy.scale_clamp(x)["y"], fullgraph=True, backend=recorder, dynamic=True)
    for columns in (4, 6, 10):
        assert compiled(torch.ones(3, columns)).shape == (3, columns)
    assert len(recorder.graphs) == 1


def test_data_dependent_rows_need_a_lower_bound(recorder):
    def function(x, chosen):
        rows = x[chosen.nonzero().squeeze(1)]
        torch._check(rows.shape[0] >= 2)
        return fe_toy.scale_clamp(rows)["y"]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend=recorder)
        assert compiled(torch.ones(6, 4), torch.tensor([1, 0, 1, 1, 0, 0])).shape == (3, 4)


def test_compile_shows_the_contract_error():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fe_toy.scale_clamp(x[:, :3]), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="x must have an even number of columns"):
        compiled(arrays()[0])


def test_compile_rejects_streams():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fe_toy.scale_clamp(x, stream=0), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"stream must be None under torch\.compile"):
        compiled(arrays()[0])


class Module(torch.nn.Module):
    def forward(self, x, bias):
        return fe_toy.scale_clamp(x, bias, 2.0, mask=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    rows = torch.export.Dim("rows")
    program = torch.export.export(Module(), arrays(), dynamic_shapes=({0: rows}, None), strict=strict)
    assert torch.ops.fe_toy.scale_clamp.default in {node.target for node in program.graph.nodes}
    x = expected.sample(7, 4, seed=2)
    made = program.module()(torch.tensor(x), torch.tensor(BIAS))
    assert isinstance(made, TupleDict)
    np.testing.assert_allclose(made["y"], expected.value(x, BIAS, 2.0), rtol=1e-6)


def test_make_fx_sees_the_op():
    graph = make_fx(lambda x: fe_toy.scale_clamp(x)["y"])(arrays()[0])
    assert "torch.ops.fe_toy.scale_clamp.default" in graph.code


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_jit_trace_sees_the_op():
    traced = torch.jit.trace(lambda x: fe_toy.scale_clamp(x)["y"], arrays()[:1])
    other = torch.tensor(expected.sample(3, 4, seed=5))
    np.testing.assert_allclose(traced(other), expected.value(other), rtol=1e-6)
