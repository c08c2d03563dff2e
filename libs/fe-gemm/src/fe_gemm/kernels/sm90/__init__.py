"""The Hopper matrix product: TMA loads, wgmma, persistent blocks, and exchangeable parts around it.

| module | concern |
|---|---|
| ``gemm`` | the core: product, epilogue, launches by the number of rows, :func:`~fe_gemm.kernels.sm90.gemm.build` |
| ``block`` | how the warps of a block work together |
| ``parts`` | what schedules, sources of operands and epilogues promise the block |
| ``dense_tiles``, ``grouped_tiles`` | schedules: matrices of equal extents, groups of rows |
| ``operands`` | where tiles of A and B come from |
| ``mainloop`` | how they are multiplied |
| ``split_sum`` | how the blocks of a cluster add up parts of K, and share what is finished |
| ``dense`` | the dense operations: operands through workspaces and the core, or few rows otherwise |
| ``dense_few_rows`` | few block-scaled rows: sums, then results |
| ``scaled_few_rows``, ``few_rows_...`` | sums of MXFP8 and NVFP4 operands, read as they are |
| ``finish_sums`` | results of sums, by the same epilogues |
| ``grouped`` | products of groups of rows with their experts' weights |
| ``tensor_maps`` | maps for TMA that are made on the device, one for each group |
| ``grouped_wgrad`` | gradients of experts' weights: the launcher; ``wgrad_...``: its parts |
| ``tickets`` | tiles from a counter |
| ``swiglu_backward`` | the gradients of ``gemm_swiglu``: two products behind a pass over memory |
| ``epilogue`` | what becomes of the accumulators, and how it leaves |
"""
