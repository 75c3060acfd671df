"""The usual graph in one call, with WebDataset's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds.errors import ShardListError
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.pipes.base import WdsPipe, check_flags
from torchdata_wds.pipes.cache_shards import ShardCacherIterDataPipe
from torchdata_wds.pipes.decode import SampleDecoderIterDataPipe
from torchdata_wds.pipes.group import KeyGrouperIterDataPipe
from torchdata_wds.pipes.list_shards import ShardListerIterDataPipe
from torchdata_wds.pipes.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.pipes.resample_shards import ShardResamplerIterDataPipe
from torchdata_wds.pipes.shuffle import SampleShufflerIterDataPipe
from torchdata_wds.pipes.tuples import FieldTuplerIterDataPipe, TupleMapperIterDataPipe
from torchdata_wds.storage.cache_names import Naming

__all__ = ["WebDataset"]


def WebDataset(  # noqa: N802  (the name that users of WebDataset know)
    urls: str | os.PathLike[str] | Iterable[Any],
    shardshuffle: bool | int | None = True,
    extensions: str | Sequence[str] | None = None,
    decoder: str | Callable[[str, Any], Any] | Sequence[str | Callable[[str, Any], Any]] | None = None,
    transforms: Sequence[Callable[[Any], Any] | None] | Callable[[Any], Any] | None = None,
    shuffle: int | None = None,
    handler: Handler = reraise_exception,
    *,
    resampled: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_name: Naming = None,
    cache_size: float | None = None,
) -> WdsPipe[Any]:
    """Builds the usual graph: list, shuffle and split shards, load, group, and what else is asked for.

    The result is an ordinary pipe: further stages are chained to it.

    Args:
        urls: A pattern or a (nested) list of patterns, as ``list_shards`` takes them, or a pipe of patterns.
        shardshuffle: Whether to shuffle the shards before they are split among workers and ranks; a number is the
            size of the buffer for that. Not looked at where shards are `resampled`.
        extensions: Fields to yield as tuples: one str of field specs separated by blanks, or a list of them.
        decoder: What ``wds_decode`` takes, one or a list; None leaves bytes, ``[]`` decodes all but images.
        transforms: A function (or None) per place of the tuples, as a list; a single function is for the first place.
            Needs `extensions`.
        shuffle: Size of the sample shuffle's buffer; None or 0 keeps the order of the shards.
        handler: Given to every stage.
        resampled: Whether to draw shards at random without end, with replacement, each worker of each rank for
            itself, as ``resample_shards()`` does. Chain ``.wds_epoch(n)`` to have epochs.
        cache_dir: A folder where copies of remote shards are kept, as by ``cache_shards``; None keeps none.
        cache_name: How the copies are called: the ``name=`` of ``cache_shards``.
        cache_size: How many bytes all copies may take: its ``max_bytes=``; None or -1 is no limit.

    Returns:
        A pipe of samples (dict), or of tuples where `extensions` is given.

    Raises:
        ValueError: if an argument is wrong.
        TypeError: if `resampled` is not True or False, or what is given as a function or decoder is none.
        ShardListError: if `urls` is an empty list, as of a glob that matched nothing.

    Example:
        >>> import torchdata_wds
        >>> torchdata_wds.WebDataset("{0..9}.tar", shardshuffle=False, decoder="pil")
        IterableWrapper(['{0..9}.tar']).list_shards().sharding_filter().load_wds_shards().group_by_key().wds_decode('pil')
    """
    if transforms is not None and extensions is None:
        raise ValueError("transforms go over tuples: pass extensions= as well, or chain .wds_map(f) for samples")
    if shardshuffle is not None and (not isinstance(shardshuffle, int) or shardshuffle < 0):
        raise ValueError(f"shardshuffle must be True, False or the size of a buffer, not {shardshuffle!r}")
    if shuffle is not None and (not isinstance(shuffle, int) or isinstance(shuffle, bool) or shuffle < 0):
        raise ValueError(f"shuffle must be the size of the samples' buffer, or None, not {shuffle!r}")
    check_flags(resampled=resampled)
    shards = _shards(ShardListerIterDataPipe(_patterns(urls)), shardshuffle, resampled)
    if cache_dir is not None:
        max_bytes = None if cache_size == -1 else cache_size
        shards = ShardCacherIterDataPipe(shards, cache_dir, max_bytes=max_bytes, name=cache_name, handler=handler)
    elif cache_name is not None or cache_size not in (None, -1):
        raise ValueError("cache_name and cache_size are about a cache: pass its folder as cache_dir= as well")
    members = ShardLoaderIterDataPipe(shards, handler=handler)
    pipe: WdsPipe[Any] = KeyGrouperIterDataPipe(members, handler=handler)
    if shuffle:
        pipe = SampleShufflerIterDataPipe(pipe, shuffle)
    if decoder is not None:
        decoders = [decoder] if isinstance(decoder, str) or callable(decoder) else decoder
        pipe = SampleDecoderIterDataPipe(pipe, *decoders, handler=handler)
    if extensions is not None:
        specs = extensions.split() if isinstance(extensions, str) else extensions
        pipe = FieldTuplerIterDataPipe(pipe, *specs, handler=handler)
    if transforms is not None:
        functions = [transforms] if callable(transforms) else transforms
        pipe = TupleMapperIterDataPipe(pipe, *functions, handler=handler)
    return pipe


def _shards(listed: WdsPipe[str], shardshuffle: bool | int | None, resampled: bool) -> IterDataPipe[str]:
    """Lets each consumer have its shards: a share of the shuffled list, or an endless draw from it."""
    if resampled:
        return ShardResamplerIterDataPipe(listed)
    if shardshuffle:
        listed = listed.shuffle() if shardshuffle is True else listed.shuffle(buffer_size=shardshuffle)
    return listed.sharding_filter()


def _patterns(urls: str | os.PathLike[str] | Iterable[Any]) -> IterDataPipe[Any]:
    if isinstance(urls, IterDataPipe):
        return urls
    if not isinstance(urls, (str, os.PathLike, Iterable)):
        raise ShardListError(f"WebDataset takes a pattern or a list of patterns, not {urls!r}")
    patterns = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not patterns:
        raise ShardListError("WebDataset got an empty list of shards: did a glob match nothing?")
    return IterableWrapper(patterns)
