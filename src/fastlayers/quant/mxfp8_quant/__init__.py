"""MXFP8 activations: padding and quantising in one pass."""
