"""Device code of fe_conv. Kernels know layouts and numbers, never frameworks."""
