"""What becomes of the accumulators of the Hopper matrix product.

| module | concern |
|---|---|
| ``finisher`` | the combination: :class:`Epilogue`, which is static, and :class:`Finisher`, a thread's view |
| ``cells`` | where a thread's values lie in shared memory, and how they get there |
| ``stage`` | buffers through which matrices leave |
| ``upstream`` | the matrix that comes in |
| ``activation`` | swiglu, srelu and dsrelu |
| ``factors`` | a factor for each row |
| ``region`` | which values lie in the matrix |
| ``amax`` | the largest magnitude |
| ``quantise`` | block scales and codes |
| ``row_sums`` | sums over rows |
"""

from __future__ import annotations

from .finisher import Arrays, Epilogue, Finisher, Shared

__all__ = ["Arrays", "Epilogue", "Finisher", "Shared"]
