"""Attention layers, their caches and their metadata.

gqa/ mla/                  the two layers; core.py: what they share; chunked.py: attention in chunks
kv_cache/                  what a cache holds (spec.py), and its pages, handed out and taken back (pool.py)
kv_write/ rotary_kv_write/ mla_kv_write/ merge_state/   layers of their own
batch.py meta.py           one step on the host; the tensors that kernels read of it
buckets.py step_buffers.py context_buckets.py   what of it keeps its size in a captured step, or chooses a ladder
"""
