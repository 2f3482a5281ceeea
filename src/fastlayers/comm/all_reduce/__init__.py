"""Sum over ranks."""
