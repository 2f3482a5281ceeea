"""Sum over ranks, of which each rank gets its own rows."""
