"""Stopping a graph in the middle of an epoch, and going on from there."""
