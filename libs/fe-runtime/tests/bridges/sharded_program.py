"""Run by ``test_jax_shard_map.py`` in a process of its own, with four devices on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import fe_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fe_toy import expected
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

X, BIAS, WEIGHT = expected.sample(8, 4), np.float32([0.2, -0.4, 0.1, 0.6]), np.float32([1.0, -2.0, 0.5, 3.0])


def local(x, bias):
    assert x.shape == (2, 4), "the operation sees the local shard"
    return fe_toy.scale_clamp_jax(x, bias, scale=0.5)[0]


def check(check_vma: bool) -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=check_vma)
    for function in (sharded, jax.jit(sharded)):
        np.testing.assert_allclose(function(X, BIAS), expected.value(X, BIAS, 0.5), rtol=1e-6)
    dx, dbias = jax.jit(jax.grad(lambda x, b: (sharded(x, b) * WEIGHT).sum(), (0, 1)))(
        jnp.asarray(X), jnp.asarray(BIAS)
    )
    want = expected.derivative(lambda v: (expected.value(v, BIAS, 0.5) * WEIGHT).sum(), X)
    np.testing.assert_allclose(dx, want, atol=1e-6)
    want = expected.derivative(lambda v: (expected.value(X, v, 0.5) * WEIGHT).sum(), BIAS)
    np.testing.assert_allclose(dbias, want, atol=1e-6)  # a sum over the devices
    text = jax.jit(sharded).trace(X.astype(jnp.bfloat16), BIAS.astype(jnp.bfloat16))
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @fe_toy.scale_clamp." in text


for flag in (True, False):
    check(flag)

spread = jax.device_put(X, NamedSharding(jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,)), P("rows")))
np.testing.assert_allclose(jax.jit(lambda x: fe_toy.scale_clamp_jax(x)[0])(spread), expected.value(X), rtol=1e-6)
with pytest.raises(ValueError, match="shard_map"):
    fe_toy.scale_clamp_jax(spread)
print("done")
