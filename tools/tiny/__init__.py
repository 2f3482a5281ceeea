"""The parts of `train_tiny.py`: the text, and one file for each family of models."""
