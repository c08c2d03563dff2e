"""The torch bridge with the toy kernel on a GPU."""

from __future__ import annotations

import fe_toy
import numpy as np
import pytest
import torch
from fe_toy import expected

from fe_runtime import env
from fe_runtime.errors import FallbackWarning, NotCompiledError

pytestmark = pytest.mark.gpu

X = expected.sample(6, 8)
BIAS = expected.sample(8, seed=1)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    env.configure(cache_dir=tmp_path_factory.mktemp("kernels"))
    yield
    env.configure(cache_dir=None)


def on_gpu(array, dtype=torch.float32, **keywords):
    return torch.tensor(array, dtype=dtype, device="cuda", **keywords)


def host(tensor):
    return tensor.detach().float().cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
def test_values(dtype, bias):
    x = on_gpu(X, dtype)
    shift = None if bias is None else on_gpu(bias, dtype)
    y, kept = fe_toy.scale_clamp(x, shift, 2.0, limit=0.75, backend="sm90")
    want = expected.value(host(x), 0.0 if bias is None else host(shift), 2.0, 0.75)
    assert (y.dtype, y.device, kept) == (dtype, x.device, None)
    np.testing.assert_allclose(host(y), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_fp8_and_leading_dimensions():
    y = fe_toy.scale_clamp(on_gpu(X).reshape(2, 3, 8), out_dtype=torch.float8_e4m3fn)["y"]
    assert (y.dtype, y.shape) == (torch.float8_e4m3fn, (2, 3, 8))
    np.testing.assert_allclose(host(y).reshape(6, 8), expected.value(X), rtol=2**-4, atol=2**-10)


def test_rows_at_a_stride():
    wide = on_gpu(expected.sample(6, 32))
    y = fe_toy.scale_clamp(wide[:, 8:16])["y"]
    np.testing.assert_allclose(host(y), expected.value(host(wide)[:, 8:16]), rtol=1e-6)


def test_empty():
    assert fe_toy.scale_clamp(on_gpu(X)[:0])["y"].shape == (0, 8)


def test_the_op_runs_the_kernel_too():
    y, _ = torch.ops.fe_toy.scale_clamp(on_gpu(X), scale=2.0, backend="sm90")
    np.testing.assert_allclose(host(y), expected.value(X, scale=2.0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::fe_runtime.errors.FallbackWarning")  # the backward has no kernel
def test_opcheck():
    x = on_gpu(X, requires_grad=True)
    torch.library.opcheck(torch.ops.fe_toy.scale_clamp.default, (x, on_gpu(BIAS)), {"scale": 2.0})


@pytest.mark.filterwarnings("ignore::fe_runtime.errors.FallbackWarning")
@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: torch.compile(f, fullgraph=True)], ids=["eager", "compile"]
)
def test_training(transform):
    torch._dynamo.reset()
    x, bias = on_gpu(X, requires_grad=True), on_gpu(BIAS, requires_grad=True)
    transform(lambda x, b: fe_toy.scale_clamp(x, b, 0.5)["y"].square().sum())(x, bias).backward()
    z = 0.5 * X + BIAS
    np.testing.assert_allclose(host(x.grad), z * (np.abs(z) <= 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(host(bias.grad), (2 * z * (np.abs(z) <= 1)).sum(0), rtol=1e-5, atol=1e-5)


def test_graph_replays_with_new_contents():
    x = on_gpu(X)
    fe_toy.scale_clamp(x, scale=2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fe_toy.scale_clamp(x, scale=2.0)["y"]
    for seed in (3, 4):
        fresh = expected.sample(6, 8, seed=seed)
        x.copy_(torch.tensor(fresh))
        graph.replay()
        np.testing.assert_allclose(host(y), expected.value(fresh, scale=2.0), rtol=1e-6)


def test_compiling_while_capturing_raises():
    x = on_gpu(expected.sample(6, 12))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotCompiledError), torch.cuda.graph(graph):
        fe_toy.scale_clamp(x)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_stream_is_honoured(requires_grad):
    side = torch.cuda.Stream()
    x = on_gpu(np.zeros((6, 8)), requires_grad=requires_grad)
    source = on_gpu(X)
    fe_toy.scale_clamp(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(100_000_000)  # the producer is late
        x.copy_(source)
    y = fe_toy.scale_clamp(x, stream=side)["y"]
    side.synchronize()
    assert y.requires_grad == requires_grad
    np.testing.assert_allclose(host(y), expected.value(X), rtol=1e-6)


def test_a_missing_kernel_runs_the_reference_there():
    with pytest.warns(FallbackWarning, match="the toy kernel wants a multiple of 4 columns"):
        y = fe_toy.scale_clamp(on_gpu(X[:, :6]))["y"]
    assert y.is_cuda
    np.testing.assert_allclose(host(y), expected.value(X[:, :6]), rtol=1e-6)
