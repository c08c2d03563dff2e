"""Device code of fe_norm. Kernels know layouts and numbers, never frameworks."""
