"""The backends that shards are written to: one file per kind of URL."""
