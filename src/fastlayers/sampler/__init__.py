"""Sampling of the next token."""
