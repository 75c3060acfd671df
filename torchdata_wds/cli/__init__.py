"""The command line: the only place that prints."""

from __future__ import annotations
