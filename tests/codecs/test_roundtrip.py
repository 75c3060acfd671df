"""The law of the codecs: what is encoded reads back equal, for every extension, plain and compressed (Hypothesis)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.codecs.images.test_sixteen_bit import as_rgba
from torchdata_wds.codecs import CODECS, IMAGE_FIELDS, Decoder, Encoder
from torchdata_wds.codecs.suffixes import SUFFIXES
from torchdata_wds.errors import EncodingError

TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.text(max_size=3).map(lambda text: "\ufeff" + text)
WITH_SURROGATES = st.text(st.characters(), max_size=20)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\\"), max_size=9)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
NUMBERS = [code for kind in "fiu" for code in (f"{kind}2", f"{kind}4", f"{kind}8")] + ["i1", "u1"]
LEAVES = st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**63 - 1)


def nest(leaves: Any, keys: Any) -> Any:
    """Lists and dicts of leaves."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


def fields(strategy: Any) -> Any:
    """The values but None, which no field can be, and bytes, which are data already."""
    return strategy.filter(lambda value: value is not None and not isinstance(value, bytes))


def arrays(codes: list[str]) -> Any:
    """Arrays of any shape and byte order."""
    dtypes = st.sampled_from(codes).flatmap(lambda code: st.sampled_from(["<" + code, ">" + code]))
    return dtypes.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))


def tensors() -> Any:
    """Tensors, some of them views of larger ones."""
    codes = [code for code in NUMBERS if code not in ("u2", "u4", "u8")]
    whole = st.sampled_from(codes).flatmap(lambda code: hnp.arrays(code, SHAPES)).map(torch.from_numpy)
    return whole | whole.filter(lambda tensor: tensor.ndim > 0).map(lambda tensor: tensor[::2])


def images(*channels: int, dtypes: tuple[str, ...] = ("u1", "u2"), values: Any = None) -> Any:
    """Arrays of pixels."""
    sides = st.integers(1, 6)
    shapes = st.tuples(sides, sides, st.sampled_from(channels))
    return st.sampled_from(dtypes).flatmap(lambda dtype: hnp.arrays(dtype, shapes, elements=values))


VALUES: dict[str, Any] = {
    "txt text transcript": TEXT,
    "cls cls2 class count index inx id": st.integers() | st.booleans() | st.integers(-128, 127).map(np.int8),
    "json jsn": fields(nest(LEAVES | WITH_SURROGATES, WITH_SURROGATES)),
    "npy": arrays([*NUMBERS, "b1", "c8", "c16", "U3", "S3", "M8[s]"]),
    "npz": st.dictionaries(NAMES, arrays(NUMBERS), max_size=3),
    "pth pt": fields(nest(LEAVES | st.integers() | WITH_SURROGATES | st.binary(min_size=1) | tensors(), TEXT | LEAVES)),
    "ten tenbin tb": st.lists(arrays(NUMBERS), max_size=3),
    "mp msg msgpack": fields(nest(LEAVES | TEXT | st.binary(max_size=9), TEXT | st.integers(0, 99))),
    "cbor": fields(nest(LEAVES | st.integers() | TEXT | st.binary(max_size=9), TEXT | st.integers(0, 99))),
    "pyd pkl pickle": fields(nest(LEAVES | WITH_SURROGATES | st.binary(max_size=9), WITH_SURROGATES | LEAVES)),
    "jpg jpeg jpe jfif": st.integers(0, 255).map(lambda grey: np.full((9, 7, 1), grey, np.uint8)),
    "png apng img image": images(1, 2, 3, 4),
    "webp": images(1, 2, 3, 4, dtypes=("u1",)),
    "bmp": images(1, 3, dtypes=("u1",)),
    "tif tiff": images(1, 2, 3, 4, dtypes=("u1",)) | images(1, dtypes=("u2",)),
    "ppm pnm": images(1, 3),
    "pgm": images(1),
    "pbm": images(1, dtypes=("u1",), values=st.sampled_from([0, 255])),
    "bin mp4": st.binary(max_size=30),
}
STRATEGIES = {extension: strategy for extensions, strategy in VALUES.items() for extension in extensions.split()}


def equal(left: Any, right: Any) -> bool:
    """Whether a value is the one that was written, with NaN equal to itself and numbers of any type."""
    if isinstance(left, dict):
        keys = sorted(map(repr, left)) == sorted(map(repr, right))
        pairs = zip(left.values(), right.values(), strict=True)
        return keys and all(equal(first, second) for first, second in pairs)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, torch.Tensor):
        return torch.equal(left.nan_to_num(9), right.nan_to_num(9)) and left.dtype == right.dtype
    if isinstance(left, np.ndarray):
        same = left.dtype.newbyteorder("=") == right.dtype.newbyteorder("=") and left.shape == right.shape
        return same and left.astype(right.dtype).tobytes() == right.tobytes()
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return bool(left == right)


def shows(pixels: Any, value: Any, tolerance: float) -> bool:
    """Whether float RGBA pixels are the ones that were written."""
    deep = pixels if pixels.itemsize == 2 else pixels.astype(np.uint16) * np.uint16(257)
    return bool(np.abs(as_rgba(deep) / np.float32(65535) - value).max() <= tolerance)


def check(extension: str) -> Callable[[Any, Any], bool]:
    """What is compared for a field."""
    if extension not in IMAGE_FIELDS:
        return equal
    # a JPEG of one grey is that grey, give or take the rounding of its blocks
    tolerance = 2 / 255 if extension in ("jpg", "jpeg", "jpe", "jfif") else 1e-6
    return lambda pixels, value: shows(pixels, value, tolerance)


def test_strategies_are_complete_when_listed() -> None:
    """A codec without values in these tests is no codec."""
    assert set(CODECS) - {"gif", "avif", "jp2", "j2k", "ico"} <= set(STRATEGIES)
    assert {extension for extension, codec in CODECS.items() if codec.encode is None} == set()


def check_round_trip(extension: str, data: st.DataObject, suffix: str) -> None:
    """Encodes and decodes a value of a field."""
    value = data.draw(STRATEGIES[extension])
    field = f"x.{extension}.{suffix}" if suffix else extension
    try:
        encoded = Encoder()({"__key__": "k", field: value})
    except EncodingError:
        # only str with surrogates may be refused, where they form a pair
        assert "\\ud" in ascii(value)
        return
    assert type(encoded[field]) is bytes
    assert Encoder()({"__key__": "k", field: value}) == encoded
    decoded = Decoder("rgba", allow_pickle=True)(encoded)
    assert check(extension)(value, decoded[field])
    assert decoded["__key__"] == "k"


CASES = given(data=st.data(), suffix=st.sampled_from(["", "", *SUFFIXES]))


# The long test has all extensions.
@pytest.mark.parametrize("extension", sorted(STRATEGIES)[::2])
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@CASES
def test_value_reads_back_equal_when_encoded(extension: str, data: st.DataObject, suffix: str) -> None:
    """Every value that the encoder accepts is the decoder's, and encodes to the same bytes each time."""
    check_round_trip(extension, data, suffix)


@pytest.mark.slow
@pytest.mark.parametrize("extension", sorted(STRATEGIES))
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@CASES
def test_many_values_read_back_equal_when_encoded(extension: str, data: st.DataObject, suffix: str) -> None:
    """The same, with more values."""
    check_round_trip(extension, data, suffix)
