"""The products of groups of rows with the weights of their experts, one module for each operation."""
