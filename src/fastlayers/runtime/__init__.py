"""What runs around the layers: CUDA graphs, caches of compiled kernels, the watch over compiles, warm-up."""
