"""Stages that join, mix and cut whole streams."""
