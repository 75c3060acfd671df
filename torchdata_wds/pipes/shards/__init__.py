"""Stages whose items are shards, or members and records of shards."""
