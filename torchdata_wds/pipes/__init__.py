"""The functional forms: one file per stage, each a loop around plain functions of the packages below."""

from __future__ import annotations
