"""Plans: how one field is decoded or encoded, chosen once for each field name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torchdata_wds.codecs.failures import StepFailedError
from torchdata_wds.codecs.options import MissingPackageError

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")
Options = TypeVar("Options")

# Field names come from the shards: a data set with ever new ones must not fill the memory.
_MAX_PLANS = 1000
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Planner(ABC, Generic[P]):
    """Keeps a plan for each field name it meets, and pickles only its arguments; the base of Decoder and Encoder."""

    # a plain dict without __missing__: every field of every sample is looked up here
    _plans: dict[str, P]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _prepare(self) -> None:
        """Derives the private attributes from the arguments."""
        self._plans = {}

    @abstractmethod
    def _make_plan(self, field: str) -> P:
        """Chooses the plan of a field."""

    def _add_plan(self, field: str) -> P:
        plan = self._make_plan(field)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[field] = plan
        return plan


def shown_call(name: str, owner: object, *arguments: str) -> str:
    """Writes the call that makes an equal object, with the options that differ from their defaults."""
    options = [f"{option}={value!r}" for option, value in changed_options(owner).items()]
    return f"{name}({', '.join([*arguments, *options])})"


def changed_options(owner: object) -> dict[str, Any]:
    """Returns the keyword arguments that an object was made with, where they differ from their defaults."""
    options = [option for option in inspect.signature(type(owner)).parameters.values() if option.kind is _KEYWORD]
    given = [(option.name, getattr(owner, option.name), option.default) for option in options]
    return {name: value for name, value, default in given if value != default}


def guard(step: str, function: Callable[[T, Options], R], options: Options) -> Callable[[T], R]:
    """Makes a function raise StepFailedError for everything except a missing package."""

    def guarded(given: T) -> R:
        try:
            return function(given, options)
        except (MissingPackageError, StepFailedError):
            raise
        except Exception as cause:
            raise StepFailedError(step, given, cause) from cause

    return guarded
