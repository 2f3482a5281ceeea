"""FusedMoE: the experts of a mixture-of-experts block as grouped GEMMs."""
