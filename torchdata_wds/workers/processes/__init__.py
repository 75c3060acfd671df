"""A graph in worker processes of this machine."""
