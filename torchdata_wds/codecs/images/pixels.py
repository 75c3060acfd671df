"""Image specs, and the conversion of pixels to what they name, and of values to the pixels of image files."""

from __future__ import annotations

import difflib
import re
import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

#: uint8 or uint16, HW or HWC.
Pixels = np.ndarray[Any, Any]

#: The extensions that hold images.
IMAGE_FIELDS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff"),
    *("gif", "avif", "jp2", "j2k", "ico", "img", "image"),
)


class ImageSpec(NamedTuple):
    """What an image is decoded into."""

    container: Literal["numpy", "torch", "pil"]  # arrays (HWC, or HW for grey), tensors (CHW) or PIL images
    mode: Literal["L", "RGB", "RGBA"]  # Pillow's name of the channels
    is_float: bool = False  # float32 in 0..1 instead of uint8; ignored for PIL images


_MODES: dict[str, Literal["L", "RGB", "RGBA"]] = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
_ARRAYS: dict[str, Literal["numpy", "torch"]] = {"": "numpy", "torch": "torch"}

#: Every valid spec by its name.
IMAGE_SPECS: dict[str, ImageSpec] = {
    **{f"{prefix}{word}8": ImageSpec(kind, mode) for prefix, kind in _ARRAYS.items() for word, mode in _MODES.items()},
    **{prefix + word: ImageSpec(kind, mode, True) for prefix, kind in _ARRAYS.items() for word, mode in _MODES.items()},
    **{f"pil{word}": ImageSpec("pil", mode) for word, mode in _MODES.items()},
    "torch": ImageSpec("torch", "RGB", True),
    "pil": ImageSpec("pil", "RGB"),
}
_WORDS = re.compile("torch|pil|rgba|rgb|l|8")
_CHANNELS = (1, 2, 3, 4)
_CACHED = 2**16  # how many floats are converted at a time

# EXIF orientation, where it is not 1 -> (swap the axes, then the steps through rows and columns)
TURNS = {
    **{2: (False, 1, -1), 3: (False, -1, -1), 4: (False, -1, 1)},
    **{5: (True, 1, 1), 6: (True, 1, -1), 7: (True, -1, -1), 8: (True, -1, 1)},
}


def parse_image_spec(spec: str) -> ImageSpec:
    """Looks up an image spec; the error for an unknown one suggests the nearest and lists all."""
    if not isinstance(spec, str):
        raise TypeError(f"an image spec is a str such as 'rgb8' or 'pil', not {spec!r}")
    if spec in IMAGE_SPECS:
        return IMAGE_SPECS[spec]
    # the same words in the right order (torchrgb8 for rgb8torch) come before a similar spelling
    words = _WORDS.findall(spec.lower())
    turned = "".join(sorted(words, key=("torch", "pil").__contains__, reverse=True))
    is_turned = "".join(words) == spec.lower() and turned in IMAGE_SPECS
    nearest = turned if is_turned else difflib.get_close_matches(spec.lower(), IMAGE_SPECS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown image spec {spec!r}: did you mean {nearest!r}? The specs are {', '.join(IMAGE_SPECS)}")


def fitting_size(size: tuple[int, int], max_size: int | None) -> tuple[int, int]:
    """Reduces a size so that its longest side is at most ``max_size``, keeping the aspect."""
    longest = max(size)
    if max_size is None or longest <= max_size:
        return size
    width, height = (max(1, round(side * max_size / longest)) for side in size)
    return width, height


def to_values(pixels: Pixels, spec: ImageSpec, *, is_own: bool = False) -> Any:
    """Converts uint8 or uint16 pixels, HW or HWC, to what the spec names, with at most one copy.

    `is_own`: whether their memory holds nothing else, and nothing else refers to it.

    Tensors of uint8 are CHW views of HWC memory, as those of torchvision's decoders: nothing is transposed, and torch
    resizes them faster. Floats are made in a pass of their own, so it writes CHW memory: arithmetic by channel, as
    normalizing is, takes several times as long on views.
    """
    if spec.container == "pil":
        return to_pil(pixels)
    is_tensor = spec.container == "torch"
    if not spec.is_float:
        values = pixels if is_own and pixels.itemsize == 1 and pixels.flags.c_contiguous else to_uint8(pixels)
        return as_tensor(values) if is_tensor else values
    if is_tensor:
        pixels = pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[np.newaxis]
    values = np.empty(pixels.shape, np.float32)
    np.divide(pixels, np.float32(np.iinfo(pixels.dtype).max), out=values)
    if not is_tensor:
        return values
    import torch

    return torch.from_numpy(values)


def as_tensor(pixels: Pixels) -> Tensor:
    """Returns a CHW view of pixels, HW or HWC."""
    import torch

    tensor = torch.from_numpy(pixels)
    return tensor.permute(2, 0, 1) if pixels.ndim == 3 else tensor[None]


def to_uint8(pixels: Pixels) -> Pixels:
    """Reduces pixels to 8 bits; returns 8-bit pixels as they are if they own their memory, contiguous and writable."""
    if pixels.itemsize == 1:
        flags = pixels.flags
        return pixels if flags.c_contiguous and flags.owndata and flags.writeable else np.array(pixels, order="C")
    # 65535 is 255 * 257, so this rounds to the nearest: 128 -> 0, 129 -> 1, 65535 -> 255
    return np.ascontiguousarray((pixels.astype(np.uint32) + 128) // 257, dtype=np.uint8)


def to_pil(pixels: Pixels) -> Image:
    """Makes a PIL image of 8 bits per channel."""
    from PIL import Image

    return Image.fromarray(to_uint8(pixels))


def turn(pixels: Pixels, orientation: int) -> Pixels:
    """Turns an image upright by its EXIF orientation, 1 to 8; returns a view, or for 1 the image itself."""
    if orientation == 1:
        return pixels
    swapped, rows, columns = TURNS[orientation]
    return (pixels.swapaxes(0, 1) if swapped else pixels)[::rows, ::columns]


def to_pixels(value: Any, *, channels_first: bool) -> Pixels:
    """Converts an array or tensor of uint8, uint16 or floats in 0..1 to uint8 or uint16 pixels, HW or HWC."""
    # Only dtypes with one meaning are accepted. int64 may hold 0..255 or 0..65535, and a wrong guess would write a
    # black image without an error: 200 of 65535 is black. uint8 and uint16 imply their range; floats are checked.
    torch = sys.modules.get("torch")  # before torch is imported, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        array: Pixels = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        if not channels_first:
            array = _check_shape(array, 'encoder="torchrgb8"')
        elif array.ndim == 3 and array.shape[0] in _CHANNELS:
            array = array.transpose(1, 2, 0)
        elif array.ndim != 2:
            raise ValueError("expected a tensor of shape HW or CHW with 1 to 4 channels (torch image spec); permute it")
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        array = _check_shape(value, "array.transpose(1, 2, 0)")
    else:
        raise TypeError("expected a PIL image, a NumPy array or a tensor")
    if array.size == 0:
        raise ValueError("it has no pixels, and no image file can be empty; leave the sample out")
    pixels = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    kind, size = pixels.dtype.kind, pixels.dtype.itemsize
    if kind == "u" and size <= 2:
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if kind == "f" and size <= 8:
        return _from_floats(pixels)
    if kind == "b":
        raise TypeError("images have no bool pixels; use array.astype(numpy.uint8) * 255")
    integers = "use .astype(numpy.uint8) if they are 0..255, or .astype(numpy.uint16) if they are 0..65535"
    cure = integers if kind in "iu" else "use uint8, uint16, or float32 in 0..1"
    raise TypeError(f"images have no {pixels.dtype} pixels; {cure}")


def _check_shape(array: Pixels, cure: str) -> Pixels:
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS):
        return array
    # (3, 480, 640) looks like CHW, but (3, 480, 5) more likely has a wrong number of channels than a width of 5
    if array.ndim == 3 and array.shape[0] in _CHANNELS and min(array.shape[1:]) > 2 * max(_CHANNELS) - 1:
        raise ValueError(f"expected shape HW or HWC with 1 to 4 channels, but this looks like CHW; use {cure}")
    raise ValueError("expected shape HW or HWC with 1 to 4 channels; reshape it, one image for each field")


def _from_floats(pixels: Pixels) -> Pixels:
    # a few rows at a time stay in the processor's cache from one step to the next
    result = np.empty(pixels.shape, np.uint8)
    rows = max(1, _CACHED * len(pixels) // pixels.size)
    # half precision is too coarse for 255 times a fraction
    wide = np.float64 if pixels.dtype.itemsize == 8 else np.float32
    for start in range(0, len(pixels), rows):
        part = pixels[start : start + rows]
        scaled = np.multiply(part, 255, dtype=wide)
        np.rint(scaled, out=scaled)
        # Checked after rounding: normalizing and undoing it may turn 1.0 into 1.0000001. NaN fails both tests.
        if not (scaled.min() >= 0 and scaled.max() <= 255):
            raise ValueError(
                f"floats must be finite and in 0..1, but these go from {pixels.min()} to {pixels.max()}; divide them "
                "by 255 if they go to 255, or clip them"
            )
        result[start : start + rows] = scaled
    return result
