"""What runs around the layers: CUDA graphs, caches of compiled kernels, the watch over compiles, warm-up.

graphs.py            capture and replay (`CudaGraphs`); captured_steps.py: which of a model's steps have a graph
launch.py            launches of Triton kernels without Triton's binder
warmup.py            `fl.warmup`; compile_log.py: what compiles afterwards
precompile.py        what a warm-up compiles side by side; attention_steps.py: of attention, one step of each kind
builds.py            what packages compile by themselves, and what of it is built
kernel_cache.py      where all of it is kept
"""
