"""Write of new latent and rope rows into a paged cache (MLA)."""
