"""Number formats: specifications and quantisers; the linears over them are in `linear/`."""
