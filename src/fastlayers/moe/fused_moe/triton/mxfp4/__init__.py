"""Experts with MXFP4 weights, as GPT-OSS has them.

gemm.py               weights as checkpoints have them
hopper.py mma.py      in the tensor cores' order, few tokens: the backend `triton_swizzled`, its products
rows.py wgmma.py      the same of more tokens, in blocks: by mma.sync, by wgmma (Gluon, sm_90)
blocks.py             what both have around their products: memory, alignment, the order of rows
plans.py              which of them a step of so many tokens takes
"""
