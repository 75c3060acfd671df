"""Measures a graph on this machine: by stage, by number of workers, and against the training loop."""
