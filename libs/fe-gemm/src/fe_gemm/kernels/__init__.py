"""Device code of fe_gemm."""
