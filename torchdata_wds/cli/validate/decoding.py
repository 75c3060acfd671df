"""Whether the fields of a sample decode: each is tried, and nothing is kept."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.codecs.decoder import Decoder, DecoderLike
from torchdata_wds.codecs.media import AUDIO_FIELDS, VIDEO_FIELDS, torch_audio, torch_video
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.errors import DecodingError, UnsafeDataError
from torchdata_wds.format.samples.names import is_metadata


class FieldChecker:
    """Tries to decode all fields of samples but pickles; media where PyAV is installed.

    Example:
        >>> [error.field for error in FieldChecker()({"__key__": "a", "cls": b"x", "json": b"[1]", "jpg": b"no"})]
        ['cls', 'jpg']
    """

    def __init__(self) -> None:
        has_media = importlib.util.find_spec("av") is not None
        media: tuple[DecoderLike, ...] = (torch_video, torch_audio) if has_media else ()
        self._decode = Decoder("pil", *media)
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
