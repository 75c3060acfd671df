"""Backends that read shards: one file per kind of URL."""
