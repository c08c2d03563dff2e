"""Arrays of any framework: recognise, describe, allocate, and order on streams, without importing the framework."""

from fe_runtime.arrays.allocation import allocate_byte_workspace, empty, pad_to_ndim, permuted, to_host_list
from fe_runtime.arrays.description import describe, get_device, get_shape, get_strides, get_version
from fe_runtime.arrays.devices import capability, cuda_is_available, device_guard, get_compute_capability, sm_count
from fe_runtime.arrays.memory import alignment, byte_range, get_data_ptr, overlap
from fe_runtime.arrays.recognition import (
    detect_framework,
    is_fake,
    is_jax_array,
    is_numpy_array,
    is_plain_torch_tensor,
    is_torch_tensor,
    is_tracer,
)
from fe_runtime.arrays.streams import (
    StreamGuard,
    StreamRequest,
    default_stream,
    on_default_stream,
    on_stream,
    resolve_stream,
)
from fe_runtime.device import Device, as_device
from fe_runtime.dtypes import framework_dtype
from fe_runtime.strides import canonicalize_unit_dim_strides

__all__ = [
    "Device",
    "StreamGuard",
    "StreamRequest",
    "alignment",
    "allocate_byte_workspace",
    "as_device",
    "byte_range",
    "canonicalize_unit_dim_strides",
    "capability",
    "cuda_is_available",
    "default_stream",
    "describe",
    "detect_framework",
    "device_guard",
    "empty",
    "framework_dtype",
    "get_compute_capability",
    "get_data_ptr",
    "get_device",
    "get_shape",
    "get_strides",
    "get_version",
    "is_fake",
    "is_jax_array",
    "is_numpy_array",
    "is_plain_torch_tensor",
    "is_torch_tensor",
    "is_tracer",
    "on_default_stream",
    "on_stream",
    "overlap",
    "pad_to_ndim",
    "permuted",
    "resolve_stream",
    "sm_count",
    "to_host_list",
]
