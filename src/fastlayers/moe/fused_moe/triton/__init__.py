"""The experts in Triton, a file a stage: permute, grouped GEMMs by format and number of tokens, reduce."""
