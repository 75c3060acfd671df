"""Image specs: the short words that say what an image is decoded to."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["IMAGE_FIELDS", "IMAGE_SPECS", "ImageSpec", "parse_image_spec"]


#: The extensions that hold images.
IMAGE_FIELDS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff"),
    *("gif", "avif", "jp2", "j2k", "ico", "img", "image"),
)

_WORDS = re.compile("torch|pil|rgba|rgb|l|8")

Container = Literal["numpy", "torch", "pil"]


@dataclass(frozen=True)
class ImageSpec:
    """What an image becomes.

    Args:
        name: The spec itself.
        container: Arrays (HWC, or HW for grey), tensors (CHW) or PIL images.
        mode: Pillow's name of the channels: ``L``, ``RGB`` or ``RGBA``.
        is_float: float32 in 0..1 instead of uint8; means nothing for PIL images.
    """

    name: str
    container: Container
    mode: Literal["L", "RGB", "RGBA"]
    is_float: bool = False


def _make_specs() -> dict[str, ImageSpec]:
    modes: tuple[tuple[str, Literal["L", "RGB", "RGBA"]], ...] = (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))
    containers: tuple[tuple[str, Container], ...] = (("", "numpy"), ("torch", "torch"))
    specs = [ImageSpec(prefix + word + "8", kind, mode) for prefix, kind in containers for word, mode in modes]
    specs += [ImageSpec(prefix + word, kind, mode, True) for prefix, kind in containers for word, mode in modes]
    specs += [ImageSpec("pil" + word, "pil", mode) for word, mode in modes]
    specs += [ImageSpec("torch", "torch", "RGB", True), ImageSpec("pil", "pil", "RGB")]
    return {spec.name: spec for spec in specs}


#: Every valid spec by its name.
IMAGE_SPECS: dict[str, ImageSpec] = _make_specs()


def parse_image_spec(spec: str) -> ImageSpec:
    """Looks up an image spec.

    Raises:
        TypeError: if it is no str.
        ValueError: if there is none of that name; names the nearest and all.
    """
    if not isinstance(spec, str):
        raise TypeError(f"an image spec is a str such as 'rgb8' or 'pil', not {spec!r}")
    if spec in IMAGE_SPECS:
        return IMAGE_SPECS[spec]
    nearest = _turned(spec.lower()) or difflib.get_close_matches(spec.lower(), IMAGE_SPECS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown image spec {spec!r}: did you mean {nearest!r}? The specs are {', '.join(IMAGE_SPECS)}")


def _turned(spec: str) -> str | None:
    """The spec of the same words in the right order: ``torchrgb8`` for ``rgb8torch``."""
    words = _WORDS.findall(spec)
    turned = "".join(sorted(words, key=("torch", "pil").__contains__, reverse=True))
    return turned if "".join(words) == spec and turned in IMAGE_SPECS else None
