"""The mathematics of the attention operations on plain arrays."""
