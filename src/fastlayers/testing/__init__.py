"""One parity function for every backend of every layer, in-tree or not."""
