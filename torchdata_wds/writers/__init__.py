"""Samples to tar archives and numbered shards."""
