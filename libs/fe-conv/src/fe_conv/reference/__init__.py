"""The mathematics of each operation on plain arrays: the CPU backend and the oracle of the kernels."""
