"""Caches samples in a local file, which the first pass writes and later passes read."""

import inspect
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds import handlers
from torchdata_wds.checks import check_flags, is_count
from torchdata_wds.codecs.stored import StoredValue, decode_value, encode_value
from torchdata_wds.consumers import divided_place, place_of, upstream
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import CacheError, DecodingError, EncodingError, UnsafeDataError, WdsError
from torchdata_wds.handlers import Handler, keep_going, reraise_exception, warn_once
from torchdata_wds.pipes.base import Pipe, register
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.foreign_loaders import heed_dealer
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.list_shards import ShardResamplerIterDataPipe
from torchdata_wds.pipes.streams.epoch import EpochCounterIterDataPipe
from torchdata_wds.process_place import Place, process_place
from torchdata_wds.storage.cache.sample_file import SampleReader, SampleWriter, open_or_begin, open_samples
from torchdata_wds.storage.urls import mask_url, scheme_of

T = TypeVar("T")


@register("cache_samples")
class SampleCacherIterDataPipe(HandlingPipe[T]):
    """Keeps samples in a SQLite file, and serves them from it (functional name: ``cache_samples``).

    The first pass writes the samples that it yields; later passes and runs read the complete file, and do not run the
    stages above. No file remains after a pass that ends early, fails or is empty, or in which a stage above skipped a
    shard that could not be opened, or may have ended the stream at an error. While another process writes the file,
    samples pass through. Consumers that divide the work each have their own file, such as ``cache-00001-of-00004.db``
    for ``cache.db``.

    The file does not record the stages above: delete it when they or the shards change. Every pass that writes uses the
    same order, whatever the seed: shuffle and augment after this stage. An endless stream needs `max_samples`; put
    ``wds_epoch`` after this stage. Samples read back equal, with the exceptions in `torchdata_wds.codecs.stored`.

    Args:
        file: A local file; its folder is created. None turns the stage off.
        max_samples: How many samples each consumer yields per epoch, the first of its pass; None keeps all.
        allow_pickle: Whether to pickle values other than None, bool, numbers, str, bytes, lists, tuples, dicts, sets,
            NumPy arrays, tensors and PIL images. Reading such a file needs it too, and can run any code.
        handler: Called for each EncodingError and DecodingError. If it ends the pass, no file remains.

    Yields:
        The same samples.

    Raises:
        ValueError: if ``wds_epoch`` or a stage of the main process comes before this stage.
        CacheError: if the file is damaged, not a sample cache, too short, or cannot be created.
        UnsafeDataError: if the file holds pickles, without `allow_pickle` or under ``WDS_SECURE=1``.

    Example:
        >>> import pathlib, tempfile
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> file = pathlib.Path(tempfile.mkdtemp(), "cache.db")
        >>> list(IterableWrapper([1, 2]).cache_samples(file)), list(IterableWrapper([]).cache_samples(file))
        ([1, 2], [1, 2])
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        file: str | os.PathLike[str] | None,
        *,
        max_samples: int | None = None,
        allow_pickle: bool = False,
        handler: Handler = reraise_exception,
    ) -> None:
        if max_samples is not None and not is_count(max_samples, 1):
            raise ValueError(f"max_samples must be a whole number of samples from 1, or None, not {max_samples!r}")
        check_flags(allow_pickle=allow_pickle)
        super().__init__(source_datapipe, handler)
        self.file = _checked(file)
        if self.file is not None:
            _check_above(source_datapipe)
        self.max_samples, self.allow_pickle = max_samples, allow_pickle

    def __iter__(self) -> Iterator[T]:
        if self.file is None:
            yield from self.source_datapipe
            return
        heed_dealer(self)
        reader, writer = open_or_begin(path := self._path(self.file))
        if reader is not None:
            yield from self._serve(reader)
        elif writer is not None:
            yield from self._fill(writer)
        else:
            self._fix_order()
            warn_once(
                f"cache_samples busy {path}",
                f"the sample cache {path} is being written by another process or iteration: samples pass through here",
            )
            yield from islice(self.source_datapipe, self.max_samples)

    def __len__(self) -> int:
        """Returns how many samples an epoch has, from the finished file or the source."""
        if self.file is None:
            return len(self.source_datapipe)
        try:
            if (reader := open_samples(self._path(self.file))) is not None:
                with reader:
                    return self._checked_count(reader)
        except WdsError as error:
            raise TypeError(f"the length of cache_samples is not known: {error}") from error
        length = self.source_length()
        return length if self.max_samples is None else min(length, self.max_samples)

    def _path(self, file: str) -> Path:
        return part_name(file, divided_place(self) or process_place())

    def _fill(self, writer: SampleWriter) -> Iterator[T]:
        """Yields the samples of the source, and writes them."""
        count, is_kept, pickles = 0, True, False
        try:
            self._fix_order()
            self._warn_of_no_end()
            failed_before = self._failures()
            for sample in self.source_datapipe:
                try:
                    data, is_pickled = self._encode(sample, writer)
                except Exception as error:  # noqa: BLE001  (the handler decides)
                    if not keep_going(self.handler, error, self.skipped):
                        return
                    continue
                count += 1
                pickles |= is_pickled
                is_last = count == self.max_samples
                if is_kept:
                    try:
                        writer.append(data)
                    except CacheError as error:
                        writer.abort()
                        is_kept = False
                        warn_once(f"cache_samples full {writer.path}", f"{error}. Samples pass through meanwhile")
                if is_last and is_kept:
                    # Before the last sample goes out: a consumer that stops there never resumes this generator.
                    self._finish(writer, failed_before, ended=False, pickles=pickles)
                yield sample
                if is_last:
                    return
            if is_kept and count:
                self._finish(writer, failed_before, ended=True, pickles=pickles)
        finally:
            writer.abort()

    def _warn_of_no_end(self) -> None:
        is_endless = any(isinstance(pipe, ShardResamplerIterDataPipe) and pipe.n is None for pipe in upstream(self))
        if self.max_samples is None and is_endless:
            warn_once(
                f"cache_samples endless {self.file}",
                f"the sample cache {self.file} is written after resample_shards() without n: unless a stage between "
                "them ends the stream, it grows until the disk is full, and is never complete. Pass max_samples=, or "
                "use resample_shards(n)",
            )

    def _encode(self, sample: T, writer: SampleWriter) -> StoredValue:
        try:
            stored = encode_value(sample, allow_pickle=self.allow_pickle)
            if len(stored.data) > writer.max_bytes:
                raise ValueError(f"it takes {len(stored.data):,} bytes, and SQLite holds {writer.max_bytes:,} at most")
            return stored
        except (ValueError, UnsafeDataError) as error:
            key = str(sample.get("__key__", "?")) if isinstance(sample, dict) else "?"
            kind = UnsafeDataError if isinstance(error, UnsafeDataError) else EncodingError
            raise kind(f"cache_samples cannot store sample {key!r}: {error}", key=key) from error.__cause__

    def _finish(self, writer: SampleWriter, failed_before: int, *, ended: bool, pickles: bool) -> None:
        """Completes the file, unless it may lack samples that the next pass would find."""
        if failed := self._failures() - failed_before:
            warn_once(
                f"cache_samples lost {writer.path}",
                f"the sample cache {writer.path} is not kept: stages above have skipped {failed} shards that could not "
                "be opened or read, or may have ended the stream at an error, and samples would be missing forever. "
                "The next pass writes it again",
            )
            return
        try:
            writer.finish(ended=ended, pickles=pickles, shares=place_of(self).consumers)
        except CacheError as error:
            warn_once(f"cache_samples full {writer.path}", f"{error}. The next pass writes it again")

    def _failures(self) -> int:
        """Counts failures of stages above that may not recur, or may have ended the stream."""
        count = 0
        for pipe in upstream(self.source_datapipe):
            # If the handler continued, damaged samples are missing from every pass: the file may lack them too. A shard
            # that could not be opened may be readable in the next pass. Another handler may have ended the stream.
            skipped, handler = vars(pipe).get("skipped"), vars(pipe).get("handler")
            if isinstance(skipped, Counter):
                continues = handler in (handlers.warn_and_continue, handlers.ignore_and_continue)
                ends = ("ShardOpenError",) if continues else ("Error", "Exception")
                count += sum(times for name, times in skipped.items() if name.endswith(ends))
        return count

    def _serve(self, reader: SampleReader) -> Iterator[T]:
        """Yields the samples of a finished file."""
        with reader:
            self._checked_count(reader)
            for number, data in enumerate(reader.rows(self.max_samples)):
                try:
                    sample = decode_value(data, allow_pickle=self.allow_pickle)
                except ValueError as error:
                    failure = DecodingError(
                        f"sample {number:,} of the sample cache {reader.path} cannot be read back: {error}. Delete the "
                        "file, and the next pass makes it again"
                    )
                    failure.__cause__ = error.__cause__
                    if not keep_going(self.handler, failure, self.skipped):
                        return
                else:
                    yield sample

    def _checked_count(self, reader: SampleReader) -> int:
        """Returns how many samples to read; raises if the file lacks some, or holds pickles that are not allowed."""
        samples, ended, pickles, shares = reader.facts
        found, wanted = place_of(self).consumers, self.max_samples
        if shares != found:
            raise CacheError(
                f"the sample cache {reader.path} is one of {shares} that share the samples, but the stages above now "
                f"divide the work among {found}, as with another .sharding_filter(): delete it and those next to it, "
                "and they are made again"
            )
        if pickles and (not self.allow_pickle or is_secure()):
            reason = "WDS_SECURE=1 refuses them" if self.allow_pickle else "allow_pickle=True was not given"
            raise UnsafeDataError(
                f"the sample cache {reader.path} holds pickles, which can run any code while they are loaded, and "
                f"{reason}. If you trust its origin, allow them; otherwise delete the file, and it is made again"
            )
        if not ended and (wanted is None or wanted > samples):
            raise CacheError(
                f"the sample cache {reader.path} has only the first {samples:,} samples, and "
                f"{'all' if wanted is None else f'{wanted:,}'} are wanted: pass max_samples={samples}, or delete it, "
                "and it is made again"
            )
        return samples if wanted is None else min(samples, wanted)

    def _fix_order(self) -> None:
        """Gives all passes over the source the same order, so that files written in different passes fit together."""
        # Two consumers may write their files in different passes. If the shards were shuffled anew in between, some
        # samples would be in both files and some in neither.
        random = (pipe for pipe in upstream(self) if inspect.ismethod(getattr(pipe, "set_seed", None)))
        for number, pipe in enumerate(random):
            pipe.set_seed(mix("cache_samples", number))


def part_name(file: str | os.PathLike[str], place: Place) -> Path:
    """Returns the file of one consumer: cache.db, or cache-00001-of-00004.db for the second of four."""
    path = Path(os.path.expanduser(file)).absolute()  # noqa: PTH111 - leaves unknown users alone
    if place.consumers == 1:
        return path
    return path.with_name(f"{path.stem}-{place.number:05d}-of-{place.consumers:05d}{path.suffix}")


def _checked(file: object) -> str | None:
    text = os.fspath(file) if isinstance(file, (str, os.PathLike)) else file
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"file must be the path of a local file, or None for no cache, not {file!r}")
    if not Path(text).name or text.endswith("/") or scheme_of(text):
        raise ValueError(f"file must be the path of a local file, or None for no cache, not {mask_url(text)!r}")
    return text


def _check_above(source: Pipe) -> None:
    """Refuses stages above that yield other samples in each pass, or whose failures this stage cannot see."""
    for pipe in upstream(source):
        if isinstance(pipe, EpochCounterIterDataPipe):
            reason = "whose stream continues from epoch to epoch, and would repeat its first epoch forever"
        elif hasattr(pipe, "is_replicable") and not pipe.is_replicable():
            reason = "in the main process, where it can neither see whether workers skipped shards, nor set their order"
        else:
            continue
        raise ValueError(f"cache_samples comes after {short_name(pipe)}, {reason}: put it before")
