"""The experts in Triton, a file a stage: permute, grouped GEMMs by format and number of tokens, reduce.

backend.py                     which of them a step of so many tokens takes (`_chunk`)
grouped_gemm.py                any number of tokens, aligned to their experts
pair_gemm.py pair_vector.py    few tokens, every (token, expert) pair by itself
pair_vector_fp8.py             the same of FP8 weights in blocks, one token
mxfp4_gemm.py                  MXFP4 weights as checkpoints have them
packed_gemm.py                 weights alone of 4 and 8 bits (AWQ, GPTQ, compressed-tensors)
packed_vector.py               nibbles in groups, every (token, expert) pair by itself
mxfp4_hopper.py mxfp4_mma.py   MXFP4 weights in the tensor cores' order, few tokens: a backend of its own, its products
mxfp4_rows.py mxfp4_wgmma.py   the same of more tokens, in blocks: by mma.sync, by wgmma (Gluon, sm_90)
mxfp4_blocks.py                what both have around their products: memory, alignment, the order of rows
permute.py activation.py reduce.py   around the products, also those of other packages
"""
