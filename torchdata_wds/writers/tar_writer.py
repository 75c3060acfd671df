"""Samples to one tar archive, and what all writers share."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Never, Self, TypedDict

from torchdata_wds.checks import check_flags
from torchdata_wds.codecs import Encoder, EncoderLike
from torchdata_wds.errors import SampleError
from torchdata_wds.format.shards import Destination, ShardFile
from torchdata_wds.format.tar.packing import PackedSample, SamplePacker
from torchdata_wds.storage import StorageOptions, Unique


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
        self._packer = SamplePacker(**headers)
        self._lock = threading.RLock()
        self._closed = False

    def pack(self, sample: Mapping[str, Any]) -> PackedSample:
        """Encodes a sample into its bytes in an archive."""
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise SampleError(f"a sample is a dict of __key__ and values by field, not a {type(sample).__name__}")
        return self._packer.pack(sample if self._encode is None else self._encode(sample))

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
        index: Whether to write an index of the shard, as ``.wds-index/<name>.index`` beside it.
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
