"""Runs a graph in actors of a Ray cluster."""
