"""Interleaved documents: ordered lists of texts and images."""
