"""The Encoder: what each field takes, what it refuses and how it says so, users' functions, pickling."""

import bz2
import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import gzip
import io
import itertools
import lzma
import math
import os
import pickle
import re
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
import torch
import webdataset.tenbin
import zstandard

from torchdata_wds import handlers
from torchdata_wds.codecs import CODECS, IMAGE_SPECS, Encoder, decode_sample, encode_sample
from torchdata_wds.codecs import suffixes as suffix_module
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.codecs.plans import describe_value
from torchdata_wds.errors import EncodingError, SampleError
from torchdata_wds.storage import open_compressor

SUFFIXES = ["gz", "bz2", "xz", "zst"]
OPEN = {
    "gz": gzip.decompress,
    "bz2": bz2.decompress,
    "xz": lzma.decompress,
    "zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
}
SAMPLE = {"__key__": "k", "__url__": "shard-1.tar", "cls": 7, "bin": b"x"}
LOOP: list[Any] = []
LOOP.append(LOOP)


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def encode(field: str, value: Any, *args: Any, **options: Any) -> bytes:
    """The bytes of one field."""
    data = encode_sample({"__key__": "k", field: value}, *args, **options)[field]
    assert type(data) is bytes
    return data


def decode(field: str, data: bytes) -> Any:
    """The value of one field."""
    return decode_sample({"__key__": "k", field: data}, allow_pickle=True)[field]


def shout(value: Any) -> bytes:
    """Encodes text in upper case."""
    return str(value).upper().encode()


def encode_all(sample: dict[str, Any]) -> dict[str, Any]:
    """Encodes every field as the bytes of its str."""
    return {field: str(value).encode() for field, value in sample.items() if not field.startswith("__")}


class Odd:
    """A value that nothing but pickle takes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------- the encoder itself
def test_encoder_gives_a_new_dict_when_called() -> None:
    """The given sample is never changed; order and names stay."""
    sample = dict(SAMPLE)
    result = Encoder()(sample)
    assert result == {"__key__": "k", "__url__": "shard-1.tar", "cls": b"7", "bin": b"x"}
    assert list(result) == list(SAMPLE)
    assert sample == SAMPLE
    assert encode_sample(collections.ChainMap(sample)) == result


def test_encoder_copies_metadata_when_names_have_two_underscores() -> None:
    """Names like `__x__` are kept as they are, whatever they hold."""
    for encoder in [True, False, "rgb8", {"key__": shout, "x": shout}]:
        meta = {"__key__": "a", "__url__": None, "__x.cls__": 1.5, "__local_path__": object()}
        assert Encoder(encoder)(meta) == meta


def test_bytes_pass_untouched_when_in_any_field() -> None:
    """Bytes are data already: nobody looks at them, and all become bytes."""
    for encoder, field in itertools.product(
        [True, False, {"txt": shout, "cls": shout}], sorted({*CODECS, "bin", "mp4", "a.json"})
    ):
        view = memoryview(bytes(range(12))).cast("B", (3, 4))
        for value in (b"\xffany", bytearray(b"\xffany"), memoryview(b"\xffany")):
            assert encode(field, value, encoder) == b"\xffany"
        assert encode(field, view, encoder) == bytes(range(12))
        assert encode(field, memoryview(bytes(range(12)))[::2], encoder) == bytes(range(0, 12, 2))


def test_encoder_takes_only_bytes_when_false() -> None:
    """Nothing is encoded: what is no bytes is an error that says so."""
    assert Encoder(False)({"__key__": "k", "json": bytearray(b"x"), "a": b""}) == {
        "__key__": "k",
        "json": b"x",
        "a": b"",
    }
    for value in (7, "text", None, [b"x"]):
        with pytest.raises(EncodingError, match=r"field 'json' of sample 'k' is not encoded: expected bytes") as caught:
            encode("json", value, False)
        assert (caught.value.key, caught.value.field) == ("k", "json")


def test_encoder_takes_every_image_spec_when_a_str() -> None:
    """Other fields are encoded by the table."""
    for spec in IMAGE_SPECS:
        assert encode("cls", 7, spec) == b"7"
    with pytest.raises(ValueError, match=r"did you mean 'torchrgb'"):
        Encoder("torchrgb9")


def test_mapping_is_asked_first_when_a_field_ends_in_its_names() -> None:
    """The longest name that fits wins, in any case, with or without a dot before it; the table serves the rest."""
    encoder = Encoder({".txt": shout, "cls; seg.png": lambda _: bytearray(b"mask"), "Big.txt": lambda _: b"big"})
    sample = {"__key__": "k", "txt": "a", "x.TXT": "b", "x.big.txt": "c", "xtxt": b"d", "seg.png": 0, "json": 1}
    assert encoder(sample) == {
        "__key__": "k",
        "txt": b"A",
        "x.TXT": b"B",
        "x.big.txt": b"big",
        "xtxt": b"d",
        "seg.png": b"mask",
        "json": b"1",
    }
    assert Encoder({"txt": shout, "a.txt": lambda _: b"exact"})({"a.txt": "x"}) == {"a.txt": b"exact"}


def test_mapping_is_asked_for_none_and_its_result_compressed_when_it_has_the_field() -> None:
    """A user's function may know what None is; bytes it is not asked for. Results with a suffix read back."""
    assert encode("txt", None, {"txt": shout}) == b"NONE"
    assert encode("txt", b"low", {"txt": shout}) == b"low"
    for name in ("json", "json.gz", "gz"):
        assert decode("x.json.gz", encode("x.json.gz", 5, {name: shout})) == 5
    packed = gzip.compress(b"5")
    assert encode("x.json.gz", 5, {"json.gz": lambda _: packed}) == packed


def test_callable_encodes_the_whole_sample_when_given() -> None:
    """It gets a dict of its own; the key is put back where it is missing."""
    sample = dict(SAMPLE)
    assert Encoder(encode_all)(sample) == {"__key__": "k", "cls": b"7", "bin": b"b'x'"}
    assert Encoder(lambda sample: sample.pop("cls") and {"__key__": "new", "a": memoryview(b"x")})(sample) == {
        "__key__": "new",
        "a": b"x",
    }
    assert sample == SAMPLE
    assert Encoder(lambda _: {"a": b""})({}) == {"a": b""}


def test_callable_is_refused_when_its_result_is_no_mapping_of_bytes() -> None:
    """The message names the function or the field."""
    with pytest.raises(EncodingError, match=r"field 'a' of sample 'k' is not encoded"):
        Encoder(lambda _: {"a": 1})(SAMPLE)
    with pytest.raises(EncodingError, match=r"sample 'k'.*must return a mapping.*list"):
        Encoder(lambda _: [b"x"])(SAMPLE)  # type: ignore[arg-type, return-value]

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("width")

    with pytest.raises(EncodingError, match=r"sample 'k' cannot be encoded by .*fail.*width.*handler=") as caught:
        Encoder(fail)(SAMPLE)
    assert isinstance(caught.value.__cause__, KeyError)


def test_mapping_is_refused_when_its_function_fails_or_returns_no_bytes() -> None:
    """The message names key, field and function, and the exception is chained; a missing package stays what it is."""
    for result in ["text", None, 5, [b"x"]]:
        with pytest.raises(EncodingError, match=r"field 'txt' of sample 'k'.*function.*<lambda>.*must return bytes"):
            encode("txt", 1, {"txt": lambda _, result=result: result})

    def fail(value: Any) -> bytes:
        raise value

    with pytest.raises(EncodingError, match=r"field 'txt' of sample 'k'.*by function .*fail.*KeyError") as caught:
        encode("txt", KeyError("x"), {"txt": fail})
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(MissingPackageError):
        encode("txt", MissingPackageError("x"), {"txt": fail})


def test_encoder_raises_when_its_argument_is_wrong() -> None:
    """The constructor says what is valid: a name is a field or an extension, and not metadata."""
    for wrong in [None, 3, b"rgb", ["rgb8"], {"jpg": 3}, {3: shout}]:
        with pytest.raises(TypeError, match="encoder must"):
            Encoder(wrong)
    for wrong in ["", ".", " "]:
        with pytest.raises(ValueError, match="such as"):
            Encoder({wrong: shout})
    for name in ["__key__", "a.txt __url__"]:
        with pytest.raises(ValueError, match="never encoded"):
            Encoder({name: shout})


def test_encoder_pickles_small_when_it_was_used() -> None:
    """Only the arguments are pickled, before and after use, and the copy works."""
    for argument in (True, False, "torch", {"txt": shout}, encode_all):
        encoder = Encoder(argument, jpeg_quality=80)
        before = pickle.dumps(encoder)
        assert encoder({"txt": b"x"})
        assert pickle.dumps(encoder) == before
        again = pickle.loads(before)
        assert repr(again) == repr(encoder)
        assert again({"txt": b"x"}) == encoder({"txt": b"x"})


def test_encoder_repr_shows_its_arguments_when_not_default() -> None:
    """The repr is short and says what was asked for."""
    assert repr(Encoder()) == "Encoder()"
    assert repr(Encoder(False, png_compression=1)) == "Encoder(False, png_compression=1)"
    assert repr(Encoder("torch")) == "Encoder('torch')"
    assert repr(Encoder({"txt": shout}, jpeg_quality=9)) == "Encoder({'txt': shout}, jpeg_quality=9)"
    assert repr(Encoder(encode_all)) == "Encoder(encode_all)"
    assert not isinstance(Encoder(), collections.abc.Collection)


def test_encoder_forgets_plans_when_field_names_never_end() -> None:
    """Ever new field names do not fill the memory."""
    encoder = Encoder()
    for number in range(3000):
        assert encoder({f"{number}.cls": 1}) == {f"{number}.cls": b"1"}
    assert len(encoder._plans) <= 1000


# --------------------------------------------------------------------------------------------- what a field refuses
REFUSED: list[tuple[str, Any, str]] = [
    *[(field, None, "None") for field in ("txt", "json", "pkl", "cls", "png", "bin", "x.json.gz", "msgpack")],
    ("bin", "text", ".encode()"),
    ("bin", 7, "bytes only"),
    ("mp4", [1], "bytes only"),
    ("gz", "text", ".txt"),
    ("txt", 7, "expected a str"),
    ("txt", "a\ud800", "surrogate"),
    ("txt.gz", 7, "expected a str"),
    ("cls", 7.0, "int()"),
    ("cls", np.float32(7), "int()"),
    ("cls", torch.tensor(7.0), "int()"),
    ("cls", np.array([7, 8]), "int()"),
    ("cls", torch.tensor([7, 8]), "int()"),
    ("cls", "7.0", "decimal integer"),
    ("cls", "", "decimal integer"),
    ("cls", "1_000", "decimal integer"),
    ("cls", 10**5000, "digits"),
    ("cls", [7], "int()"),
    ("json", {1: 2}, "key 1 of type int"),
    ("json", [{"a": ({None: 1},)}], "key None"),
    ("json", {"a": {1, 2}}, "set"),
    ("json", np.array(["a"]), "<U1"),
    ("json", np.complex64(1), "complex64"),
    ("json", np.longdouble(1), "float"),
    ("json", np.datetime64("2020-01-01"), "datetime64"),
    ("json", np.ma.masked_array([1.0], [True]), "MaskedArray"),
    ("json", [torch.zeros(2)], ".tolist()"),
    ("json", b"x".__class__, "type"),
    ("json", [b"x"], "bytes"),
    ("json", "\ud83d\ude00", "surrogate pair"),
    ("json", LOOP, "contains itself"),
    ("json", nested(5000), "500 levels"),
    ("npy", [1, 2], "numpy.asarray()"),
    ("npy", torch.zeros(2), ".numpy()"),
    ("npy", np.array([{}, None]), "pickle"),
    ("npy", np.zeros(2, [("a", object)]), "pickle"),
    ("npy", np.ma.masked_array([1.0], [True]), ".filled()"),
    ("npz", [1], "numpy.asarray()"),
    ("npz", {"a": [1]}, "'a'"),
    ("npz", {1: np.zeros(1)}, "str"),
    ("npz", {"a\0b": np.zeros(1)}, "NUL"),
    ("npz", {"a\\b": np.zeros(1)}, "backslash"),
    ("npz", {"a" * 70_000: np.zeros(1)}, "too long"),
    ("npz", {"\ud800": np.zeros(1)}, "surrogate"),
    ("pth", Odd(), "weights_only"),
    ("pth", [torch.zeros(2), Odd()], "weights_only"),
    ("pth", lambda: 0, "pickle"),
    ("pth", nested(100_000), "nested too deeply"),
    ("ten", [[1]], "numpy.asarray()"),
    ("ten", {"a": np.zeros(1)}, "dict"),
    ("ten", [np.zeros(2, bool)], "bool"),
    ("ten", [np.zeros(2), np.zeros(2, "c8")], "item 1"),
    ("ten", np.zeros((1,) * 10), "10 dimensions"),
    ("ten", np.ma.masked_array([1.0], [True]), ".filled()"),
    ("msgpack", 2**70, "OverflowError"),
    ("msgpack", Odd(), "Odd"),
    ("msgpack", {(1, 2): 3}, "read back"),
    ("msgpack", "\ud800", "surrogates"),
    ("msgpack", LOOP, "recursion"),
    ("cbor", Odd(), "Odd"),
    ("cbor", LOOP, "contains itself"),
    ("cbor", nested(5000), "nested too deeply"),
    ("cbor", nested(400), "nested too deeply"),
    ("cbor", cbor2.CBORTag(0, "x"), "CBORTag"),
    ("cbor", [re.compile("x", re.I)], "re.Pattern"),
    ("cbor", {"a": [memoryview(b"x")]}, "memoryview"),
    ("cbor", decimal.Decimal("-Infinity"), "Decimal"),
    ("cbor", [decimal.Decimal("NaN")], "Decimal"),
    ("cbor", {"a": datetime.datetime(2020, 1, 1)}, "tzinfo"),
    ("cbor", datetime.timedelta(1), "timedelta"),
    ("cbor", {frozenset([1j])}, "complex"),
    ("cbor", [np.int64(3)], ".item()"),
    ("cbor", np.arange(3), ".tolist()"),
    ("cbor", {"a": torch.arange(3)}, ".tolist()"),
    ("msgpack", [np.int64(3)], ".item()"),
    ("msgpack", np.arange(3), ".tolist()"),
    ("pth", {1, 2}, "sorted"),
    ("pth", {"a": (torch.zeros(2), frozenset("ab"))}, "sorted"),
    ("pkl", lambda: 0, "pickle"),
    ("pkl", nested(100_000), "nested too deeply"),
    (7, 7, "must be a str"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("field", "value", "part"), REFUSED, ids=range(len(REFUSED)))
def test_value_is_refused_when_it_could_not_be_read_back(field: str, value: Any, part: str) -> None:
    """The message names key and field, what was found and what to do; the cause is chained; it survives pickling."""
    with pytest.raises(EncodingError) as caught:
        encode(field, value)
    error = caught.value
    assert f"field {field!r} of sample 'k'" in str(error)
    assert (error.key, error.field) == ("k", field)
    assert isinstance(error, SampleError)
    assert part in str(error)
    assert len(str(error)) < 1200
    assert error.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# ------------------------------------------------------------------------------------------------ what a field takes
def test_text_reads_back_when_any_characters() -> None:
    """Marks at the beginning are kept, by one more before them."""
    for text in ["", "a\r\n", "größer😀", "\ufeffmark", "\ufeff\ufeff", "\0", np.str_("x")]:
        assert decode("txt", encode("txt", text)) == text


def test_integer_is_written_when_it_is_one_of_any_sort() -> None:
    """A str is written as it is, everything else as decimal digits."""
    for value, data in [
        (0, b"0"), (-3, b"-3"), (10**30, b"1" + b"0" * 30), (True, b"1"), (np.int8(-3), b"-3"),
        (np.uint64(2**64 - 1), b"18446744073709551615"), (np.bool_(True), b"1"), (np.array(5), b"5"),
        (np.array(False), b"0"), (torch.tensor(5), b"5"), (torch.tensor([5]), b"5"), (torch.tensor(True), b"1"),
        (" 007\n", b" 007\n"), ("-7", b"-7"),
    ]:  # fmt: skip
        assert encode("cls", value) == data
        assert decode("cls", data) == int(value)


def test_json_is_compact_and_plain_when_written() -> None:
    """UTF-8 without blanks, in the given order; tuples are lists; a str is a JSON string."""
    value = {"b": (1, 2.5, None, True), "a": "ü", "": {}, "n": float("inf")}
    assert encode("json", value) == '{"b":[1,2.5,null,true],"a":"ü","":{},"n":Infinity}'.encode()
    assert decode("json", encode("json", '{"a": 1}')) == '{"a": 1}'
    assert encode("json", float("nan")) == b"NaN"
    assert encode("json", collections.OrderedDict(a=1)) == b'{"a":1}'


@pytest.mark.parametrize(
    ("value", "word"),
    [((1, 2), "tuple"), ({"a": [{"b": ("x",)}]}, "tuple"), (float("nan"), "NaN"), ({"a": [-math.inf]}, "NaN")],
)
def test_json_warns_once_when_others_would_read_something_else(
    value: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A tuple reads back as a list, and NaN is not JSON: both are written, and one line says so."""
    handlers.said.clear()
    encode("json", value)
    encode("json", value)
    assert [word in record.message for record in caplog.records] == [True]


def test_json_is_silent_when_everything_reads_back_equal(caplog: pytest.LogCaptureFixture) -> None:
    """A str that says NaN is a str."""
    handlers.said.clear()
    encode("json", {"a": ["NaN", "Infinity", 1.5, None], "NaN": np.arange(3)})
    assert not caplog.records


def test_json_reads_back_when_it_holds_lone_surrogates_or_is_deep() -> None:
    """Lone surrogates make it ASCII; the limit of depth is fixed: 500 levels."""
    for value in ("\ud800", {"\udcff": ["\ud800 ü", "\udc00"]}, "\ude00\ud83d"):
        assert decode("json", encode("json", value)) == value
        assert encode("json", value).isascii()
    assert decode("json", encode("json", nested(400))) == nested(400)
    assert decode("json", encode("json", {"a": [1]} | {"b": [1]})) == {"a": [1], "b": [1]}


def test_json_writes_numbers_and_lists_when_given_numpy() -> None:
    """NumPy's scalars and arrays are numbers and lists, wherever they stand."""
    value = {"a": np.arange(6).reshape(2, 3), "b": [np.float32(0.1), np.bool_(True), np.int8(3)], "c": np.array(2.5)}
    assert decode("json", encode("json", value)) == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [float(np.float32(0.1)), True, 3],
        "c": 2.5,
    }
    assert encode("json", np.array([True, False])) == b"[true,false]"


def test_npy_reads_back_when_of_any_type() -> None:
    """Type, shape and values come back; NumPy itself reads the file."""
    for array in [
        np.float64(3),
        np.bool_(True),
        np.zeros((0, 4)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12)[::2],
        np.arange(3, dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, [("a", "i4"), ("größe", "f8", (2,)), ("漢", "u1")]),
        np.zeros(2, [(f"field{number}", "u1") for number in range(300)]),
    ]:
        data = encode("npy", array)
        for value in (decode("npy", data), np.load(io.BytesIO(data))):
            assert (value.dtype, value.shape) == (array.dtype, array.shape)
            assert np.array_equal(value, array)


def test_npz_is_reproducible_and_read_by_numpy_when_written() -> None:
    """No time and no system is in the archive."""
    arrays = {"b": np.arange(3), "a/ü.npy": np.float32(1), "": np.zeros(0)}
    data = encode("npz", arrays)
    assert data == encode("npz", dict(arrays))
    assert list(decode("npz", data)) == list(arrays)
    assert np.array_equal(np.load(io.BytesIO(data))["b"], np.arange(3))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            assert (entry.date_time, entry.create_system) == ((1980, 1, 1, 0, 0, 0), 3)
            assert entry.compress_type == zipfile.ZIP_DEFLATED
    assert decode("npz", encode("npz", {})) == {}
    assert list(decode("npz", encode("npz", np.arange(3)))) == ["arr_0"]


def test_torch_keeps_shards_small_when_tensors_are_views() -> None:
    """A view takes what it shows, in containers too; the user's tensors stay views."""
    big = torch.arange(1_000_000)
    assert len(encode("pth", big[10:20])) < 3000
    value = {"a": [big[5:9], (big[::100_000],)], "b": big[7:12], "c": 1, "d": torch.zeros(2).requires_grad_()}
    data = encode("pth", [big[5:9], {"x": (big[8:20],)}])
    assert len(data) < 3000
    assert value["b"].untyped_storage().nbytes() == 8_000_000
    assert decode("pth", data)[1]["x"][0].tolist() == list(range(8, 20))
    again = decode("pth", encode("pth", value))
    assert again["a"][1][0].tolist() == list(range(0, 1_000_000, 100_000))
    assert again["d"].requires_grad


def test_torch_keeps_sharing_when_tensors_share_memory() -> None:
    """Tensors that overlapped before overlap after, and one tensor twice is one tensor."""
    big = torch.arange(1000)
    first, second, third, fourth = decode(
        "pth", encode("pth", [big[10:20], (big[15:25],), big.view(10, 100)[0, 12], 0])
    )
    second[0][0] = -1
    first[2] = -2
    assert first.tolist() == [10, 11, -2, 13, 14, -1, 16, 17, 18, 19]
    assert third.item() == -2
    assert fourth == 0
    small = torch.zeros(3)
    again = decode("pth", encode("pth", {"a": small, "b": small, "c": torch.zeros(100)[:2]}))
    again["a"][0] = 1
    assert again["b"][0] == 1


@pytest.mark.filterwarnings("ignore:Validating sparse")  # torch 2.14 says that it checks
def test_torch_reads_back_when_weights_only_accepts_it() -> None:
    """What loads without running code is written."""
    for value in [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.zeros(3, 4).t(),
        torch.zeros(1).expand(5),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Linear(2, 2).state_dict(),
        torch.Size([1, 2]),
        torch.float32,
        {"a": (1, 2.5, "x", None, True, b"y", {1: [2]})},
        collections.OrderedDict(a=1),
        "text",
    ]:
        again = decode("pth", encode("pth", value))
        if isinstance(value, torch.Tensor):
            assert again.shape == value.shape
            assert torch.equal(again.to_dense(), value.detach().to_dense())
        elif isinstance(value, dict) and "weight" in value:
            assert torch.equal(again["weight"], value["weight"])
        else:
            assert again == value


def test_tenbin_has_webdatasets_bytes_when_both_can() -> None:
    """The bytes are those that webdataset writes, and it reads them."""
    for dtype in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u8"]:
        shapes: list[tuple[int, ...]] = [(0,), (3,), (16,), (2, 3, 5), (1,) * 9]
        arrays = [np.arange(np.prod(shape)).astype(dtype).reshape(shape) for shape in shapes]
        data = encode("ten", arrays)
        assert data == bytes(webdataset.tenbin.encode_buffer(arrays))
        for theirs, array in zip(webdataset.tenbin.decode_buffer(data), arrays, strict=True):
            assert theirs.dtype == array.dtype
            assert np.array_equal(theirs, array)


def test_tenbin_writes_any_order_when_given_arrays() -> None:
    """Big-endian, Fortran, strided arrays and scalars are written by value; uint32 too; one array is a list of one."""
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    for value in (array, array.astype(">u4"), np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2]):
        assert encode("ten", value) == encode("ten", [array]) == encode("ten", (array,))
    assert decode("ten", encode("ten", array))[0].tolist() == array.tolist()
    assert decode("ten", encode("ten", np.float32(2)))[0] == 2
    assert encode("ten", []) == b""


def test_records_read_back_when_they_hold_bytes_and_any_keys() -> None:
    """Both keep bytes apart from str, and numbers as keys; pickle needs no permission to write, and is protocol 4."""
    value = {1: b"x", "a": [None, True, 2.5, -(2**40)], b"k": {"ü": ""}}
    for field in ("mp", "msg", "msgpack", "cbor"):
        assert decode(field, encode(field, value)) == value
    assert decode("cbor", encode("cbor", {(1, 2): {"a", "b"}})) == {(1, 2): {"a", "b"}}
    assert encode("pkl", [1]) == pickle.dumps([1], 4)
    assert decode("pyd", encode("pyd", Odd())) == Odd()


class Colour(enum.IntEnum):
    """A sort of int."""

    RED = 1


def test_cbor_reads_back_equal_when_it_holds_known_types() -> None:
    """Alone, in a list, and as a value of a dict."""
    for value in [
        datetime.datetime(2020, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC),
        datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-5))),
        datetime.date(2020, 1, 1),
        decimal.Decimal("1.50"),
        fractions.Fraction(-1, 3),
        uuid.UUID(int=5),
        -(2**70),
        {1, "a", (1, 2), frozenset([3])},
        frozenset([1]),
        Colour.RED,
        np.float64(2.5),
        bytearray(b"x"),
        collections.OrderedDict(b=1, a=2),
    ]:
        for given in (value, [value, 1], {"a": [value], "b": {1}}):
            if not isinstance(given, bytearray):
                assert decode("cbor", encode("cbor", given)) == given


def test_cbor_reads_back_when_it_is_nested_but_not_too_deeply() -> None:
    """What is written is read; sets in sets take twice the time for each level, and end sooner."""
    value: Any = frozenset()
    for _ in range(11):
        value = frozenset([value])
    assert decode("cbor", encode("cbor", value)) == value
    with pytest.raises(EncodingError, match="nested too deeply"):
        encode("cbor", frozenset([frozenset([value])]))
    assert decode("cbor", encode("cbor", nested(140))) == nested(140)


def test_torch_keeps_shards_small_when_views_are_parameters_or_empty_or_conjugated() -> None:
    """Every sort of view takes what it shows, and keeps its type, its values and its gradient's flag."""
    big, wave = torch.arange(100_000.0), torch.randn(100_000, dtype=torch.complex64)
    weight, frozen = torch.nn.Parameter(big[:4]), torch.nn.Parameter(big[:3], requires_grad=False)
    values: list[list[torch.Tensor]] = [
        [weight], [frozen, big[1:4]], [weight, weight], [big[:0]], [big[:0], big[5:9]], [big[:0], big[3:3]],
        [wave[:3].conj()], [wave[:3].conj().imag], [wave[:3].conj(), wave[1:4]],
    ]  # fmt: skip
    for value in values:
        data = encode("pth", value)
        assert len(data) < 3000
        for tensor, again in zip(value, decode("pth", data), strict=True):
            assert type(again) is type(tensor)
            assert again.requires_grad == tensor.requires_grad
            assert torch.equal(again, tensor)
    one, other = decode("pth", encode("pth", [frozen, big[1:4]]))
    other[0] = -1
    assert one[1] == -1


def test_torch_keeps_attributes_and_loops_when_there_are_some() -> None:
    """Attributes of a tensor are written with it, and what does not load is refused; a list may hold itself."""
    view: Any = torch.zeros(100)[:2]
    view.note = "kept"
    assert decode("pth", encode("pth", [view]))[0].note == "kept"
    view.note = Odd()
    with pytest.raises(EncodingError, match="weights_only"):
        encode("pth", view)
    value: list[Any] = [torch.zeros(100)[:2]]
    value.append(value)
    again = decode("pth", encode("pth", value))
    assert again[1] is again


class Broken:
    """A value whose shape cannot be asked for."""

    dtype = 1

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    @property
    def shape(self) -> Any:
        if self.error:
            raise self.error
        return 5


def test_value_is_described_when_its_own_code_fails() -> None:
    """The type at least is named, and the error is the encoder's."""
    for value in [Broken(None), Broken(RuntimeError("no"))]:
        assert "Broken" in describe_value(value)
        for field in ("json", "png", "bin", "npy", "cbor"):
            with pytest.raises(EncodingError, match=r"field .* of sample 'k'.*Broken"):
                encode(field, value)


def same(sample: dict[str, Any]) -> dict[str, Any]:
    """Changes nothing."""
    return sample


def test_field_is_refused_when_its_name_is_no_str() -> None:
    """The message names the field, whatever encodes."""
    for encoder in [True, False, "rgb8", {"x": shout}, same]:
        with pytest.raises(SampleError, match=r"field 7 of sample 'k'.*must be a str"):
            Encoder(encoder)({"__key__": "k", 7: b"x"})  # type: ignore[dict-item]


# ------------------------------------------------------------------------------------------------------- compression
def test_value_is_compressed_when_the_field_has_a_suffix() -> None:
    """Others read it, and the rest of the name says the type."""
    for suffix in SUFFIXES:
        assert OPEN[suffix](encode(f"x.json.{suffix}", [1])) == b"[1]"
        assert OPEN[suffix](encode(f"JSON.{suffix.upper()}", [1])) == b"[1]"
        assert encode(f"json.{suffix}", [1]) == encode(f"json.{suffix}", [1])
        assert decode(f"json.gz.{suffix}", encode(f"json.gz.{suffix}", [1])) == [1]


def test_bytes_are_compressed_when_they_are_not_whole_in_the_compression() -> None:
    """Whole streams pass untouched, several too; anything else is compressed, and reads back as it was given."""
    for suffix in SUFFIXES:
        whole = encode(suffix, b"content" * 20)
        other = encode("xz" if suffix != "xz" else "gz", b"content")
        for data in (whole, whole + whole):
            assert encode(f"x.dat.{suffix}", data) == data
            assert encode(f"x.dat.{suffix}", memoryview(data)) == data
        for data in (b"", b"content", whole[:-1], whole[:4], whole + b"garbage", other):
            assert decode(f"x.dat.{suffix}", encode(f"x.dat.{suffix}", data)) == data


def test_bytes_are_compressed_twice_when_the_field_has_two_suffixes() -> None:
    """Every level is whole: what is compressed once already is only compressed around."""
    inner = encode("gz", b"7")
    for data in (b"7", inner, encode("xz", inner)):
        assert lzma.decompress(encode("cls.gz.xz", data)) == inner


def test_bytes_are_refused_when_they_unpack_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that readers would refuse is not written."""
    monkeypatch.setattr(suffix_module, "DEFAULT_MAX_BYTES", 1000)
    with pytest.raises(EncodingError, match=r"field 'dat.gz' of sample 'k'.*decompresses to more than"):
        encode("dat.gz", gzip.compress(bytes(2000)))


def test_encoder_raises_import_error_when_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, and is not an EncodingError: no sample could be written."""
    for field, module in [("json.zst", "zstandard"), ("msgpack", "msgpack"), ("cbor", "cbor2")]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingPackageError, match="pip install"):
            encode(field, [1])


def test_gzip_has_no_time_when_written() -> None:
    """No time and no name; the compressors are those of whole shards."""
    assert encode("gz", b"x")[:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
    for suffix in SUFFIXES:
        compressor = open_compressor(suffix)
        assert encode(suffix, b"x" * 99) == compressor.compress(b"x" * 99) + compressor.flush()


# --------------------------------------------------------------------------------------------------- reproducibility
@pytest.mark.slow
def test_bytes_are_the_same_when_another_process_encodes(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the process nor its random hashes nor the time show in the bytes."""
    code = (
        "import hashlib, numpy as np, torch, torchdata_wds.codecs as codecs\n"
        "names = {'a', 'b', 'c', 'größe'}\n"
        "big = torch.arange(1000)\n"
        "pixels = (np.arange(300).reshape(10, 10, 3) * 7).astype(np.uint16)\n"
        "sample = {'txt': 'ü', 'cls': 7, 'json': {'b': [1, 2.5], 'a': None}, 'npy': np.arange(9.0),\n"
        "          'npz': {'b': np.arange(3), 'a': np.ones(2)}, 'ten': [np.arange(5)], 'pkl': {'a': [1]},\n"
        "          'pth': {'w': big[3:9], 'v': (big[5:12],), 'n': 3, 's': 'x'}, 'cbor': {'s': names},\n"
        "          'msgpack': {'b': 1, 'a': b'x'}, 'deep.png': pixels, 'deep.ppm': pixels,\n"
        "          'deep.tif': pixels[:, :, 0],\n"
        "          **{'x.json.' + suffix: [1] for suffix in ('gz', 'bz2', 'xz', 'zst')},\n"
        "          **{field: pixels.astype(np.uint8) for field in ('jpg', 'png', 'webp', 'bmp', 'tif', 'ppm')}}\n"
        "for field, data in codecs.encode_sample(sample).items():\n"
        "    print(field, hashlib.sha256(data).hexdigest())\n"
    )
    command, root = [sys.executable, "-W", "ignore", "-c", code], Path(__file__).parents[2]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=120, check=True)
    exec(compile(code, "encode", "exec"), {})
    assert len(done.stdout.splitlines()) == 23
    assert capsys.readouterr().out == done.stdout
