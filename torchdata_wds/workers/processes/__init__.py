"""Runs a graph in worker processes on this machine."""
