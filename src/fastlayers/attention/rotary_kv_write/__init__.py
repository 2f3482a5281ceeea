"""Rotary embedding of q and k fused with the write into a paged cache."""
