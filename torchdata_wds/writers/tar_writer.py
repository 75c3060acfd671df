"""One tar archive of samples."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from typing import Any, Self, TypedDict, Unpack

from torchdata_wds.checks import check_flags
from torchdata_wds.codecs import Encoder, EncoderLike
from torchdata_wds.errors import SampleError
from torchdata_wds.format.shards import Destination, ShardFile
from torchdata_wds.format.tar.packing import PackedSample, SamplePacker
from torchdata_wds.storage import StorageOptions, Unique


class TarOptions(TypedDict, total=False):
    """The options that `TarWriter` describes, for functions that pass them on."""

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

#: Options of webdataset's writers, and what other programs call them.
_ELSEWHERE = {
    "compression": "write compress='gz', or let the shard's name end in .gz.",
    "format": "headers are USTAR, and PAX where a name or size needs it.",
    "keep_meta": "names like __x__ are the library's own and are not written.",
    "max_samples": "did you mean 'max_count'?",
    "max_size": "did you mean 'max_bytes'?",
    "maxbytes": "did you mean 'max_bytes'?",
    "maxcount": "did you mean 'max_count'?",
    "maxsize": "did you mean 'max_bytes'?",
    "maxshards": "did you mean 'max_shards'?",
    "verbose": "each shard is logged at the level INFO by the logger torchdata_wds.",
}


def check_options(options: Mapping[str, Any], *others: str) -> None:
    """Raises a TypeError for an option that is not one of `TarWriter` or `others`, and names the nearest that is."""
    known = [*TarOptions.__annotations__, *others]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = _ELSEWHERE.get(name, f"did you mean {nearest[0]!r}?" if nearest else "")
            if "'max_" in hint and "max_bytes" not in known:
                hint = "ShardWriter has limits, one archive has none."
            raise TypeError(f"unknown option {name!r}: {hint}{' ' if hint else ''}The options are {', '.join(known)}")


class SampleWriter(Unique):
    """What both writers share: their options, how a sample is written, and how ``with`` ends."""

    def __init__(self, options: TarOptions, others: str, *, overwrite: bool) -> None:
        check_options(options, *others.split())
        check_flags(overwrite=overwrite, index=options.get("index", False), lowercase=options.get("lowercase", True))
        headers: dict[str, Any] = dict(options)
        encoding = {name: headers.pop(name) for name in _ENCODER_OPTIONS if name in headers}
        self._file_options = {name: headers.pop(name) for name in _FILE_OPTIONS if name in headers}
        self._file_options["overwrite"] = overwrite
        self._file_options["storage_options"] = StorageOptions(options.get("storage_options"))
        encode = Encoder(**encoding)
        self._encode = None if encoding.get("encoder") is False else encode  # the packer takes bytes only, and says so
        self._pack = SamplePacker(**headers).pack
        self._lock = threading.RLock()
        self._closed = False

    def pack(self, sample: Mapping[str, Any]) -> PackedSample:
        """Turns a sample into its bytes in an archive."""
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise SampleError(f"a sample is a dict of __key__ and values by field, not a {type(sample).__name__}")
        return self._pack(sample if self._encode is None else self._encode(sample))

    def write(self, sample: Mapping[str, Any]) -> int:
        """Adds a sample, whole or not at all; returns the bytes that it takes in the archive, before compression.

        It has ``__key__`` and values by field; names like ``__url__`` are not written. A `ShardWriter` returns 0 where
        it is not written, because `max_shards` shards are full.

        Raises:
            SampleError: if it could not be read back: MissingFieldError, ReappearingKeyError, or EncodingError.
            ShardOpenError: if the destination fails, or a shard exists.
            ValueError: if the writer is closed.
        """
        packed = self.pack(sample)  # outside the lock: threads encode at the same time
        with self._lock:
            if self._closed:
                raise ValueError("the writer is closed; open another one")
            shard = self.shard_for(packed)
            if shard is None:
                return 0
            shard.append(packed)
        return packed.size

    def shard_for(self, packed: PackedSample) -> ShardFile | None:
        """Returns the shard that a packed sample goes into; None if all are full."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def close(self) -> None:
        """Finishes what is open."""
        raise NotImplementedError

    def abort(self) -> None:
        """Abandons what is open."""
        raise NotImplementedError


class TarWriter(SampleWriter):
    """Writes samples into one tar archive.

    The same samples give the same bytes. A path (or a URL of a store) gets its new content on `close`, all at once:
    an exception inside ``with``, or a process that is killed, leaves what was there before, and beside a local path
    the unfinished ``.partial``. An open file is written as it comes, without an end marker after an exception. A
    symbolic link is replaced, not followed.

    Args:
        file: A local path, ``-`` (standard output), ``pipe:command``, a URL that fsspec can write, or an open binary
            file, which is not closed.
        overwrite: Whether what exists is replaced; otherwise it is an error.
        encoder: True encodes each field by its extension. False takes bytes only. A str is an image spec: with
            ``"torchrgb8"`` and the like tensors of images are CHW. A dict has functions for fields or extensions, tried
            before the table. A callable gets the sample and returns a dict of bytes.
        compress: ``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"``, False for none; None goes by the suffix of the path.
        mtime, user, group, mode: What all members have: seconds since 1970, names of the owner and the group,
            permissions.
        lowercase: Whether fields must be in lower case, as they are read by default.
        index: Whether an index is written beside the shard, as ``<shard>.index``.
        jpeg_quality, png_compression: Quality of JPEG fields that are encoded here, 1 to 100; effort for PNG, 0 to 9.
        storage_options: Options by protocol, such as ``{"s3": {"profile": "me"}}``.

    Raises:
        TypeError, ValueError: if an argument is wrong, or has an unknown name.
        ShardOpenError: if the file cannot be written, or exists and is not to be replaced.

    Example:
        >>> import pathlib, tempfile, torchdata_wds
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> with TarWriter(path) as writer:
        ...     writer.write({"__key__": "a", "txt": "one", "cls": 1})
        2048
        >>> [sample["txt"] for sample in torchdata_wds.WebDataset(path, decoder=[])]
        ['one']
    """

    def __init__(self, file: Destination, *, overwrite: bool = True, **options: Unpack[TarOptions]) -> None:
        super().__init__(options, "overwrite", overwrite=overwrite)
        self._shard = ShardFile(file, digest=False, **self._file_options)

    def shard_for(self, _: PackedSample) -> ShardFile:
        """Returns the one shard."""
        return self._shard

    def close(self) -> None:
        """Ends the archive, and gives a path its new content; idempotent.

        Raises:
            ShardOpenError: if the file fails, or an earlier sample was interrupted half-way: then nothing appears.
        """
        if not self._closed:
            with self._lock:
                self._shard.close()
            self._closed = True

    def abort(self) -> None:
        """Abandons the archive: what was there before stays; does nothing after `close`."""
        if not self._closed:
            self._closed = True
            self._shard.abort()
