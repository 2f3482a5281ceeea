"""Paged caches of keys, values and latents: what they hold, their memory, their pages."""
