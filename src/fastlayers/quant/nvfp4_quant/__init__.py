"""NVFP4 activations: four-bit codes with a scale for 16 features, rows of several experts in one pass."""
