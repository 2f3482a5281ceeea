"""SiLU of one half times the other."""
