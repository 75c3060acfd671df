"""Decodes the JPEG files of a whole batch at once: by a GPU, or by several threads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torchdata_wds.checks import check_choice, check_flags, checked_int
from torchdata_wds.codecs.images.decoding import ImageDecoder
from torchdata_wds.codecs.images.files import open_image, read_orientation
from torchdata_wds.codecs.options import BYTES_TYPES, MissingPackageError
from torchdata_wds.codecs.plans import describe_cause, describe_value, shown_call
from torchdata_wds.environment import usable_cpus
from torchdata_wds.errors import DecodingError
from torchdata_wds.handlers import warn_once

if TYPE_CHECKING:
    import torch

# Mode -> the image spec of the CPU's decoder, and the mode's name in torchvision and torchcodec.
_MODES = {"rgb": ("torchrgb8", "RGB"), "l": ("torchl8", "GRAY")}

_GPUS = frozenset(["cuda"])
_MOST_THREADS = 8
_ENDED = b"\xff\xd9"


class JpegBatchDecoder:
    """Decodes the JPEG files of a batch, in the main process; its public name is ``decode_jpegs``.

    Workers pass batches of bytes, and the main process decodes each batch at once: on CUDA by torchcodec (from 0.16
    on) or torchvision, whichever is installed, elsewhere as `image_decoder` does, in several threads. The images are
    uint8 tensors CHW, in a list, because they may differ in size. Called with a list of files, the decoder returns that
    list; with ``field``, it takes a batch of ``wds_collate`` (or a list of samples) and returns it with the images in
    place of the files.

    A GPU's decoder rounds otherwise, so that its pixels differ by a few of 255. It gets only complete files of 8 bits,
    grey or YCbCr, that need not be turned. All others (CMYK, PNG, files that are cut off, ...) are decoded as on the
    CPU, with the same errors, and so are those that the GPU's decoder refuses, with a warning; it is an error if that
    refuses all files of a batch.

    Args:
        device: Where the images are to be: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a ``torch.device``.
        field: The field of the files in a batch: its name, or its place in a tuple.
        mode: ``"rgb"`` (3, H, W) or ``"l"`` (1, H, W).
        exif_transpose: Whether to turn images upright by their EXIF orientation.
        threads: The number of threads of the CPU's decoder; None for one per processor, at most 8.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.
        DecodingError: when called, for a file that is not an image; it names the place in the batch, and the key.
        ImportError: when called for a GPU, if neither package is installed.

    Example:
        >>> import io, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (64, 48)).save(file, "JPEG")
        >>> batch = {"__key__": ["a", "b"], "jpg": [file.getvalue()] * 2}
        >>> [image.shape for image in decode_jpegs("cpu", field="jpg")(batch)["jpg"]]
        [torch.Size([3, 48, 64]), torch.Size([3, 48, 64])]
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        field: str | int | None = None,
        mode: str = "rgb",
        exif_transpose: bool = False,
        threads: int | None = None,
    ) -> None:
        import torch

        try:
            self.device = torch.device(device)
        except RuntimeError as cause:
            raise ValueError(f"device must be one of torch's, such as 'cpu' or 'cuda:0', not {device!r}") from cause
        if isinstance(field, bool) or not isinstance(field, str | int | None):
            raise TypeError(f"field must be a field's name, or its place in a tuple, not {field!r}")
        check_choice("mode", mode, _MODES)
        check_flags(exif_transpose=exif_transpose)
        self.field = field
        self.mode = mode
        self.exif_transpose = exif_transpose
        self.threads = None if threads is None else checked_int("threads", threads, 1)
        self._decoder = ImageDecoder(_MODES[mode][0], exif_transpose=exif_transpose)

    def __call__(self, batch: Any) -> Any:
        """Decodes a list of files; with ``field``, the files of a batch, which it returns with the images."""
        field = self.field
        if field is None:
            if isinstance(batch, (str, dict, *BYTES_TYPES)):
                raise TypeError(
                    f"decode_jpegs takes a list of files, not a value {describe_value(batch)}; field= names theirs"
                )
            return self.decode(batch)
        try:
            if isinstance(batch, dict):
                return {**batch, field: self.decode(batch[field], batch.get("__key__"))}
            if isinstance(batch, list) and all(isinstance(sample, dict) for sample in batch):
                images = self.decode([sample[field] for sample in batch], [sample.get("__key__") for sample in batch])
                return [{**sample, field: image} for sample, image in zip(batch, images, strict=True)]
            if isinstance(batch, tuple | list) and isinstance(field, int):
                images = self.decode(batch[field])
                values = list(batch)
                values[field] = images
                return values if isinstance(batch, list) else tuple(values)
        except LookupError as cause:
            raise ValueError(
                f"decode_jpegs(field={field!r}) meets a batch without it, {describe_value(batch)}"
            ) from cause
        raise TypeError(f"decode_jpegs(field={field!r}) takes batches with such a field, not {describe_value(batch)}")

    def decode(self, files: Sequence[Any], keys: Sequence[Any] | None = None) -> list[torch.Tensor]:
        """Decodes files (bytes, or uint8 tensors or arrays); keys are for messages."""
        data = {number: _as_bytes(file, number) for number, file in enumerate(files)}
        images: dict[int, torch.Tensor] = {}
        if self.device.type in _GPUS:
            images = self._from_gpu({number: file for number, file in data.items() if self._is_ordinary(file)}, keys)
        images |= self._from_cpu({number: file for number, file in data.items() if number not in images}, keys)
        return [images[number] for number in data]

    def _from_gpu(self, files: dict[int, bytes], keys: Sequence[Any] | None) -> dict[int, torch.Tensor]:
        """Decodes files by their numbers; leaves out those that the GPU's decoder refuses."""
        if not files:
            return {}
        try:
            images = _gpu_decoder()([*files.values()], _MODES[self.mode][1], self.device)
            return dict(zip(files, images, strict=True))
        except RuntimeError as error:
            if _is_fatal(error):
                raise
            if len(files) == 1:
                warn_once(
                    "decode_jpegs",
                    f"the decoder of device {self.device} refused an image ({describe_cause(error)}), which the CPU "
                    "decodes. Further warnings of this kind are not shown",
                )
                return {}
            # the decoder does not say which file it is, and it is the decoder itself that fails if all are refused
            found: dict[int, torch.Tensor] = {}
            for number, file in files.items():
                found |= self._from_gpu({number: file}, keys)
            if not found:
                self._from_cpu(files, keys)
                raise
            return found

    def _from_cpu(self, files: dict[int, bytes], keys: Sequence[Any] | None) -> dict[int, torch.Tensor]:
        """Decodes files by their numbers."""
        threads = min(len(files), self.threads or min(usable_cpus(), _MOST_THREADS))

        def decode(number: int) -> torch.Tensor:
            try:
                image: torch.Tensor = self._decoder.decode(files[number])
            except MissingPackageError:
                raise
            except Exception as cause:
                raise self._failure(cause, files[number], number, keys) from cause
            return image.to(self.device)

        if threads <= 1:
            return {number: decode(number) for number in files}
        # threads that outlived the call would be missing in workers that are forked after it
        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(files, pool.map(decode, files), strict=True))

    def _failure(self, cause: Exception, data: bytes, number: int, keys: Sequence[Any] | None) -> DecodingError:
        key = None if keys is None or isinstance(keys, str) or number >= len(keys) else str(keys[number])
        field = self.field if isinstance(self.field, str) else None
        where = f"image {number} of a batch" + (f", of sample {key!r}," if key else "")
        found = f"It has {len(data):,} bytes, beginning with {data[:16]!r}" if data else "It is empty"
        return DecodingError(
            f"{where} does not decode: {describe_cause(cause)}. {found}. Repair the sample, or skip its batch with "
            ".wds_map(decode_jpegs(...), handler=warn_and_continue).",
            key=key,
            field=field,
        )

    def _is_ordinary(self, data: bytes) -> bool:
        """Returns whether a GPU's decoder gives the image that the CPU's does."""
        if not data[-64:].rstrip(b"\0").endswith(_ENDED):
            return False
        try:
            with open_image(data) as image:
                has_plain_colours = image.mode == "L" or (
                    image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1
                )
                return image.format == "JPEG" and has_plain_colours and read_orientation(image) == 1
        except Exception:  # noqa: BLE001 - the CPU's decoder raises it again, with its place
            return False

    def __repr__(self) -> str:
        return shown_call("decode_jpegs", self, repr(str(self.device)))


decode_jpegs = JpegBatchDecoder


def _as_bytes(file: Any, number: int) -> bytes:
    if isinstance(file, BYTES_TYPES):
        return bytes(file)
    if str(getattr(file, "dtype", "")) in ("uint8", "torch.uint8") and getattr(file, "ndim", 0) == 1:
        array = file.numpy() if hasattr(file, "numpy") else file
        return bytes(array.tobytes())
    raise TypeError(
        f"decode_jpegs takes files as bytes, or as uint8 tensors of shape (n,), but item {number} is "
        f"{describe_value(file)}"
    )


@functools.cache
def _gpu_decoder() -> Callable[[list[bytes], str, Any], list[torch.Tensor]]:
    """Returns a function that decodes a list of JPEG files on a GPU: the only place that knows how."""
    import torch

    decode_jpeg, modes = _import_decoder()

    def decode(files: list[bytes], mode: str, device: Any) -> list[torch.Tensor]:
        encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        images: list[torch.Tensor] = decode_jpeg(encoded, mode=modes[mode], device=device)
        return images

    return decode


def _import_decoder() -> tuple[Any, Any]:
    """Imports torchcodec's decoder, or torchvision's, with the modes by name."""
    reasons = []
    for module in ("torchcodec.decoders", "torchvision.io"):
        try:
            found = importlib.import_module(module)
            return found.decode_jpeg, found.ImageReadMode
        except (ImportError, AttributeError, RuntimeError, OSError) as error:  # not installed, too old, or not loaded
            reasons.append(describe_cause(error))
    raise MissingPackageError(
        "decode_jpegs on a GPU needs torchcodec from 0.16 on, or torchvision, of the same build as torch: pip install "
        f"torchvision; or use decode_jpegs('cpu'). Found: {'; '.join(reasons)}",
        name="torchvision",
    )


def _is_fatal(error: RuntimeError) -> bool:
    """Returns whether a failure is the device's, not that of an image."""
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error)
