"""describe and its parts, on arrays of every framework."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fe_runtime.arrays import describe, get_device, get_shape, get_strides, get_version
from fe_runtime.device import Device
from fe_runtime.tensor_desc import TensorDesc


class Foreign:
    """A producer of DLPack with just the attributes of each test."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __dlpack__(self) -> object:
        raise AssertionError("metadata must not need an export")


class TestTorch:
    @given(st.lists(st.integers(0, 4), max_size=4), st.randoms())
    def test_random_layouts(self, shape: list[int], random: Any) -> None:
        order = list(range(len(shape)))
        random.shuffle(order)
        tensor = torch.empty(shape, dtype=torch.int32).permute(order)
        desc = describe(tensor, "x")
        assert desc == TensorDesc.of("int32", tensor.shape, tensor.stride(), "cpu")
        assert desc.name == "x"

    def test_views(self) -> None:
        tensor = torch.zeros(4, 8, dtype=torch.bfloat16)[:, 1::2]
        assert describe(tensor) == TensorDesc("bfloat16", (4, 4), (8, 2), (1, 0), Device("cpu"))

    def test_fake_and_meta_tensors_have_metadata(self) -> None:
        with FakeTensorMode():
            tensor = torch.zeros(2, 3, device="cuda:0")
        assert describe(tensor) == TensorDesc.of("float32", (2, 3), device="cuda:0")
        assert describe(torch.zeros(2, device="meta")).device == Device("meta")

    def test_sparse_tensors_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"describe: w must be a strided tensor; got torch\.sparse_coo"):
            describe(torch.zeros(2, 2).to_sparse(), "w")

    def test_unknown_dtypes_are_refused_by_the_argument_name(self) -> None:
        with pytest.raises(ValueError, match=r"describe: w must have a known dtype; got torch\.complex64"):
            describe(torch.zeros(2, dtype=torch.complex64), "w")

    def test_version_counter(self) -> None:
        tensor = torch.zeros(2)
        before = get_version(tensor)
        tensor.add_(1)
        assert get_version(tensor) > before
        assert get_version(np.zeros(2)) == get_version(jnp.zeros(2)) == 0


class TestNumpy:
    def test_strides_are_counted_in_elements(self) -> None:
        array = np.zeros((4, 6), np.int64)
        for view in (array, array.T, array[::-1, ::2], array[None]):
            expected = tuple(s // 8 for s in view.strides)
            assert describe(view) == TensorDesc.of("int64", view.shape, expected)
        assert describe(array[::-1]).stride == (-6, 1)

    def test_ml_dtypes(self) -> None:
        assert describe(np.zeros((2, 3), ml_dtypes.float8_e4m3fn)) == TensorDesc.of("float8_e4m3fn", (2, 3))

    def test_strides_between_elements_are_refused(self) -> None:
        records = np.zeros(4, np.dtype([("a", "i4"), ("b", "i1")]))
        with pytest.raises(ValueError, match="multiples of its element size, 4 bytes"):
            describe(records["a"], "x")


class TestJax:
    def test_arrays_are_contiguous_on_their_device(self) -> None:
        array = jnp.zeros((2, 3), jnp.bfloat16)
        assert describe(array) == TensorDesc.of("bfloat16", (2, 3), device=next(iter(array.devices())))
        assert get_strides(array.T) == (2, 1)

    def test_tracers_and_abstract_values_have_an_unknown_device(self) -> None:
        expected = TensorDesc.of("float32", (2, 3), device="unknown")
        seen: list[TensorDesc] = []
        jax.jit(lambda x: seen.append(describe(x)) or x)(jnp.zeros((2, 3)))
        assert seen == [expected]
        assert describe(jax.ShapeDtypeStruct((2, 3), jnp.float32)) == expected

    def test_sharded_arrays_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        array = jnp.zeros(2)
        monkeypatch.setattr(type(array), "devices", lambda self: {1, 2})
        with pytest.raises(ValueError, match=r": weight must live on one device; got 2 devices.*shard_map"):
            describe(array, "weight")


class TestForeign:
    def test_bare_minimum(self) -> None:
        array = Foreign(shape=(2, 3), dtype=np.dtype("float16"))
        assert describe(array) == TensorDesc.of("float16", (2, 3), device="unknown")

    @pytest.mark.parametrize("stride", [{"strides": (1, 2)}, {"stride": lambda: (1, 2)}], ids=["strides", "stride()"])
    def test_strides_in_elements(self, stride: dict[str, Any]) -> None:
        assert get_strides(Foreign(shape=(2, 3), **stride)) == (1, 2)
        assert get_strides(Foreign(shape=(2, 3), strides=None)) == (3, 1)

    def test_the_cuda_array_interface_counts_in_bytes(self) -> None:
        array = Foreign(shape=(2, 3), strides=(4, 8), __cuda_array_interface__={"typestr": "<f4", "strides": (4, 8)})
        assert get_strides(array) == (1, 2)
        array.__cuda_array_interface__["strides"] = None
        assert get_strides(array) == (3, 1)

    @pytest.mark.parametrize(
        ("attributes", "device"),
        [
            pytest.param({"device": "cuda:1"}, Device("cuda", 1), id="name"),
            pytest.param({"device": SimpleNamespace(type="cuda", index=2)}, Device("cuda", 2), id="like torch's"),
            pytest.param({"__dlpack_device__": lambda: (2, 3)}, Device("cuda", 3), id="DLPack CUDA"),
            pytest.param({"__dlpack_device__": lambda: (13, 0)}, Device("cuda", 0), id="DLPack managed"),
            pytest.param({"__dlpack_device__": lambda: (1, 0)}, Device("cpu"), id="DLPack host"),
            pytest.param({"__dlpack_device__": lambda: (10, 0)}, Device("unknown"), id="DLPack ROCm"),
            pytest.param({"device": object()}, Device("unknown"), id="opaque"),
        ],
    )
    def test_device(self, attributes: dict[str, Any], device: Device) -> None:
        assert get_device(Foreign(shape=(2,), **attributes)) == device

    def test_tvm_ffi_tensors(self) -> None:
        tvm_ffi: Any = __import__("tvm_ffi")
        array = tvm_ffi.from_dlpack(np.zeros((2, 3), np.float32))
        assert describe(array) == TensorDesc.of("float32", (2, 3))

    def test_without_a_dtype(self) -> None:
        with pytest.raises(ValueError, match="known dtype; got no dtype"):
            describe(Foreign(shape=(2,)))


@pytest.mark.parametrize(
    "wrong", [None, 1, 1.0, "x", [1.0], (1,), np.float32(1), SimpleNamespace(shape=(2,), dtype="float32")]
)
def test_what_is_no_array_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"describe: q must be an array"):
        describe(wrong, "q")
    with pytest.raises(TypeError):
        get_shape(wrong)


class TestDescriptors:
    def test_pass_through(self) -> None:
        desc = TensorDesc.of("float32", (2, 3), name="x")
        assert describe(desc) is desc
        assert describe(desc, "y") is desc  # it has a name of its own
        named = describe(TensorDesc.of("float32", (2, 3)), "y")
        assert named.name == "y"

    def test_bytes_of_fp4_unpack_like_the_array(self) -> None:
        packed = torch.zeros(4, 8, dtype=torch.uint8)
        stored = TensorDesc.of("uint8", (4, 8))
        assert describe(stored) == stored
        assert describe(stored, interpret_uint8_as_fp4x2=True) == describe(packed, interpret_uint8_as_fp4x2=True)
        assert describe(describe(stored, interpret_uint8_as_fp4x2=True), interpret_uint8_as_fp4x2=True).shape == (4, 16)
        assert describe(TensorDesc.of("float4_e2m1fn_x2", (4, 8))) == TensorDesc.of("float4_e2m1fn", (4, 16))


class TestPackedFp4:
    def test_torch_pairs_are_always_logical(self) -> None:
        packed = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        expected = TensorDesc.of("float4_e2m1fn", (4, 16))
        assert describe(packed) == describe(packed, interpret_uint8_as_fp4x2=True) == expected
        assert not describe(packed).interpret_uint8_as_fp4x2
        assert describe(packed.t()) == TensorDesc.of("float4_e2m1fn", (16, 4), (1, 16))

    @pytest.mark.parametrize("library", [torch, np, jnp], ids=["torch", "numpy", "jax"])
    def test_bytes_only_on_request(self, library: Any) -> None:
        packed = library.zeros((4, 8), dtype=library.uint8)
        assert describe(packed).dtype == "uint8"
        desc = describe(packed, interpret_uint8_as_fp4x2=True)
        assert (desc.dtype, desc.shape, desc.stride, desc.interpret_uint8_as_fp4x2) == (
            "float4_e2m1fn",
            (4, 16),
            (16, 1),
            True,
        )

    def test_other_dtypes_are_untouched_by_the_request(self) -> None:
        assert describe(torch.zeros(4, 8), interpret_uint8_as_fp4x2=True) == TensorDesc.of("float32", (4, 8))

    def test_no_unit_stride(self) -> None:
        with pytest.raises(ValueError, match="packed FP4: w must have a unit-stride dimension"):
            describe(torch.zeros(4, 16, dtype=torch.uint8)[:, ::2], "w", interpret_uint8_as_fp4x2=True)
