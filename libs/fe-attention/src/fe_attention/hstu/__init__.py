"""HSTU operations: their front doors."""
