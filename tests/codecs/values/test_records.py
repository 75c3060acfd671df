"""The json, msgpack, cbor, torch and pickle fields."""

import datetime
import math
import pickle
import sys
from typing import Any

import cbor2
import msgpack
import pytest
import torch

from tests.codecs.test_table import torch_bytes
from torchdata_wds.codecs import Decoder
from torchdata_wds.codecs.values import records
from torchdata_wds.errors import DecodingError, SampleError, UnsafeDataError


def decode(field: str, data: bytes, **options: Any) -> Any:
    """The value of one field."""
    return Decoder(**options)({"__key__": "k", "__url__": "s.tar", field: data})[field]


class Touch:
    """An object whose unpickling runs a function."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return Touch.ran.append, ("ran",)


def test_json_gives_any_value_when_valid() -> None:
    """Any JSON value decodes, null too; a byte order mark, Infinity and NaN are fine."""
    for data, value in [
        (b"null", None),
        (b' {"a": [1]}\n', {"a": [1]}),
        (b"\xef\xbb\xbf1", 1),
        ('"ä"'.encode(), "ä"),
        (b"-Infinity", -math.inf),
    ]:
        assert decode("json", data) == value
    assert math.isnan(decode("json", b"NaN"))


def test_records_raise_when_damaged() -> None:
    """Cut, doubled, wrongly encoded and endlessly nested values, bytes after the value and huge lengths are errors."""
    for data in [b"", b"{", b"[1] 2", b'"\xff"', "[1]".encode("utf-16"), b"[" * 100_000]:
        with pytest.raises(DecodingError, match="json"):
            decode("json", data)
    for data in [b"", b"\x92\x01", b"\x01\x02", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xa1\xff"]:
        with pytest.raises(DecodingError, match="msgpack"):
            decode("mp", data)
    for data in [b"", b"\x82\x01", b"\x01\x02", b"\xff", b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff"]:
        with pytest.raises(DecodingError, match="cbor"):
            decode("cbor", data)
    for data in [b"", b"garbage", torch_bytes(torch.ones(3))[:-30], torch_bytes(torch.ones(3))[:100]]:
        with pytest.raises(DecodingError, match="torch"):
            decode("pth", data)
    for data in [b"", b"garbage", pickle.dumps([1, 2])[:-1], b"cnot_a_module\nname\n."]:
        with pytest.raises(DecodingError, match="pickle"):
            decode("pkl", data, allow_pickle=True)


def test_msgpack_and_cbor_keep_types_and_any_keys_when_decoded() -> None:
    """Strings and bytes stay apart, keys need not be strings, tagged values become their Python types."""
    record = {1: "text", "b": b"\xff", None: [2.5]}
    assert decode("mp", msgpack.packb(record)) == record
    record = {"when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), 1: b"\xff"}
    assert decode("cbor", cbor2.dumps(record)) == record


def test_decoder_raises_import_error_when_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is an ImportError that names the extra, and no error of the sample."""
    for field, package, extra in [
        ("mp", "msgpack", "msgpack"),
        ("cbor", "cbor2", "cbor"),
        ("txt.zst", "zstandard", "zstd"),
    ]:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"{package}.*pip install 'torchdata_wds\[{extra}\]'") as caught:
            decode(field, b"\x01")
        assert not isinstance(caught.value, SampleError)
        assert caught.value.name == package


def test_torch_raises_and_runs_nothing_when_it_holds_objects() -> None:
    """weights_only holds whatever else is allowed, and torch's advice to turn it off is not passed on."""
    for allow_pickle in [False, True]:
        Touch.ran.clear()
        with pytest.raises(DecodingError, match="weights_only=True") as caught:
            decode("pth", torch_bytes(Touch()), allow_pickle=allow_pickle)
        assert Touch.ran == []
        assert "weights_only=False" not in str(caught.value)


def test_pickle_raises_and_runs_nothing_when_not_allowed() -> None:
    """Pickles are refused by default, under every name, with what to do."""
    for field in ["pyd", "pkl", "pickle", "a.pkl", "PKL", "pkl.gz"]:
        import gzip

        Touch.ran.clear()
        data = pickle.dumps(Touch())
        with pytest.raises(UnsafeDataError, match=r"(?s)'k' in shard s\.tar.*allow_pickle=True.*only=") as caught:
            decode(field, gzip.compress(data) if field.endswith("gz") else data)
        assert Touch.ran == []
        assert not isinstance(caught.value, SampleError)
        assert (caught.value.shard, caught.value.key, caught.value.field) == ("s.tar", "k", field)


def test_pickle_raises_when_wds_secure_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """WDS_SECURE=1 refuses pickles whatever the program allows, also when set later."""
    decoder = Decoder(allow_pickle=True)
    sample = {"pkl": pickle.dumps({1})}
    assert decoder(sample) == {"pkl": {1}}
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE"):
        decoder(sample)


def test_decoder_raises_when_allow_pickle_is_no_bool() -> None:
    """Permission is True or False: a string must not switch pickles on."""
    for allow_pickle in [None, 1, "yes"]:
        with pytest.raises(TypeError, match="allow_pickle"):
            Decoder(allow_pickle=allow_pickle)


def test_msgpack_raises_when_lists_claim_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the field that is at fault then, and a handler may skip it; of a large field the memory error is kept."""

    class Full:
        @staticmethod
        def unpackb(data: bytes, **options: Any) -> Any:
            raise MemoryError

    monkeypatch.setattr(records, "_msgpack", Full)
    with pytest.raises(DecodingError, match="claims more memory than there is") as raised:
        decode("mp", b"\xdd\0\0\0\1" * 100)
    assert isinstance(raised.value.__cause__, ValueError)
    monkeypatch.setattr(records, "_LARGE", 100)
    with pytest.raises(DecodingError) as raised:
        decode("mp", b"\xdd\0\0\0\1" * 100)
    assert isinstance(raised.value.__cause__, MemoryError)
