"""What validation compares a shard with while it is read: the index beside it, and what its fields decode to."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.media import AUDIO_FIELDS, VIDEO_FIELDS, torch_audio, torch_video
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.errors import DecodingError, ShardFormatError, ShardOpenError, UnsafeDataError, cli_message
from torchdata_wds.format.index import ShardIndex, index_url
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.option_types import KeyRule
from torchdata_wds.storage.urls import is_local, local_path

_CURE = "It is of another version of the shard, and loaders that divide the shard by it fail: make it again"


class IndexCheck:
    """The index beside a shard, compared with the samples as they are read; one made by another rule for keys is not.

    `fault` is the first thing that is wrong with it; None if it is right or absent.
    """

    def __init__(self, url: str, keys: KeyRule) -> None:
        self.fault: str | None = None
        self.is_readable = True
        self._index: ShardIndex | None = None
        try:
            index = ShardIndex.load(index_url(url))
        except ShardFormatError as error:
            self.fault = cli_message(error)
            self.is_readable = False
            return
        except (ShardOpenError, UnsafeDataError, ValueError):  # there is none, or no place for one
            return
        if index.header.keys != keys:
            return
        self._index = index
        expected = index.header.bytes
        if expected is not None and is_local(url):
            with suppress(OSError):  # opening the shard says better what is wrong
                found = os.stat(local_path(url)).st_size  # noqa: PTH116 - a str
                if found != expected:
                    self._blame(f"the shard has {found:,} bytes, and the index says {expected:,}")

    def compare(self, number: int, key: str, start: int, stop: int) -> None:
        """Compares a sample: its key, and the bytes from its first header to its last padding."""
        if self._index is None or self.fault is not None or number >= len(self._index):
            return
        try:
            row = self._index[number]
        except ShardFormatError as error:
            self.fault = cli_message(error)
            return
        if (row.key, row.start, row.stop) != (key, start, stop):
            self._blame(
                f"sample {number:,} is {key!r} from byte {start:,} to {stop:,}, and the index says {row.key!r} from "
                f"byte {row.start:,} to {row.stop:,}"
            )

    def finish(self, count: int, tar_bytes: int) -> None:
        """Compares the number of samples and the archive's size at the shard's end."""
        if self._index is not None:
            header = self._index.header
            if header.samples != count:
                self._blame(f"the shard has {count:,} samples, and the index says {header.samples:,}")
            if header.tar_bytes != tar_bytes:
                self._blame(f"the archive has {tar_bytes:,} bytes, and the index says {header.tar_bytes:,}")

    def _blame(self, what: str) -> None:
        if self.fault is None:
            self.fault = f"the index beside the shard is stale: {what}. {_CURE}"


class FieldChecker:
    """Tries to decode all fields of samples but pickles, and keeps nothing; media where PyAV is installed."""

    def __init__(self) -> None:
        has_media = importlib.util.find_spec("av") is not None
        self._decode = Decoder("pil", torch_video, torch_audio) if has_media else Decoder("pil")
        self._unchecked = frozenset() if has_media else frozenset(f"{VIDEO_FIELDS} {AUDIO_FIELDS}".split())

    def __call__(self, sample: Mapping[str, Any]) -> Iterator[Exception]:
        """Yields an error, with the attribute ``field``, for each field that does not decode or was not tried.

        The former are instances of `DecodingError`, the latter of `UnsafeDataError` or ImportError.
        """
        about = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
        for field, data in sample.items():
            if is_metadata(field):
                continue
            try:
                if field.lower().rpartition(".")[2] in self._unchecked:
                    raise MissingPackageError("decoding media needs the av package: pip install 'torchdata_wds[media]'")
                self._decode({**about, field: data})
            except (DecodingError, UnsafeDataError) as error:
                yield error
            except MissingPackageError as error:
                skipped = MissingPackageError(f"field {field!r} was not decoded: {error}")
                skipped.field = field  # type: ignore[attr-defined]
                yield skipped
