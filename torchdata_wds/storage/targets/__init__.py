"""Backends that write shards: one file per kind of URL."""
