"""Patterns to shard URLs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import storage
from torchdata_wds.pipes.base import WdsPipe, register


@register("list_shards")
class ShardListerIterDataPipe(WdsPipe[str]):
    """Expands shard patterns into URLs (functional name: ``list_shards``).

    Patterns are expanded in their order, the matches of a glob or folder sorted; only the matches of one pattern are
    kept in memory. The list is made anew each epoch.

    Args:
        source_datapipe: Yields patterns: str or Path with braces (``{000..123}``, ``{a,b}``) and globs, local or of
            any fsspec file system; folders; several joined by ``::``; (nested) lists of those. A path that exists is
            taken verbatim. In ``pipe:`` and ``http(s):`` only braces that are lists or ranges are expanded.
            ``${name}`` stands for the environment variable ``WDS_name``; in ``pipe:`` only if that is set.
        storage_options: fsspec options by protocol, as ``{"s3": {...}}``, for listing.
        rewrite: Where URLs are looked for instead: ``"regex=replacement;..."``, or a mapping from regex to replacement.
            The first rule that matches the beginning of a URL replaces what it matches; those in the environment
            variables ``WDS_REWRITE`` and ``GOPEN_REWRITE`` come after. The yielded URLs are the original ones: give the
            loader the same rules, and the same `storage_options`.

    Yields:
        str: One URL each.

    Raises:
        ShardListError: if a pattern matches nothing, is a single character or not a pattern, or has a variable that is
            not set.
        UnsafeDataError: if a rule would make a command of a URL that holds what a shell would run.
        ValueError, TypeError: if a rule is malformed.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(["train-{08..10}.tar"]).list_shards())
        ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """

    repeats_shards = True

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    ) -> None:
        self.source_datapipe = source_datapipe
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite

    def __iter__(self) -> Iterator[str]:
        for pattern in self.source_datapipe:
            yield from storage.list_urls(pattern, storage_options=self.storage_options, variables=True)

    def list_again(self, patterns: Iterable[Any]) -> list[str]:
        """Returns the shards that patterns stand for now, with the options of this pipe."""
        source = IterableWrapper(patterns, deepcopy=False)
        return list(ShardListerIterDataPipe(source, storage_options=self.storage_options))
