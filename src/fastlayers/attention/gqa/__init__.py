"""Grouped-query attention over a paged cache: the core, and the layer around it."""
