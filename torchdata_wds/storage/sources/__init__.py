"""The backends that shards are read from: one file per kind of URL."""
