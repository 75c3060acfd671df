"""Turns shard URLs into shards with a local copy."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torchdata_wds import storage
from torchdata_wds.checks import check_flags, is_number
from torchdata_wds.consumers import upstream
from torchdata_wds.errors import CacheError, ShardListError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Naming
from torchdata_wds.pipes.base import Pipe, register
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.shard_copies import CachedShard, check_copy
from torchdata_wds.pipes.shards.split_shards import ShardSplitterIterDataPipe
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import ShardFacts
from torchdata_wds.storage.cache.names import check_naming, copy_name, digest_of, origin_of, unsigned
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.urls import STDIN, check_letter


@register("cache_shards")
class ShardCacherIterDataPipe(HandlingPipe[Any]):
    """Keeps local copies of shards, made while they are first read (functional name: ``cache_shards``).

    Put it between the list of shards and ``load_wds_shards``. One process per machine downloads a shard, and the others
    read along. A copy holds the object's bytes unchanged, appears only when complete, and is reused without a check. A
    changed shard is noticed only after ``split_shards(index=True)``, by the size and digest in the index; it is then
    downloaded once more before it is read. If a copy cannot be made or read, the source is read instead, with a
    warning; a damaged copy is removed, and an error raised. A shard that is not read to its end is not kept, unless a
    `ShardSlice` of it was read. The folder holds only copies, and the ``.part`` and ``.lock`` files of downloads.

    Args:
        source_datapipe: Yields URLs (str or Path) or the `ShardSlice` of ``split_shards``.
        folder: The folder of the copies, created if missing; ``~`` is expanded. None turns the cache off.
        max_bytes: The most bytes that all copies made by this package may take, without unfinished downloads. To stay
            below it, the least recently used copies that are not being read are removed; a larger shard is not kept.
            Copies named without a digest are recognized by extended attributes only. None means no limit.
        name: The name of a copy: None for the shard's own name and a digest of its origin (the whole URL or command
            after rewriting, with the endpoint or account of its store, without credentials); ``"unsigned"`` for the
            same without query parameters that sign a URL; ``"basename"``; ``"path"`` for host and path; or a
            ``callable(url) -> path`` inside the folder. With the last three, files that you put there are used and
            never changed; two URLs with the same name are an error, as is a copy of another origin if the file system
            supports extended attributes.
        verify: Whether to keep only complete shards, judged by the tar end marker and compression checksums.
        while_reading: Whether to read a shard while it is downloaded; False downloads it first.
        cache_local: Whether to copy local files too, such as those of a network file system.
        verbose: Whether to log each hit, download and eviction, as ``WDS_VERBOSE_CACHE=1`` does.
        storage_options, rewrite: As in ``list_shards``, for downloading; samples keep the original URLs.
        handler: Called for each item that is not a URL (ShardListError), or has no cache name of its own (CacheError).
            Download errors go to the handler of ``load_wds_shards``.

    Yields:
        CachedShard: One per shard, before any download. Standard input passes unchanged, as do local files unless
        `cache_local`.

    Raises:
        ShardListError: through the handler, for an item that is not a URL.
        CacheError: through the handler, for a URL without a name of its own.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> next(iter(IterableWrapper(["https://host/a/x.tar?v=3"]).cache_shards("/cache", name="path")))
        CachedShard(url='https://host/a/x.tar?v=3', path='/cache/host/a/x.tar', part=None)
    """

    repeats_shards = True
    state_arguments = ()  # the shards are the same, wherever the copies are

    def __init__(
        self,
        source_datapipe: Pipe,
        folder: str | os.PathLike[str] | None,
        *,
        max_bytes: float | None = None,
        name: Naming = None,
        verify: bool = True,
        while_reading: bool = True,
        cache_local: bool = False,
        verbose: bool = False,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        check_flags(verify=verify, while_reading=while_reading, cache_local=cache_local, verbose=verbose)
        if folder is not None and not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
            raise ValueError(f"cache_shards takes a folder (str or Path), or None for no cache, not {folder!r}")
        if max_bytes is not None and not is_number(max_bytes):
            raise TypeError(f"max_bytes must be a number of bytes, or None, not {max_bytes!r}")
        if max_bytes is not None and not max_bytes > 0:
            raise ValueError(f"max_bytes must be more than 0, or None for no limit, not {max_bytes!r}")
        super().__init__(source_datapipe, handler)
        self.folder, self.max_bytes = folder, max_bytes
        self.name = check_naming(name)
        self.verify, self.while_reading = verify, while_reading
        self.cache_local, self.verbose = cache_local, verbose
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite

    def __iter__(self) -> Iterator[Any]:
        if self.folder is None:
            yield from self.source_datapipe
            return
        cache = ShardCache(
            os.path.abspath(os.path.expanduser(self.folder)),  # noqa: PTH100, PTH111 - a str
            max_bytes=self.max_bytes,
            is_named_by_digest=self.name in (None, "unsigned"),
            check=check_copy if self.verify else None,
            while_reading=self.while_reading,
            verbose=self.verbose,
            storage_options=self.storage_options,
        )
        indexes = (pipe.index for pipe in upstream(self) if isinstance(pipe, ShardSplitterIterDataPipe))
        facts = getattr(next(indexes, None), "facts", None)
        yield from self.map_items(self.source_datapipe, partial(self._cached, cache, {}, facts))

    def _cached(
        self, cache: ShardCache, taken: dict[str, str], facts: Callable[[str], ShardFacts | None] | None, item: Any
    ) -> Any:
        part = item if isinstance(item, ShardSlice) else None
        url = item.url if part is not None else item
        if not isinstance(url, (str, os.PathLike)) or not isinstance(text := os.fspath(url), str):
            raise ShardListError(
                f"cache_shards got {type(item).__name__} {storage.mask_item(item)}; it takes URLs (str or Path) and "
                "ShardSlice: put it before load_wds_shards, after list_shards, shuffle and sharding_filter"
            )
        if isinstance(url, str):
            check_letter(text, "cache_shards got the shard")
        place = resolve(text, self.storage_options)
        if place.scheme == STDIN or (place.is_local and not self.cache_local):
            return item
        origin = origin_of(text, self.storage_options)
        name = copy_name(text, self.name, origin)
        if not cache.is_named_by_digest:
            digest = digest_of(unsigned(origin))
            if taken.setdefault(name, digest) != digest:
                shard = storage.mask_url(text)
                raise CacheError(
                    f"shard {shard} has the same name in the cache as another one: {name!r}. Leave name= out, or pass "
                    "one that tells them apart",
                    shard=shard,
                )
        stated = None if part is None or facts is None else facts(text)
        return CachedShard(text, os.path.join(cache.folder, name), part, cache, stated)  # noqa: PTH118 - a str

    def __len__(self) -> int:
        return self.source_length()
