"""RMSNorm with optional fused residual add."""
