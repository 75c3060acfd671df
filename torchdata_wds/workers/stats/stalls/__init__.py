"""Notices that a loader stalls, and finds the stacks that hold it up."""
