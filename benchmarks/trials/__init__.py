"""Kernels that are tried before one of them becomes a backend, and the programs that try them."""
