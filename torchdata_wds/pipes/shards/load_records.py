"""URLs of record shards to their records."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from torchdata_wds import storage
from torchdata_wds.checks import check_count
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.records import DEFAULT_MAX_BYTES, RecordFormat, read_records
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.pipes.base import Pipe, register
from torchdata_wds.pipes.division import check_workers
from torchdata_wds.pipes.foreign_loaders import SpawnNote
from torchdata_wds.pipes.lone_ranks import warn_of_lone_reader
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.shard_sources import as_source
from torchdata_wds.pipes.starvation import warn_when_idle
from torchdata_wds.storage.cache import wait_for_copies


class RecordLoader(HandlingPipe[Any]):
    """Base of the pipes that load record shards; a subclass sets the format."""

    reads_shards = True
    record_format: RecordFormat

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        check_count("max_bytes", max_bytes, 1)
        super().__init__(source_datapipe, handler)
        self.max_bytes = max_bytes
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite
        self._spawn_note = SpawnNote()

    def __iter__(self) -> Iterator[Any]:
        check_workers(self)
        form = f"load_{self.record_format}_shards"
        ask, got = self.asked(), False
        for item in self.source_datapipe:
            got = True
            try:
                source = as_source(item, self.storage_options, form=form, slices=False)
                shard = storage.mask_url(source.url)
                if source.strict:
                    raise ShardListError(
                        f"{form} got a slice of shard {shard}, and reads whole shards only: .split_shards() counts the "
                        "samples of tar shards; divide others by .sharding_filter()",
                        shard=shard,
                    )
                with closing(source.open_at()) as stream:
                    yield from read_records(stream, shard, self.record_format, max_bytes=self.max_bytes)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if not ask(error):
                    return
        wait_for_copies()
        warn_of_lone_reader(self)
        if not got:
            warn_when_idle(self)


@register("load_cbor_shards")
class CborShardLoaderIterDataPipe(RecordLoader):
    """Loads shards of concatenated CBOR items into their records (functional name: ``load_cbor_shards``).

    Shards are opened like tar shards and read front to back, with one record in memory. A damaged shard yields the
    records before the damage. The format has no end marker: a shard cut off between two records looks complete, unless
    its server states its length or its compression has a checksum. Records are yielded unchanged; a dict with a
    ``__key__`` is a sample for later stages. Decoding never runs code. Dates, decimals, sets and other types that CBOR
    has tags for become Python's.

    Args:
        source_datapipe: Yields URLs (str or Path), `CachedShard` of ``cache_shards``, or ``(url, stream)`` pairs.
        max_bytes: The largest record that is read, in bytes.
        storage_options, rewrite: As in ``list_shards``, for reading.
        handler: Called for each item that is not a whole shard (ShardListError), and each shard that cannot be opened
            (ShardOpenError) or fully read (ShardFormatError).

    Yields:
        The records, usually dicts.

    Raises:
        ShardOpenError: through the handler, if a shard cannot be opened or its source fails; past it, if the package
            cbor2 is not installed.
        ShardFormatError: through the handler, if a record is cut off, damaged or too large.
        ShardListError: through the handler, for an item that is not a whole shard.

    Example:
        >>> import cbor2, io
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> shard = io.BytesIO(cbor2.dumps({"__key__": "a", "cls": 1}) + cbor2.dumps({"__key__": "b", "cls": 2}))
        >>> list(IterableWrapper([("x.cbor", shard)]).load_cbor_shards())
        [{'__key__': 'a', 'cls': 1}, {'__key__': 'b', 'cls': 2}]
    """

    record_format = "cbor"


@register("load_msgpack_shards")
class MsgpackShardLoaderIterDataPipe(RecordLoader):
    """Loads shards of concatenated MessagePack values into their records (functional name: ``load_msgpack_shards``).

    Works like ``load_cbor_shards`` and raises the same errors. Strings become str, maps may have keys of any type, and
    extension types stay ``msgpack.ExtType``.

    Args:
        source_datapipe: Yields shards, as for ``load_cbor_shards``, whose options also apply here.

    Yields:
        The records, usually dicts.

    Example:
        >>> import io, msgpack
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("x.msgpack", io.BytesIO(msgpack.packb({"cls": 1})))]).load_msgpack_shards())
        [{'cls': 1}]
    """

    record_format = "msgpack"
