"""Linear layer with int8 weights and activations."""
