"""Image specs: the short words that say what an image is decoded to."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

#: The extensions that hold images.
IMAGE_FIELDS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff"),
    *("gif", "avif", "jp2", "j2k", "ico", "img", "image"),
)

_WORDS = re.compile("torch|pil|rgba|rgb|l|8")
Container = Literal["numpy", "torch", "pil"]


@dataclass(frozen=True)
class ImageSpec:
    """What an image becomes."""

    name: str  # the spec itself
    container: Container  # arrays (HWC, or HW for grey), tensors (CHW) or PIL images
    mode: Literal["L", "RGB", "RGBA"]  # Pillow's name of the channels
    is_float: bool = False  # float32 in 0..1 instead of uint8; means nothing for PIL images


_MODES: dict[str, Literal["L", "RGB", "RGBA"]] = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
_ARRAYS: dict[str, Container] = {"": "numpy", "torch": "torch"}

_SPECS = (
    *(ImageSpec(f"{prefix}{word}8", kind, mode) for prefix, kind in _ARRAYS.items() for word, mode in _MODES.items()),
    *(ImageSpec(prefix + word, kind, mode, True) for prefix, kind in _ARRAYS.items() for word, mode in _MODES.items()),
    *(ImageSpec(f"pil{word}", "pil", mode) for word, mode in _MODES.items()),
    *(ImageSpec("torch", "torch", "RGB", True), ImageSpec("pil", "pil", "RGB")),
)

#: Every valid spec by its name.
IMAGE_SPECS: dict[str, ImageSpec] = {spec.name: spec for spec in _SPECS}


def parse_image_spec(spec: str) -> ImageSpec:
    """Looks up an image spec; the error for an unknown one names the nearest and all."""
    if not isinstance(spec, str):
        raise TypeError(f"an image spec is a str such as 'rgb8' or 'pil', not {spec!r}")
    if spec in IMAGE_SPECS:
        return IMAGE_SPECS[spec]
    # the same words in the right order, as torchrgb8 for rgb8torch, are nearer than what looks alike
    words = _WORDS.findall(spec.lower())
    turned = "".join(sorted(words, key=("torch", "pil").__contains__, reverse=True))
    is_turned = "".join(words) == spec.lower() and turned in IMAGE_SPECS
    nearest = turned if is_turned else difflib.get_close_matches(spec.lower(), IMAGE_SPECS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown image spec {spec!r}: did you mean {nearest!r}? The specs are {', '.join(IMAGE_SPECS)}")
