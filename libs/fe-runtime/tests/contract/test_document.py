"""The Markdown of a contract says what the declaration says."""

from __future__ import annotations

from fe_dummy import CONTRACT
from fe_storage import CONTRACT as STORAGE

from fe_runtime.contract import Contract, Input
from fe_runtime.contract.document import support_table

WANTED = """\
| array | shape | dtype | layout | meaning |
|---|---|---|---|---|
| `x` | `(..., C)` | bfloat16, float16, float32 | a last dimension of stride 1 and no negative strides | activations |
| `weight` | `(C,)`, `(C, 1)` or `(1, C)` | bfloat16, float16, float32, float64 | contiguous (row-major) | factors |
| `bias` (optional) | `(C,)` | that of `x` | contiguous (row-major) | one summand per channel |
| `mixer` (optional) | `(C, C, 2)` | int32 | contiguous (row-major) | takes part in the checks only |

| option | kind | default | values | meaning |
|---|---|---|---|---|
| `scale` | float | `1.0` | a finite number > 0 | common factor |
| `group` | int | `None` | a number of channels > 0 | channels per block; all by default |
| `total` | bool | `True` |  | whether to return the sum |
| `mode` | str | `'plain'` | plain, exotic |  |
| `out_dtype` | dtype | `None` | bfloat16, float16, float32, half | dtype of `y`; that of `x` by default |

| result | meaning |
|---|---|
| `y` | scaled rows |
| `total` | sum of `y` over all rows |

* `group` must divide C.

A compiled object accepts any `...`; everything else is fixed.
"""


def test_a_whole_contract() -> None:
    assert support_table(CONTRACT) == WANTED


def test_empty_parts_are_left_out() -> None:
    text = support_table(Contract("op", (Input("x", "A|B", ("int8",), doc="a | b"),), (), dynamic=()))
    assert len(text.splitlines()) == 3
    assert "a \\| b" in text
    assert "must" not in text


def test_forms_of_storage_are_told() -> None:
    text = support_table(STORAGE)
    assert "| `x` | `(R, C)` | float32, float4_e2m1fn (packed pairs; also in uint8) |" in text
    assert "| `scale` | `(T, R, 1)` or `(R, 1, T)` | float8_e8m0fnu, uint8, int8 |" in text
    assert "| `factor` (optional) | `(1,)` or `(1, 1, ..., 1)` |" in text
    assert "These follow from the other extents and the options: `T`." in text
