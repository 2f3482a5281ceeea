"""Linear layer with e4m3 weights, scaled as a whole or per output channel."""
