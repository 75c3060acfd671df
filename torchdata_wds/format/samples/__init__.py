"""Members to samples, and samples to members."""
