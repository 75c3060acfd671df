"""The functional forms: one file per stage, each a loop around a plain function of the floors below."""

from __future__ import annotations
