"""Grouped GEMMs of other packages, between our permutation, activation and sum."""
