"""Multi-head latent attention: the core over latents or expanded keys, and the layer around it."""
