"""Write of new keys and values into a paged cache."""
