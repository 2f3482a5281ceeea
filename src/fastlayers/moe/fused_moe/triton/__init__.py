"""The experts in Triton, a file a stage: permute, grouped GEMMs by format and number of tokens, reduce.

backend.py                     which of them a step of so many tokens takes (`_chunk`)
grouped_gemm.py                any number of tokens, aligned to their experts
pair_gemm.py pair_vector.py    few tokens, every (token, expert) pair by itself
pair_vector_fp8.py             the same of FP8 weights in blocks, one token
mxfp4/                         MXFP4 weights
packed_gemm.py                 weights alone of 4 and 8 bits (AWQ, GPTQ, compressed-tensors)
packed_vector.py               nibbles in groups, every (token, expert) pair by itself
permute.py activation.py reduce.py   around the products, also those of other packages
"""
