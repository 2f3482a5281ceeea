"""Linear layer with weights of 4 or 8 bits and activations as they are."""
