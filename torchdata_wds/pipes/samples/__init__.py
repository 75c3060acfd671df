"""Stages whose items are samples."""
