"""Members to samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.errors import SampleError
from torchdata_wds.format.grouping import OnDuplicate, OnReappearing, group_members, grouping_rules
from torchdata_wds.format.members import ShardMember
from torchdata_wds.format.names import KeyRule
from torchdata_wds.handlers import Handler, check_handler, keep_going, reraise_exception
from torchdata_wds.pipes.base import WdsPipe, check_flags, register
from torchdata_wds.pipes.load_shards import ShardLoaderIterDataPipe

__all__ = ["KeyGrouperIterDataPipe"]

_ARCHIVE = re.compile(r"(.*?\.(?:tar|tgz|tbz2?|txz|tzst|zip)(?:\.\w{1,4})?)[/\\](.*)", re.IGNORECASE | re.DOTALL)


@register("group_by_key")
class KeyGrouperIterDataPipe(WdsPipe[dict[str, Any]]):
    """Groups members into samples by their key (functional name: ``group_by_key``).

    A sample is a run of consecutive members of one shard with the same key; a shard's end always ends a sample.
    Order is kept, one sample is in memory. Directly behind ``load_wds_shards`` the two run as one loop: same
    samples, without a step per member. An item, for the handler, is a sample.

    Args:
        source_datapipe: Yields `ShardMember`, or ``(path, bytes or stream)`` pairs as of ``load_from_tar``.
        keys: ``"first_dot"`` (the key ends at the base name's first dot), ``"last_dot"``, or a ``callable(name)``
            that gives (key, field), or None to skip the member.
        lowercase: Whether fields are lower-cased.
        fields: Which fields to keep: a list, or one str of names separated by blanks; None keeps all.
        on_duplicate: The same field twice in a sample: ``"error"``, or the ``"first"`` or ``"last"`` one counts.
        on_reappearing: A key that comes back later in its shard: ``"error"``, or ``"warn"`` and ``"allow"``, which
            give another sample of that key.
        handler: Asked about each sample that is wrong.

    Yields:
        dict: ``__key__`` (str), ``__url__`` (str), and bytes by field.

    Raises:
        DuplicateFieldError: through the handler.
        ReappearingKeyError: through the handler.
        SampleError: through the handler, for a member that would become a reserved field.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> members = IterableWrapper([("x.tar/a.txt", b"A"), ("x.tar/a.cls", b"1")])
        >>> list(members.group_by_key())
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b'A', 'cls': b'1'}]
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        keys: KeyRule = "first_dot",
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        on_duplicate: OnDuplicate = "error",
        on_reappearing: OnReappearing = "error",
        handler: Handler = reraise_exception,
    ) -> None:
        check_flags(lowercase=lowercase)
        grouping_rules(keys, lowercase, fields, on_duplicate, on_reappearing)
        self.source_datapipe = source_datapipe
        self.keys = keys
        self.lowercase = lowercase
        self.fields = fields
        self.on_duplicate = on_duplicate
        self.on_reappearing = on_reappearing
        self.handler = check_handler(handler)
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        source = self.source_datapipe
        fused = type(source) is ShardLoaderIterDataPipe
        yield from group_members(
            source.marked_members() if fused else map(_as_member, source),
            keys=self.keys,
            lowercase=self.lowercase,
            fields=self.fields,
            on_duplicate=self.on_duplicate,
            on_reappearing=self.on_reappearing,
            on_error=partial(keep_going, self.handler, skipped=self.skipped),
            skipped=self.skipped,
            shown=storage.mask_url,
        )


def _as_member(item: Any) -> ShardMember:
    if isinstance(item, ShardMember):
        return item
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        raise SampleError(
            f"group_by_key got {type(item).__name__} {str(item)[:80]!r}; it takes the ShardMember of "
            ".load_wds_shards(), or pairs (path, bytes or stream)"
        )
    path, value = item
    data = value if isinstance(value, bytes) else _read_all(value)
    found = _ARCHIVE.fullmatch(path)
    url, name = found.groups() if found else ("", path)
    return ShardMember(url, name, data)


def _read_all(value: Any) -> bytes:
    """Reads and closes a stream of a native loader."""
    if not hasattr(value, "read"):
        return bytes(value)
    try:
        return bytes(value.read())
    finally:
        value.close()
