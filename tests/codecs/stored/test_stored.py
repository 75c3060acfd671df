"""Samples as bytes without pickling: what reads back equal, what is refused, and damaged data."""

import collections
import contextlib
import io
import math
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataChunk

from torchdata_wds.codecs.stored import decode_value, encode_value
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember


def again(value: Any, **options: Any) -> Any:
    """A value, written and read."""
    return decode_value(encode_value(value, **options).data, **options)


class Point(NamedTuple):
    x: int
    y: int


class Box:
    """A class that only pickle knows."""

    def __init__(self, inside: Any = 1) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return type(other) is Box and other.inside == self.inside

    __hash__ = None  # type: ignore[assignment]


def _noted() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.note = "x"  # type: ignore[attr-defined]
    return tensor


class Text(str):
    __slots__ = ()


PLAIN = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**400, -(10**400), 255, -128, 2**64),
    *(0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, complex(1, -0.0)),
    *("", "text", "größe \U0001f600", "\0", "\ud800", "\ud83d\ude00", b"", b"\xff\0", bytearray(b"ab")),
    *([], (), {}, set(), frozenset(), [1, [2, (3,)]], (None,), {1, "a", (2, None)}, frozenset([b"x"])),
    {"b": 1, "a": 2, 3: "c", (1, "t"): None, None: {}, b"k": [], 2.5: 0, True: 1, frozenset([7]): 8},
    {"__key__": "a/b", "__url__": "s3://bucket/x.tar", "json": {"a": [1, 2.5, {"b": None}]}, "jpg": b"\xff\xd8"},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_read_back_equal_and_of_the_same_type(value: Any) -> None:
    """Type and value are kept at every level, the order of dicts too, and so is the sign of zero."""
    read = again(value)
    assert repr(read) == repr(value) or read == value
    assert type(read) is type(value)
    if isinstance(value, dict):
        assert list(map(repr, read.items())) == list(map(repr, value.items()))


def test_nan_keeps_its_bits_when_stored() -> None:
    """A NaN is a NaN, with its payload."""
    nan = struct.unpack("<d", (0x7FF8000000000123).to_bytes(8, "little"))[0]
    assert struct.pack("<d", again(nan)) == struct.pack("<d", nan)


def test_arrays_keep_dtype_shape_and_order_when_stored() -> None:
    """All dtypes, in C and Fortran order, without dimensions, empty, and as views of others."""
    for dtype in [
        *("?", "i1", "u1", "<i2", ">i2", "<u4", "<i8", ">u8", "<f2", "<f4", ">f8", "<c8", "<c16", "g", "G"),
        *("<M8[ns]", ">M8[D]", "<m8[s]", "S3", "<U5", ">U2", "V4"),
    ]:
        flat = np.frombuffer(random.Random(0).randbytes(24 * np.dtype(dtype).itemsize), np.uint8)
        if dtype in ("?", "g", "G", "<U5", ">U2"):
            flat = np.arange(24).astype(dtype).view(np.uint8)
        whole = flat.view(dtype).reshape(4, 6)
        for array in (
            whole, np.asfortranarray(whole), whole[1:3, ::2], whole[0, 0:1].reshape(()), whole[:0], whole.T[::-1],
        ):  # fmt: skip
            read = again(array)
            assert type(read) is np.ndarray
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
            assert read.flags.writeable
            assert array.flags.c_contiguous or read.flags.f_contiguous == array.flags.f_contiguous


def test_structured_arrays_and_scalars_keep_their_type_when_stored() -> None:
    """Named fields go through the npy format; scalars stay scalars."""
    array = np.array([(1, 2.5), (3, 4.5)], np.dtype([("a", "<i4"), ("b", ">f8")]))
    assert again(array).dtype == array.dtype
    assert again(array).tolist() == array.tolist()
    record = again(array[1])
    assert isinstance(record, np.void)
    assert record == array[1]
    for scalar in (np.float32(1.5), np.int8(-3), np.bool_(True), np.float64(2.5), np.datetime64("2024-01-02", "D")):
        assert type(again(scalar)) is type(scalar)
        assert again(scalar) == scalar


def test_empty_dtypes_and_empty_shapes_read_back_when_stored() -> None:
    """Nothing is stored for arrays of no bytes."""
    for array in (np.zeros((2, 3), "S0"), np.zeros((0, 5), "f4"), np.zeros(0, "U3")):
        read = again(array)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)


DTYPES = sorted(
    (
        getattr(torch, name)
        for name in (
            *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
            *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
            *("float8_e4m3fn", "float8_e5m2"),
        )
        if hasattr(torch, name)
    ),
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_dtype_shape_and_bytes_when_stored(dtype: torch.dtype) -> None:
    """Every dense dtype, without dimensions, empty, and as a view."""
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % 2
    whole = raw.view(dtype).reshape(4, 6)
    for tensor in (whole, whole.t(), whole[1:3, ::2], whole[0, 0], whole[:0]):
        read = again(tensor)
        assert type(read) is torch.Tensor
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.reshape(-1).view(torch.uint8).tolist() == tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    if read.numel():
        read.zero_()  # it can be written to


def test_conjugated_tensors_read_back_equal_when_stored() -> None:
    """A tensor that only says it is conjugated is stored as what it shows."""
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(again(tensor), tensor)
    assert torch.equal(again(tensor.imag), tensor.imag)


MODES = [
    *("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"),
    *("LA", "PA", "RGBX", "RGBa", "La", "I;16", "I;16B"),
]


@pytest.mark.parametrize("mode", MODES)
def test_images_keep_mode_size_and_pixels_when_stored(mode: str) -> None:
    """Every mode, an odd width and an empty image too."""
    size = len(Image.new(mode, (7, 5)).tobytes())
    image = Image.frombytes(mode, (7, 5), random.Random(1).randbytes(size))
    image.info["dpi"] = (72, 72)
    for original in (image, Image.new(mode, (0, 3))):
        read = again(original)
        assert type(read) is Image.Image
        assert read == original
        assert read.tobytes() == original.tobytes()


@pytest.mark.parametrize("palette", ["RGB", "RGBA"])
@pytest.mark.parametrize("mode", ["P", "PA"])
def test_images_keep_their_palette_when_stored(mode: str, palette: str) -> None:
    """Palettes of three and of four channels, longer than the colours in use."""
    image = Image.frombytes(mode, (2, 2), bytes(range(4)) if mode == "P" else bytes(range(8)))
    image.putpalette(random.Random(2).randbytes(200 * len(palette)), palette)
    read = again(image)
    assert read == image
    assert read.getpalette("RGBA") == image.getpalette("RGBA")
    assert read.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_image_files_keep_exif_and_transparency_when_stored() -> None:
    """What an image carries beside its pixels is kept where it is plain; what is not is left out."""
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 8), "red").save(out, "JPEG", exif=exif, dpi=(300, 300))
    with Image.open(io.BytesIO(out.getvalue())) as image:
        image.info["odd"] = Box()
        read = again({"jpg": image})["jpg"]
        assert read.tobytes() == image.tobytes()
        assert read.getexif()[0x0112] == 6
        assert {**read.info, "odd": image.info["odd"]} == image.info
    image = Image.new("P", (2, 2))
    image.info["transparency"] = 0
    assert again(image).convert("RGBA").getpixel((0, 0)) == image.convert("RGBA").getpixel((0, 0))


def test_classes_of_pipes_stay_what_they_are_when_stored() -> None:
    """Members, slices and torch's batches have forms of their own."""
    for value in [
        ShardMember("x.tar", "a.jpg", b"1", -3),
        ShardSlice("x.tar", 1, None, 2),
        DataChunk([{"a": 1}, {"a": 2}]),
        (ShardMember("x.tar", "a", b""), [DataChunk([1])]),
    ]:
        read = again(value)
        assert read == value
        assert type(read) is type(value)
        assert [type(item) for item in read] == [type(item) for item in value]


def test_subclasses_of_str_become_str_when_stored() -> None:
    """The URL of a dataset file is a str with more to it; as text it is equal."""
    assert type(again(Text("x.tar"))) is str
    assert again({Text("a"): np.str_("b"), "c": np.bytes_(b"d")}) == {"a": "b", "c": b"d"}


REFUSED = {
    "an object": (Box(), "Box"),
    "a named tuple": (Point(1, 2), "Point.*names"),
    "an ordered dict": (collections.OrderedDict(a=1), "OrderedDict.*dict()"),
    "a path": (Path("x"), "Path"),
    "a function": (len, "builtin_function"),
    "an array of objects": (np.array([Box()], object), "dtype object"),
    "a masked array": (np.ma.array([1], mask=[1]), "MaskedArray"),
    "a subclass of arrays": (np.zeros(2).view(np.recarray), "recarray.*subclass"),
    "a gradient": (torch.ones(2, requires_grad=True), "requires_grad=True.*detach"),
    "a parameter": (torch.nn.Parameter(torch.ones(1), requires_grad=False), "plain tensors"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "sparse"),
    "a tensor elsewhere": (torch.empty(2, device="meta"), "device meta"),
    "a tensor with attributes": (_noted(), "attributes of its own"),
    "a type": (int, "type"),
}
if hasattr(np.dtypes, "StringDType"):
    REFUSED["an array of texts of any length"] = (np.array(["a"], np.dtypes.StringDType()), "dtype StringDType")


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_with_their_place_when_not_pickled(name: str) -> None:
    """The message names the place in the sample, the type, and the option."""
    value, says = REFUSED[name]
    sample = {"__key__": "k", "json": {"list": [1, (2, value)]}}
    with pytest.raises(ValueError, match=rf"(?s)at \['json'\]\['list'\]\[1\]\[1\] is .*({says}).*allow_pickle=True"):
        encode_value(sample)
    with pytest.raises(ValueError, match=says):
        encode_value(value)


def test_refused_keys_and_members_of_sets_are_named_as_such() -> None:
    """A key has no place of its own."""
    with pytest.raises(ValueError, match=r"at \['a'\], as a key of 1 is .*Path"):
        encode_value({"a": {Path("x"): 1}})
    with pytest.raises(ValueError, match=r"at \['a'\], in a set is .*Path"):
        encode_value({"a": {Path("x")}})


def test_other_values_are_pickled_when_allowed() -> None:
    """Only what has no other form is pickled, and reading needs the permission again."""
    sample = {"a": [Box(2), 1], "b": np.arange(3), "c": Point(1, 2)}
    stored = encode_value(sample, allow_pickle=True)
    assert stored.has_pickles
    assert b"numpy" not in stored.data
    read = decode_value(stored.data, allow_pickle=True)
    assert (read["a"], type(read["c"])) == (sample["a"], Point)
    with pytest.raises(UnsafeDataError, match="allow_pickle=True was not given"):
        decode_value(stored.data)
    assert not encode_value([1, "a"], allow_pickle=True).has_pickles


def test_pickles_are_refused_when_the_environment_is_secure(monkeypatch: pytest.MonkeyPatch) -> None:
    """WDS_SECURE=1 wins over the option, in both directions."""
    stored = encode_value(Box(), allow_pickle=True)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1"):
        encode_value(Box(), allow_pickle=True)
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1"):
        decode_value(stored.data, allow_pickle=True)


def test_what_cannot_be_pickled_is_refused_with_its_place_when_pickles_are_allowed() -> None:
    """A lambda has no name that pickle could store."""
    with pytest.raises(ValueError, match=r"at \['a'\]\[0\] is .*cannot be pickled"):
        encode_value({"a": [lambda: 1]}, allow_pickle=True)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_endless_nesting_is_an_error_when_stored(allow_pickle: bool) -> None:
    """A list that contains itself ends in a clear error, not in a crash."""
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises(ValueError, match="100 levels"):
        encode_value({"a": inner}, allow_pickle=allow_pickle)
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    assert again(deep) == deep


def _samples() -> Iterator[Any]:
    yield {
        "__key__": "k",
        "text": "größe",
        "array": np.arange(6, dtype="f4").reshape(2, 3),
        "record": np.zeros(2, [("a", "i4")]),
        "tensor": torch.ones(2, 2, dtype=torch.bfloat16),
        "image": Image.new("P", (3, 2)),
        "more": [1, 2**70, 1.5, None, (b"x", {3}), ShardMember("x", "y", b"z")],
    }


def test_cut_data_is_an_error_at_every_byte() -> None:
    """No beginning of a value is a value."""
    for sample in _samples():
        data = encode_value(sample).data
        for size in range(len(data)):
            with pytest.raises(ValueError):
                decode_value(data[:size])
        with pytest.raises(ValueError, match="follow"):
            decode_value(data + b"N")


def test_damaged_data_is_an_error_or_a_value_when_bits_are_flipped() -> None:
    """Nothing but ValueError and UnsafeDataError comes out of damaged data, and no large memory is asked for."""
    rng = random.Random(zlib.crc32(b"flips"))
    (sample,) = _samples()
    data, decoded = encode_value(sample).data, 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(ValueError, UnsafeDataError):
            decode_value(bytes(damaged))
            decoded += 1
    assert 0 < decoded < 400


def test_lies_about_sizes_are_errors_when_read() -> None:
    """Announced sizes are compared with what is there before anything is made."""
    for data in [
        b"",
        b"?",
        b"l" + (2**62).to_bytes(8, "little"),
        b"d" + (2**63).to_bytes(8, "little"),
        b"s" + (2**64 - 1).to_bytes(8, "little"),
        b"l\1\0\0\0\0\0\0\0" * 5000 + b"N",
        b"a\0\3<f4\1" + (2**61).to_bytes(8, "little") + bytes(8),
        b"a\0\2|O\0\0\0\0\0\0\0\0\0",
        b"x\7Storage\0" + bytes(8),
        b"x\7float32\2" + (2**40).to_bytes(8, "little") * 2 + bytes(8),
        b"m\1L" + (2**31).to_bytes(8, "little") * 2 + b"\0" + bytes(24),
        b"k\3str" + encode_value(("x",)).data,
        b"d\1\0\0\0\0\0\0\0l\0\0\0\0\0\0\0\0N",
    ]:
        with pytest.raises(ValueError):
            decode_value(data)
