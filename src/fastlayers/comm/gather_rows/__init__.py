"""Rows of all ranks, on every rank."""
