"""Launch choices of the attention kernels, as plain data."""
