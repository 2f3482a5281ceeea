"""Unquantised linear layer."""
