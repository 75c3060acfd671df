"""The usual graph in one call, with the arguments of webdataset's ``WebDataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import storage
from torchdata_wds.checks import check_flags, is_count
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Naming, Select
from torchdata_wds.pipes.base import WdsPipe

_SEED = (
    "orders follow the loader's seed: DataLoader2(pipe, reading_service=WorkersReadingService(n, seed=s)), "
    "loader.seed(s), or torch.manual_seed(s) for torch's DataLoader"
)

_SPLITTER = (
    "shards are divided by .sharding_filter(), among the workers of any loader, and among ranks by torch's DataLoader "
    "and WorkersReadingService(n, distributed=True). To divide them otherwise, chain the stages yourself, with "
    ".split_shards(), .resample_shards() or your own filter"
)

#: What to use instead of an argument that is not accepted here.
_INSTEAD = {
    "detshuffle": _SEED,
    "empty_check": (
        "a pattern that matches nothing raises in any case, and a worker without shards is not an error: leave it out"
    ),
    "nodesplitter": _SPLITTER,
    "repeat": "chain .cycle(n) for n passes, or .wds_epoch(n) for endless epochs of n samples",
    "seed": _SEED,
    "workersplitter": _SPLITTER,
}


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
    select: Select | None = None,
    rename: Callable[[str], str] | None = None,
    allow_pickle: bool = False,
    read_ahead: int = 0,
    interleave: int = 1,
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    mode: str | None = None,
    repeat: bool = False,
    url_to_name: Naming = None,
    detshuffle: bool = False,
    nodesplitter: Any = None,
    workersplitter: Any = None,
    select_files: Select | None = None,
    rename_files: Callable[[str], str] | None = None,
    empty_check: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> WdsPipe[Any]:
    """Builds the usual graph: list, shuffle and split shards, load, group, and what the arguments add.

    The result is an ordinary pipe: chain further stages to it. Of the arguments of webdataset 1.0, some are accepted as
    other names for arguments here; others raise an error that names the replacement.

    Args:
        urls: A pattern or a (nested) list of patterns, as for ``list_shards``, or a pipe of patterns.
        shardshuffle: Whether to shuffle the shards before splitting, unless `resampled`; or the size of the buffer.
        extensions: Fields to yield as tuples: one str of field specs separated by blanks, or a list of them.
        decoder: What ``wds_decode`` takes, one or a list; None leaves bytes, ``[]`` decodes all but images.
        transforms: Functions (or None) for the values of the tuples; a single one is for the first. Needs `extensions`.
        shuffle: Size of the sample shuffle's buffer; None or 0 keeps the order of the shards.
        handler: Passed to every stage.
        resampled: Whether each worker draws shards endlessly, as with ``resample_shards()``; see ``.wds_epoch(n)``.
        cache_dir: A folder for copies of remote shards, as in ``cache_shards``; None keeps none.
        cache_name: How to name the copies: the ``name=`` of ``cache_shards``.
        cache_size: How many bytes all copies may take: ``max_bytes=`` of ``cache_shards``; None or -1 means no limit.
        select: Which members to read, as in ``load_wds_shards``.
        rename: A function from a member's name to another, as in ``load_wds_shards``.
        allow_pickle: Whether `decoder` may decode pickles, as in ``wds_decode``.
        read_ahead: How many shards to open before their turn, as in ``load_wds_shards``.
        interleave: How many shards to take samples from in turn, as in ``load_wds_shards``.
        max_member_bytes: The largest member that is read, as in ``load_wds_shards``.
        storage_options: fsspec options by protocol, such as ``{"s3": {"key": ...}}``, to list, copy and read.
        rewrite: Rules that redirect URLs, as in ``list_shards``.
        mode: ``"resampled"`` is ``resampled=True``.
        repeat: Not accepted: use ``.cycle(n)`` or ``.wds_epoch(n)``.
        url_to_name: The same as `cache_name`.
        detshuffle: Not accepted: seeds come from the loader.
        nodesplitter: None, or one of webdataset's splitters; the loader always divides the work among ranks.
        workersplitter: None, or one of webdataset's splitters; ``sharding_filter`` always divides it among workers.
        select_files: The same as `select`.
        rename_files: The same as `rename`.
        empty_check: Not accepted: a pattern that matches nothing always raises.
        verbose: Whether the cache logs each hit, download and eviction.
        seed: Not accepted: seeds come from the loader.

    Returns:
        A pipe of samples (dict), or of tuples with `extensions`.

    Raises:
        ValueError, TypeError: if an argument is wrong.
        ShardListError: if `urls` is an empty list, as from a glob that matched nothing.

    Example:
        >>> import torchdata_wds
        >>> torchdata_wds.WebDataset("{0..9}.tar", shardshuffle=False, decoder="pil")
        IterableWrapper(['{0..9}.tar']).list_shards().sharding_filter().load_wds_shards().group_by_key().wds_decode('pil')
    """
    if transforms is not None and extensions is None:
        raise ValueError("transforms apply to tuples: pass extensions= as well, or chain .wds_map(f) for samples")
    if allow_pickle and decoder is None:
        raise ValueError("allow_pickle applies to decoding: pass decoder= as well ([] decodes all but images)")
    if shuffle is not None and not is_count(shuffle, 0):
        raise ValueError(f"shuffle must be the size of the samples' buffer, or None, not {shuffle!r}")
    check_flags(resampled=resampled, allow_pickle=allow_pickle, verbose=verbose)
    values = (detshuffle, empty_check, nodesplitter, repeat, seed, workersplitter)  # as in _INSTEAD
    taken = ("single_node_only", "split_by_node", "split_by_worker")  # webdataset's, which divide shards as done here
    for (name, instead), value in zip(_INSTEAD.items(), values, strict=True):
        if value is not None and value is not False and getattr(value, "__name__", None) not in taken:
            raise ValueError(f"WebDataset does not take {name}={value!r} here: {instead}")
    if mode not in (None, "resampled"):
        raise ValueError(f"mode must be None or 'resampled', which is resampled=True, not {mode!r}")
    if callable(shardshuffle):
        raise TypeError(f"the second argument is shardshuffle, not {shardshuffle!r}: pass handler= by name")
    if shardshuffle is not None and (not isinstance(shardshuffle, int) or shardshuffle < 0):
        raise ValueError(f"shardshuffle must be True, False or the size of a buffer, not {shardshuffle!r}")
    options = storage.StorageOptions(storage_options, rewrite=rewrite)
    shards: Any = _patterns(urls).list_shards(storage_options=options)
    if resampled or mode:
        shards = shards.resample_shards()
    else:
        if shardshuffle:
            shards = shards.shuffle() if shardshuffle is True else shards.shuffle(buffer_size=shardshuffle)
        shards = shards.sharding_filter()
    cache_name = _either("cache_name", cache_name, "url_to_name", url_to_name)
    cache_size = None if cache_size == -1 else cache_size
    if cache_dir is not None:
        shards = shards.cache_shards(
            cache_dir, max_bytes=cache_size, name=cache_name, verbose=verbose, storage_options=options, handler=handler
        )
    elif cache_name is not None or cache_size is not None or verbose:
        raise ValueError(
            "cache_name (or url_to_name), cache_size and verbose apply to a cache: pass its folder as cache_dir= too"
        )
    pipe: WdsPipe[Any] = shards.load_wds_shards(
        select=_either("select", select, "select_files", select_files),
        rename=_either("rename", rename, "rename_files", rename_files),
        read_ahead=read_ahead,
        interleave=interleave,
        max_member_bytes=max_member_bytes,
        storage_options=options,
        handler=handler,
    ).group_by_key(handler=handler)
    if shuffle:
        pipe = pipe.wds_shuffle(shuffle)
    if decoder is not None:
        decoders = [decoder] if isinstance(decoder, str) or callable(decoder) else decoder
        pipe = pipe.wds_decode(*decoders, allow_pickle=allow_pickle, handler=handler)
    if extensions is not None:
        specs = extensions.split() if isinstance(extensions, str) else extensions
        pipe = pipe.wds_to_tuple(*specs, handler=handler)
    if transforms is None:
        return pipe
    return pipe.wds_map_tuple(*([transforms] if callable(transforms) else transforms), handler=handler)


def _either(name: str, value: Any, other: str, same: Any) -> Any:
    """Returns the value that was passed under one of two names."""
    if value is not None and same is not None:
        raise ValueError(f"{name} and {other} are the same argument: pass only one")
    return same if value is None else value


def _patterns(urls: str | os.PathLike[str] | Iterable[Any]) -> IterDataPipe[Any]:
    if isinstance(urls, IterDataPipe):
        return urls
    is_one = isinstance(urls, (str, os.PathLike))
    if isinstance(urls, Mapping) or (is_one and str(urls).lower().endswith((".yaml", ".yml", ".json"))):
        raise ShardListError(
            "WebDataset takes shards; a dataset file or dict that lists them goes to load_dataset(...)"
        )
    if not is_one and not isinstance(urls, Iterable):
        raise ShardListError(f"WebDataset takes a pattern or a list of patterns, not {urls!r}")
    patterns = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not patterns:
        raise ShardListError("WebDataset got an empty list of shards: did a glob match nothing?")
    return IterableWrapper(patterns)
