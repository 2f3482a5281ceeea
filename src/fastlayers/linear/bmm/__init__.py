"""Batched matrix product with strided operands, in bf16 or FP8."""
