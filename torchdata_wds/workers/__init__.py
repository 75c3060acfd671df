"""Who runs a graph of DataPipes: the reading service, and the border between its workers and the main process."""

from __future__ import annotations
