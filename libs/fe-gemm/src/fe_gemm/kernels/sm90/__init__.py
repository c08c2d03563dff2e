"""The Hopper matrix product: TMA loads, wgmma, persistent blocks, and exchangeable parts around it.

| module | concern |
|---|---|
| ``gemm`` | the core: product, epilogue, launches by the number of rows, :func:`~fe_gemm.kernels.sm90.gemm.build` |
| ``block`` | how the warps of a block work together |
| ``operands`` | where tiles of A and B come from |
| ``mainloop`` | how they are multiplied |
| ``split_sum`` | how the blocks of a cluster add up parts of K |
| ``swiglu_backward`` | the gradients of ``gemm_swiglu``: two products behind a pass over memory |
| ``epilogue`` | what becomes of the accumulators, and how it leaves |
"""
