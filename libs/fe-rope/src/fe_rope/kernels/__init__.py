"""Device code of fe_rope. Kernels know layouts and numbers, never frameworks."""
