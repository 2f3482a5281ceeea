"""Linear layer with e4m3 weights and one scale per block."""
