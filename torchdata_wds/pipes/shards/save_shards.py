"""Samples to shards, as the last stage of a graph."""

import os
from collections.abc import Callable, Iterator
from typing import Any, Unpack

from torchdata_wds.consumers import divided_place, in_stock_worker
from torchdata_wds.errors import ReappearingKeyError
from torchdata_wds.format.shards import ShardInfo, ShardNames
from torchdata_wds.handlers import Handler, keep_going, reraise_exception
from torchdata_wds.option_types import StartShard
from torchdata_wds.pipes.base import Held, Pipe, register
from torchdata_wds.pipes.notes import note_failure
from torchdata_wds.pipes.samples.field_specs import expect_sample
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.process_place import Place, process_place, rank_place
from torchdata_wds.storage import StorageOptions
from torchdata_wds.writers.shard_writer import ShardWriter
from torchdata_wds.writers.tar_writer import TarOptions, check_options


@register("save_wds_shards")
class ShardSaverIterDataPipe(HandlingPipe[ShardInfo]):
    """Saves samples into numbered shards (functional name: ``save_wds_shards``).

    Each epoch writes the whole stream. A shard gets its name when it is complete; a break or an exception leaves the
    open one as ``.partial``. Each worker of each rank writes its own shards: with 4 workers, worker 1 writes shards 1,
    5, 9 and so on, unless ``{worker}`` in the pattern tells them apart.

    Args:
        pattern: Path or URL with ``%06d`` or ``{shard:06d}`` for the number. ``{rank}`` is the rank of this process,
            and ``{worker}`` its number among all workers of all ranks.
        max_count: The most samples in a shard.
        max_bytes: The most bytes in a shard before compression, with headers and end marker.
        start_shard: Number of the first shard, or ``"next"`` to continue after the highest number that exists.
        post: Called with the `ShardInfo` of each finished shard, in the process that wrote it.
        overwrite: Whether to replace shards that exist; otherwise they are an error.
        handler: Called for each SampleError (MissingFieldError, ReappearingKeyError, EncodingError). Errors of the
            destination are raised: ShardOpenError if a shard cannot be written, or exists.
        **options: Those of `TarWriter`: ``encoder``, ``compress``, ``index``, ``storage_options`` and so on.

    Yields:
        ShardInfo: ``path``, ``count`` of samples, ``bytes`` and ``sha256`` of each finished shard.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option is not valid.
        SampleError: through the handler: MissingFieldError, ReappearingKeyError, EncodingError.
        ShardOpenError: if a shard cannot be written, or exists.

    Example:
        >>> import tempfile
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": f"{number:06d}", "cls": number} for number in range(5)])
        >>> [shard.count for shard in samples.save_wds_shards(tempfile.mkdtemp() + "/x-%06d.tar", max_count=3)]
        [3, 2]
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        pattern: str | os.PathLike[str],
        *,
        max_count: int = 100_000,
        max_bytes: float = 3e9,
        start_shard: StartShard = 0,
        post: Callable[[ShardInfo], Any] | None = None,
        overwrite: bool = False,
        handler: Handler = reraise_exception,
        **options: Unpack[TarOptions],
    ) -> None:
        check_options(options, "max_count", "max_bytes", "start_shard", "post", "overwrite", "handler")
        super().__init__(source_datapipe, handler)
        self.pattern = os.fspath(pattern) if isinstance(pattern, os.PathLike) else pattern
        self.max_count, self.max_bytes, self.start_shard = max_count, max_bytes, start_shard
        self.post, self.overwrite = post, overwrite
        options["storage_options"] = StorageOptions(options.get("storage_options"))
        self.options = Held(options)
        self._writer(Place())  # checks the options

    def __iter__(self) -> Iterator[ShardInfo]:
        # This writer's number among all writers: by the sharding of the graph, or else by process.
        place = divided_place(self)
        if place is None and in_stock_worker():
            raise ValueError(
                "save_wds_shards cannot tell the workers of torchdata's MultiProcessingReadingService apart without "
                ".sharding_filter() before it, and each would write the same shards; put one after the list of shards"
            )
        reported = 0
        with self._writer(place or process_place()) as writer:
            for sample in self.source_datapipe:
                if not self._save(sample, writer):
                    break
                while reported < len(writer.shards):
                    reported += 1
                    yield writer.shards[reported - 1]
        yield from writer.shards[reported:]

    def _save(self, sample: Any, writer: ShardWriter) -> bool:
        """Writes one sample or calls the handler; errors of the destination are raised. Returns whether to go on."""
        try:
            packed = writer.pack(expect_sample(sample, "save_wds_shards"))
        except Exception as error:  # noqa: BLE001  (the handler decides)
            note_failure(error, self, sample)
            return keep_going(self.handler, error, self.skipped)
        # May finish a full shard and call post, whose errors are raised: they are not the sample's fault.
        shard = writer.shard_for(packed)
        try:
            if shard is not None:  # there is no limit of shards here
                shard.append(packed)
        except ReappearingKeyError as error:
            return keep_going(self.handler, error, self.skipped)
        return True

    def _writer(self, place: Place) -> ShardWriter:
        is_named = isinstance(self.pattern, str) and "{worker" in self.pattern
        own = {"worker": place.number} if is_named else {"writers": place.consumers, "turn": place.number}
        return ShardWriter(
            ShardNames(self.pattern, rank=rank_place().number, **own),
            max_count=self.max_count,
            max_bytes=self.max_bytes,
            start_shard=self.start_shard,
            post=self.post,
            overwrite=self.overwrite,
            **self.options.value,
        )
