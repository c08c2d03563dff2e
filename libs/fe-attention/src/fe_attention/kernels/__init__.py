"""Device code of the attention operations."""
