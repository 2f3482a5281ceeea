"""Grouping of (token, expert) pairs into blocks of one expert each."""
