"""What the advice of a report must know about a graph, this installation and machine, as plain numbers."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch.utils.data.graph import DataPipe

from torchdata_wds.codecs.images.decoding import ImageDecoder, ImageFieldDecoder
from torchdata_wds.codecs.images.pixels import IMAGE_SPECS
from torchdata_wds.pipes.chain_text import form_name, stages_of
from torchdata_wds.pipes.pickling import parts_of
from torchdata_wds.pipes.samples.decode import SampleDecoderIterDataPipe
from torchdata_wds.pipes.shards.cache_shards import ShardCacherIterDataPipe

logger = logging.getLogger(__name__)
_SHRINKS = re.compile("resize|thumbnail|crop", re.IGNORECASE)
_DEEPEST = 3  # of lists, partials and composed transforms in which functions are looked for


def graph_facts(branches: Iterable[DataPipe]) -> dict[str, int]:
    """Returns facts about the parts of a graph that workers run; `branches` are their last pipes.

    ``read_ahead``: how many shards are opened ahead; ``caches``: whether shards are cached; ``batches``, ``collates``:
    whether items are batched, and batches collated; ``images``: whether images are decoded; ``arrays``: whether to
    arrays or tensors, which simplejpeg can do; ``limits``: whether all to a limited size; ``shrinks``: whether a
    later function resizes or crops; ``simplejpeg`` and ``isal``: whether these are installed. Empty if
    a user's pipe raises when it is asked.
    """
    try:
        return _facts([pipe for branch in branches for pipe in stages_of(branch)])
    except Exception:
        logger.debug("what the advice of a report depends on is not known", exc_info=True)
        return {}


def _facts(pipes: Sequence[Any]) -> dict[str, int]:
    ours = [pipe for pipe in pipes if type(pipe).__module__.startswith("torchdata_wds.")]
    decoders = list(_image_decoders(pipes))
    return {
        "read_ahead": max((_ahead_of(pipe) for pipe in ours if hasattr(pipe, "read_ahead")), default=0),
        "caches": int(any(isinstance(pipe, ShardCacherIterDataPipe) or getattr(pipe, "cache", None) for pipe in ours)),
        "batches": int(any(hasattr(pipe, "batch_size") for pipe in pipes)),
        "collates": int(any(form_name(pipe) == "collate" for pipe in pipes)),
        "images": int(bool(decoders)),
        "arrays": int(any(IMAGE_SPECS[decoder.spec].container != "pil" for decoder in decoders)),
        "limits": int(all(decoder.is_bounded for decoder in decoders)),
        "shrinks": int(any(_shrinks(vars(pipe).values()) for pipe in pipes)),
        "simplejpeg": int(_is_installed("simplejpeg")),
        "isal": int(_is_installed("isal")),
    }


def machine_load() -> int:
    """Returns how many processes wanted a processor in the last minute, in percent of the machine's; 0 if unknown."""
    try:
        return round(100 * os.getloadavg()[0] / (os.cpu_count() or 1))
    except OSError:
        return 0


def _ahead_of(pipe: Any) -> int:
    return 1 if pipe.read_ahead is None else int(pipe.read_ahead)  # load_in_order decides by itself


def _image_decoders(pipes: Iterable[DataPipe]) -> Iterator[ImageFieldDecoder]:
    for pipe in pipes:
        if isinstance(pipe, SampleDecoderIterDataPipe):
            for decoder in pipe.decoders.value:
                if isinstance(decoder, str) and decoder in IMAGE_SPECS:
                    yield ImageDecoder(decoder)
                elif isinstance(decoder, ImageFieldDecoder):
                    yield decoder


def _shrinks(values: Iterable[Any], depth: int = 0) -> bool:
    """Returns whether one of some functions makes images smaller, as far as their names and calls tell."""
    for value in values:
        if any(map(_SHRINKS.search, _names_of(value))):
            return True
        # A composed transform holds its own in a list. Statically, since other objects may do anything when asked.
        inside = [*parts_of(value), *parts_of(inspect.getattr_static(value, "transforms", None))]
        if depth < _DEEPEST and _shrinks(inside, depth + 1):
            return True
    return False


def _names_of(value: Any) -> Iterator[str]:
    """Yields the name of a value's class, that of a function, and of what it calls."""
    yield type(value).__name__
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        yield function.__name__
        yield from function.__code__.co_names


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a program that hides it
        return False
