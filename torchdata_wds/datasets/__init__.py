"""Whole data sets in one call."""
