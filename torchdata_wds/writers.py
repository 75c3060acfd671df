"""Writes samples into tar archives and numbered shards."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, BinaryIO, Never, Self, TypedDict, Unpack

from torchdata_wds.checks import check_flags, checked_int
from torchdata_wds.codecs import Encoder, EncoderLike
from torchdata_wds.consumers import process_place, rank_place
from torchdata_wds.errors import SampleError
from torchdata_wds.format.index import index_url
from torchdata_wds.format.shards import Destination, ShardFile, ShardInfo, ShardNames, archive_size
from torchdata_wds.format.tar.packing import PackedSample, SamplePacker
from torchdata_wds.option_types import StartShard
from torchdata_wds.storage import StorageOptions, Unique, compression_for, mask_url, open_compressor

logger = logging.getLogger(__name__)


class TarOptions(TypedDict, total=False):
    """The options of `TarWriter`, for functions that pass them on."""

    encoder: EncoderLike
    compress: str | bool | None
    mtime: float
    user: str
    group: str
    mode: int
    lowercase: bool
    index: bool
    jpeg_quality: int
    png_compression: int
    storage_options: Mapping[str, Mapping[str, Any]] | None


_FILE_OPTIONS = ("compress", "index", "storage_options")
_ENCODER_OPTIONS = ("encoder", "jpeg_quality", "png_compression")

#: Options of webdataset's writers and of other programs, and what to use instead.
_ELSEWHERE = {
    "compression": "write compress='gz', or let the shard's name end in .gz.",
    "format": "headers are USTAR, and PAX where a name or size needs it.",
    "keep_meta": "names like __x__ are the library's own and are not written.",
    **dict.fromkeys(("max_samples", "maxcount"), "did you mean 'max_count'?"),
    **dict.fromkeys(("max_size", "maxsize", "maxbytes"), "did you mean 'max_bytes'?"),
    "maxshards": "did you mean 'max_shards'?",
    "verbose": "each shard is logged at the level INFO by the logger torchdata_wds.",
}


def check_options(options: Mapping[str, Any], *others: str) -> None:
    """Raises TypeError for an option that neither `TarWriter` nor `others` has, and suggests the nearest one."""
    known = [*TarOptions.__annotations__, *others]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = _ELSEWHERE.get(name, f"did you mean {nearest[0]!r}?" if nearest else "")
            if "'max_" in hint and "max_bytes" not in known:
                hint = "only a ShardWriter has limits."
            raise TypeError(f"unknown option {name!r}: {hint}{' ' if hint else ''}The options are {', '.join(known)}")


class SampleWriter(Unique):
    """Base of both writers: their options, how a sample is written, and how ``with`` ends."""

    close: Callable[[], None]
    abort: Callable[[], None]
    shard_for: Callable[[PackedSample], ShardFile | None]  # where a packed sample goes; None if all are full

    def __init__(self, options: TarOptions, others: str, *, overwrite: bool) -> None:
        check_options(options, *others.split())
        check_flags(overwrite=overwrite, index=options.get("index", False), lowercase=options.get("lowercase", True))
        headers: dict[str, Any] = dict(options)
        encoding = {name: headers.pop(name) for name in _ENCODER_OPTIONS if name in headers}
        self._file_options = {name: headers.pop(name) for name in _FILE_OPTIONS if name in headers}
        self._file_options["overwrite"] = overwrite
        self._file_options["storage_options"] = StorageOptions(options.get("storage_options"))
        encode = Encoder(**encoding)
        self._encode = None if encoding.get("encoder") is False else encode  # the packer checks for bytes
        self._pack = SamplePacker(**headers).pack
        self._lock = threading.RLock()
        self._closed = False

    def pack(self, sample: Mapping[str, Any]) -> PackedSample:
        """Encodes a sample into its bytes in an archive."""
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise SampleError(f"a sample is a dict of __key__ and values by field, not a {type(sample).__name__}")
        return self._pack(sample if self._encode is None else self._encode(sample))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the writer is closed; open another one")

    def write(self, sample: Mapping[str, Any]) -> int:
        """Adds a sample, whole or not at all; returns its bytes in the archive before compression, 0 if not written.

        A sample has ``__key__`` and values by field; other names like ``__url__`` are not written. Once `max_shards`
        shards are full, a `ShardWriter` writes nothing.

        Raises:
            SampleError: if the sample could not be read back: MissingFieldError, ReappearingKeyError, or EncodingError.
            ShardOpenError: if the destination fails, or a shard exists.
            ValueError: if the writer is closed.
        """
        self._check_open()
        packed = self.pack(sample)  # outside the lock, so that threads encode in parallel
        with self._lock:
            self._check_open()
            shard = self.shard_for(packed)
            if shard is None:
                return 0
            shard.append(packed)
        return packed.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class TarWriter(SampleWriter):
    """Writes samples into one tar archive.

    Equal samples make equal bytes. A path (or a URL of a store) gets its new content on `close`, all at once: after an
    exception inside ``with``, or if the process is killed, the old content stays, and beside a local path the
    unfinished ``.partial``. An open file is written continuously, and has no end marker after an exception. A symbolic
    link is replaced, not followed.

    Args:
        file: A local path, ``-`` (standard output), ``pipe:command``, a URL that fsspec can write, or an open binary
            file, which is not closed.
        overwrite: Whether to replace what exists; otherwise it is an error.
        encoder: What encodes the fields, as in ``wds_encode``: True by extension, an image spec, a dict of functions by
            field or extension, or a callable that returns a dict of bytes. False accepts only bytes.
        compress: ``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"``, False for none; None goes by the suffix of the path.
        mtime, user, group, mode: For all members: seconds since 1970, names of owner and group, permissions.
        lowercase: Whether fields must be in lower case, as they are read by default.
        index: Whether to write an index beside the shard, as ``<shard>.index``.
        jpeg_quality, png_compression: Quality of JPEG fields encoded here, 1 to 100; effort for PNG, 0 to 9.
        storage_options: Options by protocol, such as ``{"s3": {"profile": "me"}}``.

    Raises:
        TypeError, ValueError: if an argument is wrong or unknown.
        ShardOpenError: if the file cannot be written, or exists and `overwrite` is False.

    Example:
        >>> import pathlib, tempfile, torchdata_wds
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> with TarWriter(path) as writer:
        ...     writer.write({"__key__": "a", "txt": "one", "cls": 1})
        2048
        >>> [sample["txt"] for sample in torchdata_wds.WebDataset(path, decoder=[])]
        ['one']
    """

    def __init__(
        self,
        file: Destination,
        *,
        overwrite: bool = True,
        encoder: EncoderLike = True,
        compress: str | bool | None = None,
        mtime: float = 0,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        lowercase: bool = True,
        index: bool = False,
        jpeg_quality: int = 95,
        png_compression: int = 6,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()
        options: Any = {name: given[name] for name in TarOptions.__annotations__} | unknown
        super().__init__(options, "overwrite", overwrite=overwrite)
        self._shard = ShardFile(file, digest=False, **self._file_options)

    def shard_for(self, _: PackedSample) -> ShardFile:
        """Returns the one shard."""
        return self._shard

    def close(self) -> None:
        """Completes the archive and puts it in place, or raises ShardOpenError if it is incomplete; idempotent."""
        if not self._closed:
            with self._lock:
                self._shard.close()
            self._closed = True

    def abort(self) -> None:
        """Abandons the archive, and keeps what existed before; does nothing after `close`."""
        if not self._closed:
            self._closed = True
            self._shard.abort()


class ShardWriter(SampleWriter):
    """Writes samples into numbered shards of limited size.

    A shard gets its name when it is complete: an exception inside ``with``, or a killed process, leaves the finished
    shards and one ``.partial``, for which `post` is not called. Nothing is created before the first sample.

    Args:
        pattern: Path or URL with ``%06d`` or ``{shard:06d}`` for the number. ``{rank}`` is the rank of this process,
            and ``{worker}`` its number among all workers of all ranks.
        max_count: The most samples in a shard.
        max_bytes: The most bytes in a shard before compression, with headers and the end marker, which pads it to a
            multiple of 10,240. A larger sample gets its own shard, and a warning.
        start_shard: Number of the first shard, or ``"next"`` to continue after the highest number that exists.
        max_shards: The most shards: once they are full, `write` writes no more samples. None means no limit.
        post: Called with the `ShardInfo` of each finished shard.
        overwrite: Whether to replace shards that exist; otherwise they are an error.
        opener: ``callable(name)`` that opens a binary file for each shard. The file is closed when the shard is
            complete, or without an end marker after an exception.
        **options: Those of `TarWriter`, from ``encoder`` on.

    Attributes:
        shards: The `ShardInfo` of each finished shard.

    Example:
        >>> import pathlib, tempfile
        >>> with ShardWriter(tempfile.mkdtemp() + "/x-%06d.tar", max_count=2) as writer:
        ...     for number in range(5):
        ...         _ = writer.write({"__key__": f"{number:06d}", "cls": number})
        >>> [(pathlib.Path(shard.path).name, shard.count) for shard in writer.shards]
        [('x-000000.tar', 2), ('x-000001.tar', 2), ('x-000002.tar', 1)]
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str] | ShardNames,
        *,
        max_count: int = 100_000,
        max_bytes: float = 3e9,
        start_shard: StartShard = 0,
        max_shards: int | None = None,
        post: Callable[[ShardInfo], Any] | None = None,
        overwrite: bool = False,
        opener: Callable[[str], BinaryIO] | None = None,
        **options: Unpack[TarOptions],
    ) -> None:
        own = "max_count max_bytes start_shard max_shards post overwrite opener"
        super().__init__(options, own, overwrite=overwrite)
        for name, function in (("post", post), ("opener", opener)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {function!r}")
        limit: Any = max_bytes  # to mypy a float is not a Real
        if isinstance(limit, bool) or not isinstance(limit, Real):
            raise TypeError(f"max_bytes must be a number, not {max_bytes!r}")
        if not max_bytes >= 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes!r}")
        if not isinstance(pattern, ShardNames):
            pattern = ShardNames(pattern, rank=rank_place().number, worker=process_place().number)
        if start_shard == "next":
            pattern.check_listable()
        elif isinstance(start_shard, str):
            raise ValueError(f"start_shard must be a number or 'next', not {start_shard!r}")
        else:
            start_shard = checked_int("start_shard (if it is not 'next')", start_shard, 0)
        self.start_shard = start_shard
        self.max_count = checked_int("max_count", max_count, 1)
        self.max_bytes = max_bytes
        self.max_shards = None if max_shards is None else checked_int("max_shards", max_shards, 1)
        self.post, self.opener = post, opener
        self.shards: list[ShardInfo] = []
        # errors that concern all shards are raised before the first one is opened
        if (kind := compression_for(pattern.name(0), options.get("compress"))) is not None:
            open_compressor(kind)
        if options.get("index"):
            if opener is not None:
                raise ValueError("index=True needs a path or a URL: there is no place beside what an opener opens")
            index_url(pattern.name(0))
        self._names = pattern
        self._numbers: Iterator[int] | None = None
        self._number = 0
        self._shard: ShardFile | None = None
        self._file: BinaryIO | None = None

    @property
    def is_full(self) -> bool:
        """Whether all of `max_shards` are known to be full, so that no more samples are needed."""
        return self._is_last and (self._shard is None or self._shard.count >= self.max_count)

    @property
    def _is_last(self) -> bool:
        """Whether the open shard, or else the one closed last, is the last that `max_shards` allows."""
        return self.max_shards is not None and len(self.shards) + (self._shard is not None) >= self.max_shards

    def shard_for(self, packed: PackedSample) -> ShardFile | None:
        """Returns the shard that a packed sample goes into: the open one, or a new one; None if all are full."""
        if self._shard is not None and not self._has_room(self._shard, packed):
            self._finish()
        if self._shard is None and not self._is_last:
            self._shard = self._open(packed)
        return self._shard

    def close(self) -> None:
        """Finishes the last shard, as `TarWriter.close` does; idempotent."""
        self._closed = True
        with self._lock:
            self._finish()

    def abort(self) -> None:
        """Abandons the open shard, left as ``.partial``; keeps finished ones."""
        self._closed = True
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        with contextlib.suppress(Exception):
            self._close_file()

    def _has_room(self, shard: ShardFile, packed: PackedSample) -> bool:
        # With max_bytes=10_240, 9,216 bytes fit, with 1,024 of end marker; one more block makes the archive 20,480.
        return bool(shard.count < self.max_count and archive_size(shard.size + packed.size) <= self.max_bytes)

    def _open(self, packed: PackedSample) -> ShardFile:
        if (size := archive_size(packed.size)) > self.max_bytes:
            sizes = f"{size:,} bytes, more than the size limit of {self.max_bytes:,.0f}"
            logger.warning("sample %r alone makes a shard of %s", packed.key, sizes)
        if self._numbers is None:
            self._numbers = self._names.numbers(self.start_shard, self._file_options.get("storage_options"))
            self._number = next(self._numbers)
        name = self._names.name(self._number)
        destination: Any = name
        if self.opener is not None:
            destination = self.opener(name)
            if not callable(getattr(destination, "write", None)):
                raise TypeError(f"opener must return a binary file, not {destination!r}")
            self._file = destination
        try:
            shard = ShardFile(destination, name=name, **self._file_options)
        except BaseException:
            self._close_file()
            raise
        # only now, so that no number is left out if the shard cannot be opened
        self._number = next(self._numbers)
        logger.info("writing shard %s", mask_url(name))
        return shard

    def _finish(self) -> None:
        if self._shard is None:
            return
        # open until complete, so that closing it again after an error raises again
        info = self._shard.close()
        self._shard = None
        self.shards.append(info)
        self._close_file()
        if self.post is not None:
            self.post(info)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
