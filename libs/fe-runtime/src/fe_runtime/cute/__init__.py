"""Building blocks for device code, shared by the kernels of every library.

Besides the compiler, this package is the only part of fe_runtime that imports the kernel language; no library loads
it when it is imported. Each function states its formula and its error bound.

| module | holds |
|---|---|
| ``types`` | dtype names to kernel types, architecture numbers |
| ``arguments`` | stand-ins for a launcher's arguments while it is compiled |
| ``memory`` | vectorised loads and stores of global memory, prefetch |
| ``rows`` | how threads share a row, and how a row moves between memory and registers |
| ``reduce`` | sums over a thread's registers, a warp, a block |
| ``activation`` | sigmoid and SiLU |
| ``convert`` | float32 to e4m3 and packed e2m1, codes to bf16; NVFP4 scales and quotients |
| ``hadamard`` | the Walsh-Hadamard transform of sixteen values of two threads |
| ``rounding`` | products, sums and conversions with one stated rounding each |
| ``ring``, ``row_ring`` | pieces of operands, and rows, copied to shared memory ahead of their turn |
| ``partial_sums`` | sums over the rows of matrices of partial sums |
| ``philox`` | random bits by position, the same on every device |
| ``schedule`` | the order in which persistent blocks take tiles |
| ``tma``, ``pipeline``, ``wgmma`` | bulk copies to shared memory, the ring that they fill, matrix products from it |
"""
