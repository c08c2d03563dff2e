"""The dense products with a fused epilogue, one module for each operation."""
