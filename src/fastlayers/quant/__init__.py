"""Number formats: specifications, quantisers, quantised linears."""
