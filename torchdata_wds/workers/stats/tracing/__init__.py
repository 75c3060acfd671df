"""A trace of one epoch: what the training loop and each worker did when, for Perfetto or ``chrome://tracing``."""
