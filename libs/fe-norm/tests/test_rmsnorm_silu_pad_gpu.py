"""``rmsnorm_silu_pad`` on a GPU: the kernel against the reference and a formula without roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_norm import RmsNormSiluPad, rmsnorm_silu_pad_wrapper
from fe_runtime import testing

pytestmark = pytest.mark.gpu

OPTIONAL = ("input_bias", "previous", "residual", "residual_bias")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    with testing.poisoned_memory():
        yield


def operands(shape: tuple[int, ...], there: tuple[str, ...] = (), earlier: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    channels = shape[-1:]
    shapes = {
        "input": shape,
        "gamma": channels,
        "input_bias": channels,
        "previous": (shape[0], earlier, *shape[2:]),
        "residual": shape,
        "residual_bias": channels,
    }
    return {
        name: torch.randn(extents, device="cuda", generator=generator).bfloat16()
        for name, extents in shapes.items()
        if name in (*there, "input", "gamma")
    }


def check(arrays: dict[str, Any], result: Any = None, **options: Any) -> None:
    """Compare with the reference: nearly all values equal, the others within one bf16 step for each rounding."""
    result = rmsnorm_silu_pad_wrapper(**arrays, **options, backend="sm90") if result is None else result
    want = rmsnorm_silu_pad_wrapper(**arrays, **options, backend="reference")
    for name, got, expected in zip(want.keys(), result, want, strict=True):
        assert (got is None) == (expected is None), name
        if expected is None:
            continue
        if name == "residual_output":
            assert torch.equal(got, expected)  # sums and roundings only
            continue
        differ = (got != expected).float().mean().item()
        assert differ <= 0.02, f"{name}: {differ:.3%} of the values differ"
        # Norm, scale, gain and SiLU round to bf16 one after the other: a step of 2^-7 for each that falls otherwise.
        torch.testing.assert_close(got.float(), expected.float(), rtol=4 * 2.0**-7, atol=0)
    border = result["padded_output"].clone() if hasattr(result, "keys") else result[0].clone()
    border[:, :, 1:-1, 1:-1] = 0
    assert (border == 0).all()


def test_against_the_formula_without_roundings() -> None:
    arrays = operands((2, 2, 5, 6, 160))
    padded = rmsnorm_silu_pad_wrapper(**arrays, backend="sm90")["padded_output"]
    v = arrays["input"].double()
    g = v / v.square().sum(-1, keepdim=True).sqrt() * 160**0.5 * arrays["gamma"].double()
    want = g * torch.sigmoid(g)
    # Three roundings of 2^-9 before SiLU, whose slope is at most 1.1 and whose relative one is at most |g| + 1.
    torch.testing.assert_close(padded[:, 2:, 1:-1, 1:-1].double(), want, rtol=2.0**-5, atol=2.0**-7)


@pytest.mark.parametrize("channels", [1, 2, 7, 16, 33, 48, 96, 128, 160, 161, 320, 640, 1000, 1024, 4096, 8192])
def test_any_number_of_channels(channels: int) -> None:
    check(operands((2, 2, 3, 5, channels)), save_input=True)
    check(operands((1, 1, 4, 3, channels), OPTIONAL))


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("earlier", [1, 2])
def test_frames_and_cache(frames: int, earlier: int) -> None:
    check(operands((2, frames, 3, 4, 64), ("previous",), earlier))


@pytest.mark.parametrize("there", [(), *((name,) for name in OPTIONAL[:3]), OPTIONAL[2:], OPTIONAL], ids=str)
def test_operands_that_are_there(there: tuple[str, ...]) -> None:
    for save_input in (False, True):
        check(operands((1, 3, 7, 9, 320), there), save_input=save_input)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 64), (3, 1, 1, 200, 64), (1, 5, 200, 1, 64), (2, 3, 30, 52, 160)])
def test_extents(shape: tuple[int, ...]) -> None:
    check(operands(shape, OPTIONAL))


def test_workload_of_a_video_decoder() -> None:
    for channels, height, width in ((640, 60, 104), (320, 120, 208), (160, 240, 416)):
        check(operands((1, 2, height, width, channels), ("previous", "residual")))


def test_unaligned_arrays() -> None:
    arrays = operands((1, 2, 3, 4, 160), OPTIONAL)
    for offset in (1, 2, 4):
        shifted = {}
        for name, array in arrays.items():
            room = torch.full((array.numel() + offset,), float("nan"), dtype=array.dtype, device="cuda")
            shifted[name] = room[offset:].view(array.shape).copy_(array)
        check(shifted)


def test_class_writes_into_the_callers_outputs_and_nothing_else() -> None:
    for shape, there in (((1, 2, 3, 5, 160), OPTIONAL), ((2, 1, 4, 4, 7), ("previous",))):
        arrays = operands(shape, there)
        want = rmsnorm_silu_pad_wrapper(**arrays)
        rooms = {n: torch.full((a.numel() + 64,), 7.0).bfloat16().cuda() for n, a in want.items() if a is not None}
        outputs = {name: room[32:-32].view(want[name].shape) for name, room in rooms.items()}
        op = RmsNormSiluPad(**{f"sample_{name}": array for name, array in (arrays | outputs).items()})
        op.compile()
        returned = op.execute(**arrays, **outputs)
        for got, expected in zip(returned, want, strict=True):
            assert expected is None or torch.equal(got, expected)
        for room in rooms.values():
            assert (torch.cat([room[:32], room[-32:]]) == 7).all()
        with pytest.raises(ValueError, match="must not share memory"):
            op.execute(
                **(arrays | {"input": outputs["padded_output"].view(-1)[: arrays["input"].numel()].view(shape)}),
                **outputs,
            )


def test_a_zero_pixel_stays_zero_and_nan_stays_in_its_pixel() -> None:
    arrays = operands((1, 2, 4, 5, 96))
    arrays["input"][0, 1, 2, 3] = 0
    clean = rmsnorm_silu_pad_wrapper(**arrays)["padded_output"].clone()
    assert (clean[0, 3, 3, 4] == 0).all()
    arrays["input"][0, 0, 1, 1, 5] = float("nan")
    padded = rmsnorm_silu_pad_wrapper(**arrays)["padded_output"]
    assert padded[0, 2, 2, 2].isnan().all()
    padded[0, 2, 2, 2] = clean[0, 2, 2, 2]
    assert torch.equal(padded, clean)


def test_extents_share_one_kernel() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    rmsnorm_silu_pad_wrapper(**operands((1, 1, 2, 2, 224)))
    before = compiles()
    for extent in range(1, 12):
        check(operands((2, extent, extent + 1, 2 * extent, 224)))
    assert compiles() == before


def test_results_are_bit_identical() -> None:
    arrays = operands((1, 3, 17, 19, 320), OPTIONAL)
    testing.repeat_identical(lambda: rmsnorm_silu_pad_wrapper(**arrays))


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    arrays = {
        "input": torch.empty(5, 2, 640, 640, 640, dtype=torch.bfloat16, device="cuda"),
        "gamma": torch.ones(640, dtype=torch.bfloat16, device="cuda"),
    }
    for item in arrays["input"]:
        item.normal_()
    padded, cache, _ = rmsnorm_silu_pad_wrapper(**arrays, backend="sm90")
    for item, row in ((0, 0), (4, 600)):
        part = {"input": arrays["input"][item : item + 1, :, row : row + 8].contiguous(), "gamma": arrays["gamma"]}
        want = rmsnorm_silu_pad_wrapper(**part, backend="sm90")
        assert torch.equal(padded[item, 2:, 1 + row : 9 + row, 1:-1], want["cache_output"][0])
        assert torch.equal(cache[item, :, row : row + 8], want["cache_output"][0])


def test_streams_and_graphs() -> None:
    arrays = operands((1, 2, 30, 52, 320), ("previous",))
    want = {name: a.clone() for name, a in rmsnorm_silu_pad_wrapper(**arrays).items() if a is not None}
    late = torch.full_like(arrays["input"], float("nan"))
    got = testing.run_on_side_stream(
        lambda stream: rmsnorm_silu_pad_wrapper(**(arrays | {"input": late}), current_stream=stream),
        produce=lambda: late.copy_(arrays["input"]),
        current=False,
    )
    for name, expected in want.items():
        assert got[name].tobytes() == testing.to_numpy(expected).tobytes()
    replayed, eager = testing.cuda_graph_replay(
        lambda: rmsnorm_silu_pad_wrapper(**arrays), lambda: arrays["input"].normal_()
    )
    assert replayed["padded_output"].tobytes() == eager["padded_output"].tobytes()


def test_jax_calls_the_same_kernel() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fe_norm import rmsnorm_silu_pad_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    arrays = operands((1, 2, 6, 8, 160), OPTIONAL)
    want = [a.float().cpu().numpy() for a in rmsnorm_silu_pad_wrapper(**arrays)]
    given = {name: jnp.asarray(a.float().cpu().numpy()).astype(jnp.bfloat16) for name, a in arrays.items()}
    for call in (rmsnorm_silu_pad_jax, jax.jit(rmsnorm_silu_pad_jax)):
        for got, expected in zip(call(**given), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected)
