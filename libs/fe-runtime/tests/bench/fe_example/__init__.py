"""A library with one operation, ``scale``: it multiplies by a factor. On the path in tests of bench and cli."""
