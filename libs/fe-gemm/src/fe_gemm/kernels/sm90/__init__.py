"""The Hopper matrix product: TMA loads, wgmma, persistent blocks, and exchangeable parts around it.

| module | concern |
|---|---|
| ``gemm`` | the kernel: roles of warps, main loop, launcher, :func:`~fe_gemm.kernels.sm90.gemm.build` |
| ``operands`` | where tiles of A and B come from |
| ``store`` | how a tile of C leaves |
"""
