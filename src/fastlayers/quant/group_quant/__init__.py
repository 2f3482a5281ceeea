"""Quantisation of activations, one scale per token and group of features."""
