"""Describes chains of pipes: the stages above each, their names, and the chain as text, much as it was written."""

from __future__ import annotations

import functools
import inspect
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.storage.places import StorageOptions
from torchdata_wds.storage.secrets.masking import mask_text

_LONGEST = 60
_LOOKED_AT = 2000  # how many characters of a long text are searched for secrets
_MOST_ITEMS = 4  # of a collection
_MOST_VALUES = 20  # of ``*args``
_MOST_SOURCES = 10_000  # in one list
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")

_COLLECTIONS: dict[Any, str] = {
    list: "[]",
    tuple: "()",
    **dict.fromkeys((set, frozenset, deque), "{}"),
    **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), "[]"),
}

#: The attributes in which native pipes hold arguments under other names: torch's Collator, and those of fork and demux.
_HELD_AS = {"conversion": "fn", "datapipe": "main_datapipe"}


def sources_of(pipe: DataPipe) -> list[IterDataPipe[Any]]:
    """Returns the pipes that a pipe holds as attributes, alone or in lists; unlike torch's traversal, never pickles."""
    values = [value if isinstance(value, (list, tuple)) else (value,) for value in vars(pipe).values()]
    # A list of a million shards would take 30 ms at each call.
    return [source for items in values for source in islice(items, _MOST_SOURCES) if isinstance(source, IterDataPipe)]


def is_inner(pipe: DataPipe) -> bool:
    """Returns whether a form put a stage in on its own, so that the program did not write it."""
    if getattr(type(pipe), "is_inner", False):
        return True
    return known_name(pipe) == "ShardingFilter" and any(map(is_inner, sources_of(pipe)))


def written(sources: Iterable[DataPipe]) -> Iterator[DataPipe]:
    """Yields stages that the program wrote: in place of one that a form put in, those before it."""
    for source in sources:
        if is_inner(source):
            yield from written(sources_of(source))
        else:
            yield source


def stages_of(end: DataPipe) -> Iterator[DataPipe]:
    """Yields a pipe and all pipes above it, each once, by `sources_of`."""
    waiting, seen = [end], set()
    while waiting:
        stage = waiting.pop(0)
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            waiting += sources_of(stage)


def value_text(value: Any, levels: int = 3) -> str:
    """Writes an argument on one line: long ones cut, functions by name, secrets masked; never raises."""
    try:
        return _text(value, levels)
    except Exception:  # noqa: BLE001  (the repr of a user's object may raise anything)
        return f"<{type(value).__name__}>"


def _text(value: Any, levels: int) -> str:
    if isinstance(value, str):
        return repr(_cut(mask_text(value[:_LOOKED_AT])))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value):,} bytes>"
    if isinstance(value, (IterDataPipe, MapDataPipe)):
        return f"<pipe .{form_name(value)}()>"
    if isinstance(value, functools.partial):
        return f"partial({value_text(value.func, levels)}, ...)"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__).rpartition("<locals>.")[2]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"<{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}>"
    if isinstance(value, dict):
        return _collection_text("{}", _dict_texts(value, levels), len(value), levels)
    for kind, brackets in _COLLECTIONS.items():
        # Other subclasses write themselves, as a NamedTuple does.
        if isinstance(value, kind) and type(value).__repr__ is kind.__repr__:
            return _collection_text(brackets, (value_text(item, levels - 1) for item in value), len(value), levels)
    text = " ".join(_ADDRESS.sub("", repr(value)[:_LOOKED_AT]).split())
    text = _cut(text if isinstance(value, StorageOptions) else mask_text(text))  # those mask themselves
    return text if text.isprintable() else repr(text)[1:-1]


def _dict_texts(value: dict[Any, Any], levels: int) -> Iterator[str]:
    for key, inside in value.items():
        yield f"{value_text(key, levels - 1)}: {'***' if _is_secret(key) else value_text(inside, levels - 1)}"


def _collection_text(brackets: str, texts: Iterable[str], count: int, levels: int) -> str:
    """Writes the first items of a collection, and how many it has; looks at no others."""
    shown: list[str] = []
    for text in islice(texts, _MOST_ITEMS if levels > 0 else 0):
        shown.append(text)
        if sum(map(len, shown)) > _LONGEST:
            break
    if count > len(shown):
        shown.append(f"... ({count:,} in all)")
    return f"{brackets[0]}{', '.join(shown)}{',' * (brackets == '()' and count == 1)}{brackets[-1]}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 3 :]}"


def chain_text(pipe: DataPipe) -> str:
    """Writes a pipe and all above it on one line, without secrets or default arguments; never raises."""
    try:
        stages: dict[int, str] = {}
        sources: Sequence[DataPipe] = [pipe]
        while sources and id(sources[0]) not in stages:
            stages[id(sources[0])] = stage_text(sources[0])
            sources = list(written(sources_of(sources[0])))
        return ".".join(reversed(stages.values()))
    except Exception:  # noqa: BLE001  (a debugger may show a pipe whose constructor is still running)
        return type(pipe).__qualname__


def stage_text(pipe: DataPipe, *, without: Collection[str] = (), drawn: Collection[int] | None = None) -> str:
    """Writes a pipe as a stage of a chain, such as ``wds_map(int)``.

    Args:
        pipe: The pipe.
        without: The names of arguments to omit.
        drawn: The ids of pipes to omit among the arguments; None omits the first source.
    """
    if type(pipe).__name__ == "_ChildDataPipe":  # one of those that fork and demux return
        return f"[{vars(pipe).get('instance_id')}]"
    drawn = {id(source) for source in sources_of(pipe)[:1]} if drawn is None else drawn
    return f"{form_name(pipe)}({', '.join(_arguments(pipe, without, drawn))})"


def form_name(pipe: DataPipe) -> str:
    """Returns the functional name, or the short name of the class for a source or a pipe without one."""
    name = type(pipe).__name__.removesuffix("IterDataPipe").removesuffix("MapDataPipe")
    has_sources = isinstance(pipe, MapDataPipe) or sources_of(pipe)
    return (form_of(pipe)[0] or name) if has_sources else name


def form_of(pipe: DataPipe) -> tuple[str, type]:
    """Returns the functional name of a pipe's class, or "", and the class that has its constructor."""
    own = type(pipe)
    return _form_of(own, len(own.functions))


@functools.lru_cache(maxsize=1024)
def _form_of(own: Any, _: int) -> tuple[str, type]:
    """Finds the form of a class; again once there are more forms."""
    named = own.__name__.removeprefix("_"), own.__module__  # fork and demux make pipes of private classes
    for form, function in own.functions.items():
        cls: type = (getattr(function, "args", None) or (type(None),))[0]  # the class, inside a functools.partial
        if cls is own or (own.__name__[0] == "_" and named == (cls.__name__, cls.__module__)):
            return form, cls
    return "", own


def _arguments(pipe: DataPipe, without: Collection[str], drawn: Collection[int]) -> Iterator[str]:
    is_ours = type(pipe).__module__.startswith("torchdata_wds.")
    held = vars(pipe)
    in_place = True  # whether no argument before this one was left out
    for name, parameter in _parameters(form_of(pipe)[1]).items():
        key = next((key for key in (name, f"_{name}", _HELD_AS.get(name)) if key in held), "")
        value: Any = held.get(key, parameter.empty)
        if id(value) in drawn or _holds(value, drawn):
            continue
        if value is parameter.empty or name in without:
            in_place = False
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield from _rest(getattr(value, "value", value), drawn)  # a `Held` may hold them
        elif is_ours and parameter.kind is not parameter.KEYWORD_ONLY:
            if value is not None:
                yield _value_of(name, value)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY and in_place:
            yield _value_of(name, value)
        elif not _is_default(value, parameter.default):
            yield f"{name}={_value_of(name, value)}"


@functools.lru_cache(maxsize=1024)
def _parameters(own: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(own).parameters


def _holds(value: Any, pipes: Collection[int]) -> bool:
    """Returns whether a collection has one of these pipes among its first items."""
    return isinstance(value, (list, dict)) and any(id(item) in pipes for item in islice(value, _MOST_ITEMS))


def _rest(values: Any, drawn: Collection[int]) -> Iterator[str]:
    """Writes the values of ``*args`` or ``**kwargs``."""
    if isinstance(values, dict):
        yield from (f"{name}={'***' if _is_secret(name) else _spec_text(value)}" for name, value in values.items())
        return
    values = [value for value in values if id(value) not in drawn]
    yield from map(_spec_text, values[:_MOST_VALUES])
    if len(values) > _MOST_VALUES:
        yield f"... ({len(values):,} in all)"


def _value_of(name: str, value: Any) -> str:
    return "***" if isinstance(value, (str, bytes)) and _is_secret(name) else value_text(value)


def _spec_text(item: Any) -> str:
    """Writes an argument, with alternatives such as ('jpg', 'png') as "jpg;png"."""
    is_spec = type(item) is tuple and item and all(isinstance(name, str) for name in item)
    return value_text(";".join(item) if is_spec else item)


def _is_secret(name: object) -> bool:
    return mask_text(f"{name}=value") != f"{name}=value"


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    try:
        if default is None:  # options and rules that were not passed are empty objects
            return repr(value) in ("StorageOptions()", "RewriteRules('')")
        return type(value) is type(default) and bool(value == default)
    except Exception:  # noqa: BLE001  (a user's object may raise anything)
        return False


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
