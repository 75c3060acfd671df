"""What Decoder and Encoder share: one plan for each field name, and a state of arguments only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

__all__ = ["Planner"]

P = TypeVar("P")

# Field names come from the shards: a data set with ever new ones must not fill the memory.
_MAX_PLANS = 1000


class Planner(ABC, Generic[P]):
    """An object with a plan for each field, which pickles its arguments only.

    ``_prepare`` makes from the arguments what it works with, ``_make_plan`` the plan of a field.
    """

    # a plain dict, not one that makes its values: looking up is what every field of every sample does
    _plans: dict[str, P]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _prepare(self) -> None:
        self._plans = {}

    @abstractmethod
    def _make_plan(self, field: str) -> P:
        """Makes the plan of a field."""

    def _add_plan(self, field: str) -> P:
        """Makes the plan of a field that has none yet, and keeps it."""
        plan = self._make_plan(field)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[field] = plan
        return plan
