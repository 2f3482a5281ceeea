"""SiLU of one half times the other, quantised to e4m3 in groups."""
