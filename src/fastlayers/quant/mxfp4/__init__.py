"""MXFP4: weights of 4 bits with a power of two for every 32, as GPT-OSS ships its experts."""
