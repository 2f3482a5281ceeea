"""The seam between two blocks: sum over ranks, residual, norm."""
