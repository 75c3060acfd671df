"""Describes chains of pipes: the stages above each, their names, and the chain as text, much as it was written."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.storage.secrets.masking import mask_text

_LONGEST = 60
_LOOKED_AT = 2000  # how many characters of a long text are searched for secrets

#: Arguments of native pipes that are shown, besides those that are pipes.
_NATIVE_ARGUMENTS = ("iterable", "batch_size", "buffer_size", "fn", "filter_fn", "collate_fn", "length", "count")


def sources_of(pipe: DataPipe) -> list[IterDataPipe[Any]]:
    """Returns the pipes that a pipe holds as attributes, alone or in lists; unlike torch's traversal, never pickles."""
    values = [value if isinstance(value, (list, tuple)) else (value,) for value in vars(pipe).values()]
    return [source for items in values for source in items if isinstance(source, IterDataPipe)]


def stages_of(end: DataPipe) -> Iterator[DataPipe]:
    """Yields a pipe and all pipes above it, each once, by `sources_of`."""
    waiting, seen = [end], set()
    while waiting:
        stage = waiting.pop(0)
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            waiting += sources_of(stage)


class _Values(reprlib.Repr):
    """Shows values on one line: long ones shortened, functions by name, secrets masked."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 4
        self.maxlevel = 3

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, str):
            return repr(_cut(mask_text(x[:_LOOKED_AT])))
        if isinstance(x, (bytes, bytearray, memoryview)):
            return f"<{len(x):,} bytes>"
        if isinstance(x, IterDataPipe):
            return f"<pipe .{form_name(x)}()>"
        if isinstance(x, functools.partial):
            return f"partial({self.repr1(x.func, level)}, ...)"
        if callable(x) and hasattr(x, "__qualname__"):
            return str(x.__qualname__).rpartition("<locals>.")[2]
        if type(x) is dict:
            x = {key: "***" if _is_secret(key) else value for key, value in islice(x.items(), self.maxdict + 1)}
        if type(x) in (set, frozenset):  # not sorted, as the base class would
            x = set(islice(x, self.maxset + 1))
        if type(x) in (list, tuple, set, dict, int):
            return super().repr1(x, level)
        return _cut(mask_text(repr(x)[:_LOOKED_AT]))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 3 :]}"


#: Writes an argument on one line.
value_text = _Values().repr


def chain_text(pipe: IterDataPipe[Any]) -> str:
    """Writes a pipe and all above it on one line, without secrets or default arguments; never raises."""
    try:
        stages: dict[int, str] = {}
        sources = [pipe]
        while sources and id(sources[0]) not in stages:
            stages[id(sources[0])] = stage_text(sources[0])
            sources = sources_of(sources[0])
        return ".".join(reversed(stages.values()))
    except Exception:  # noqa: BLE001  (a debugger may show a pipe whose constructor is still running)
        return type(pipe).__qualname__


def stage_text(pipe: DataPipe, *, without: Collection[str] = ()) -> str:
    """Writes a pipe as a stage of a chain, such as ``wds_map(int)``; omits the arguments `without`."""
    return f"{form_name(pipe)}({', '.join(_arguments(pipe, without))})"


def form_name(pipe: DataPipe) -> str:
    """Returns the functional name, or the short name of the class for a source or a pipe without one."""
    if sources_of(pipe):
        for name, form in IterDataPipe.functions.items():
            if type(pipe) in getattr(form, "args", ()):
                return name
    return type(pipe).__name__.removesuffix("IterDataPipe")


def _arguments(pipe: DataPipe, without: Collection[str]) -> Iterator[str]:
    above = sources_of(pipe)[:1]
    is_ours = type(pipe).__module__.startswith("torchdata_wds.")
    for name, parameter in inspect.signature(type(pipe)).parameters.items():
        value: Any = vars(pipe).get(name)
        if name not in vars(pipe) or name in without or any(value is source for source in above):
            continue
        if not is_ours and name not in _NATIVE_ARGUMENTS and not isinstance(value, IterDataPipe):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from map(_spec_text, getattr(value, "value", value))  # a `Held` may hold them
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, item in getattr(value, "value", value).items():
                yield f"{key}=***" if _is_secret(key) else f"{key}={_spec_text(item)}"
        elif parameter.kind is not parameter.KEYWORD_ONLY and value is not None:
            yield value_text(value)
        elif not _is_default(value, parameter.default):
            yield f"{name}={value_text(value)}"


def _spec_text(item: Any) -> str:
    """Writes an argument, with alternatives such as ('jpg', 'png') as "jpg;png"."""
    is_spec = type(item) is tuple and item and all(isinstance(name, str) for name in item)
    return value_text(";".join(item) if is_spec else item)


def _is_secret(name: object) -> bool:
    return mask_text(f"{name}=value") != f"{name}=value"


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if default is None:  # options and rules that were not passed are empty objects
        return repr(value) in ("StorageOptions()", "RewriteRules('')")
    return type(value) is type(default) and bool(value == default)


def short_name(pipe: DataPipe) -> str:
    """Returns the name by which a pipe's class is known, such as ``Shuffler``."""
    return type(pipe).__name__.removeprefix("_").removesuffix("IterDataPipe")


def known_name(pipe: DataPipe) -> str:
    """Returns the short name of a stage of torch, torchdata or this package; "" for others, which may do anything."""
    package = type(pipe).__module__.partition(".")[0]
    return short_name(pipe) if package in ("torch", "torchdata", "torchdata_wds") else ""


def full_name(value: object) -> str:
    """Returns the name of a class or function with its module, except in this package, whose files may move."""
    module = str(getattr(value, "__module__", "")).replace("__mp_main__", "__main__")  # in spawned workers
    name = getattr(value, "__qualname__", "")
    return f"torchdata_wds.{name}" if module.startswith("torchdata_wds.") else f"{module}.{name}"
