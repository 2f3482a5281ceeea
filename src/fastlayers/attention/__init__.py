"""Attention layers, their caches and their metadata."""
