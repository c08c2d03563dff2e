"""What becomes of the accumulators of the Hopper matrix product.

| module | concern |
|---|---|
| ``static`` | which arrays, in which order, with which shared memory: :class:`Epilogue` |
| ``finisher`` | the combination, a thread's view: :class:`Finisher` |
| ``glu_finisher`` | the same for gradients through a gated activation |
| ``cells`` | where a thread's values lie in shared memory, and how they get there |
| ``stage`` | buffers through which matrices leave |
| ``upstream`` | the matrix that comes in |
| ``activation`` | swiglu, srelu and dsrelu |
| ``glu`` | gated activations of groups of rows, and their slopes |
| ``groups`` | a factor and a bias for each group of rows |
| ``factors`` | a factor for each row |
| ``region`` | which values lie in the matrix |
| ``amax`` | the largest magnitude |
| ``quantise`` | block scales and codes |
| ``row_sums`` | the sum of each row |
| ``column_sums`` | the sum of each column over the rows of a group |
"""

from __future__ import annotations

from .finisher import Finisher
from .static import Arrays, Epilogue, Shared

__all__ = ["Arrays", "Epilogue", "Finisher", "Shared"]
