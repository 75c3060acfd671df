"""Byte streams to members to samples, and samples to shards. Nothing here imports torch."""
