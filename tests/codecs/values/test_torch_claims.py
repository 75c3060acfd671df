"""Torch fields that ask for memory: what ``torch.save`` writes loads, and what claims more than it has does not."""

import collections
import io
import itertools
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchdata_wds.codecs import Decoder
from torchdata_wds.codecs.values.torch_claims import check_claims
from torchdata_wds.errors import DecodingError

LARGE = 1 << 31


def name(path: str) -> bytes:
    """A global: ``module name``."""
    module, _, last = path.rpartition(".")
    return b"c%s\n%s\n" % (module.encode(), last.encode())


def value(item: Any) -> bytes:
    """A number, a text, a tuple, or pickled already."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, tuple):
        return b"(" + b"".join(map(value, item)) + b"t"
    if isinstance(item, bool):
        return b"\x88" if item else b"\x89"
    if isinstance(item, int):
        return b"\x8a\x08" + struct.pack("<q", item)
    return b"X" + struct.pack("<I", len(item)) + item.encode()


def call(path: str, *arguments: Any) -> bytes:
    return name(path) + value(arguments) + b"R"


def storage(count: int, kind: str = "torch.FloatStorage", key: str = "0") -> bytes:
    """A reference to a storage; there is one of four bytes."""
    return value(("storage", name(kind), key, "cpu", count)) + b"Q"


def tensor(source: bytes, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", source, 0, shape, strides, False, hooks)


def repeated(item: bytes, function: str, *arguments: Any) -> bytes:
    """A list of a thing and very many copies of it, each of a few bytes."""
    head, *tail = (b"h\0", *map(value, arguments))
    one = name(function) + b"(" + head + b"".join(tail) + b"tR"
    return b"](" + item + b"q\0" + one * 20_000 + b"e"


def layout(kind: str) -> bytes:
    return call("torch.serialization._get_layout", f"torch.{kind}")


def hexed(times: int) -> bytes:
    """A text that is twice as long each time."""
    made = call("_codecs.encode", "x" * 100, "latin1")
    for _ in range(times):
        made = call("_codecs.encode", made, "hex")
    return made


def keys(count: int, *, tuples: bool = False) -> list[bytes]:
    """Numbers that all have the hash 0, or tuples of them."""
    numbers = [b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little") for number in range(8, count + 8)]
    return [value((number,)) for number in numbers] if tuples else numbers


WIDE = tensor(storage(1), (1 << 33,), (0,))

BOMBS: dict[str, bytes] = {
    "bytearray": call("builtins.bytearray", LARGE),
    "bytearray by its old name": call("__builtin__.bytearray", LARGE),
    "many bytearrays": b"](" + call("builtins.bytearray", 1 << 20) * 20_000 + b"e",
    "a bytearray by another function": call(
        "torch._tensor._rebuild_from_type_v2", name("builtins.bytearray"), name("torch.Tensor"), (LARGE,), b"N"
    ),
    "hex of hex": hexed(40),
    "copies of a text": repeated(value("x" * 100_000), "builtins.bytearray", "latin1"),
    "copies of a list": repeated(b"](" + b"K\1" * 100_000 + b"e", "builtins.set"),
    "keys of one hash": b"}(" + b"K\0".join([*keys(400), b""]) + b"u",
    "keys of one hash, one by one": b"}" + b"K\0s".join([*keys(400), b""]),
    "tuples of one hash": b"}(" + b"K\0".join([*keys(400, tuples=True), b""]) + b"u",
    "a set of one hash": call("builtins.set", b"](" + b"".join(keys(400)) + b"e"),
    "pairs of one hash": call(
        "collections.OrderedDict", b"](" + b"".join(key + b"K\0\x86" for key in keys(400)) + b"e"
    ),
    "a tensor by its size": call("torch.Tensor", LARGE),
    "a tensor by its sizes": call("torch.FloatTensor", 1 << 16, 1 << 16),
    "a tensor by a new object": name("torch.Tensor") + value((LARGE,)) + b"\x81",
    "a parameter": call("torch.nn.parameter.Parameter", call("torch.DoubleTensor", LARGE)),
    "a storage by its size": call("torch.storage.UntypedStorage", LARGE),
    "a typed storage": call("torch.storage.TypedStorage", LARGE),
    "a storage that is not there": tensor(storage(LARGE), (LARGE,), (1,)),
    "a storage of another size": tensor(storage(2), (2,), (1,)),
    "a tensor that its storage has no room for": tensor(storage(1), (LARGE,), (1,)),
    "strides that its storage has no room for": tensor(storage(1), (2,), (LARGE,)),
    "a state that its storage has no room for": call("torch.Tensor") + value((storage(1), 0, (LARGE,), (1,))) + b"b",
    "a quantized tensor": call(
        "torch._utils._rebuild_qtensor",
        *(storage(4, "torch.QUInt8Storage"), 0, (LARGE,), (0,)),
        *((name("torch.per_tensor_affine"), b"G" + bytes(8), 0), False, call("collections.OrderedDict")),
    ),
    "scales of a quantized tensor": call(
        "torch._utils._rebuild_qtensor",
        *(storage(4, "torch.QUInt8Storage"), 0, (1,), (1,)),
        *((name("torch.per_channel_affine"), WIDE, WIDE, 0), False, call("collections.OrderedDict")),
    ),
    "indices of a sparse tensor": call(
        "torch._utils._rebuild_sparse_tensor", layout("sparse_coo"), (WIDE, WIDE, (LARGE,))
    ),
    "a copy of a wide view": call(
        "torch._utils._rebuild_device_tensor_from_cpu_tensor", WIDE, name("torch.float64"), "cpu", False
    ),
}


def packed(content: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as ``torch.save`` writes them, of a pickle made by hand."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        parts = {
            "data.pkl": b"\x80\x02" + content + b".",
            "version": b"3\n",
            "byteorder": b"little",
            "data/0": bytes(4),
        }
        for part, data in parts.items():
            archive.writestr(f"archive/{part}", data)
    return out.getvalue()


def decode(data: bytes, **options: Any) -> Any:
    return Decoder(**options)({"__key__": "k", "pth": data})["pth"]


@pytest.mark.parametrize("kind", BOMBS)
def test_decode_torch_refuses_before_anything_is_loaded_when_a_field_claims_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field of some kilobytes does not take gigabytes, whatever it calls."""
    monkeypatch.setattr(torch, "load", None)
    data = packed(BOMBS[kind], compression=zipfile.ZIP_DEFLATED)
    assert len(data) < 10_000
    with pytest.raises(DecodingError, match="ClaimError"):
        decode(data)


def test_decode_torch_refuses_when_an_old_file_claims_memory() -> None:
    """Files from before 2020 are pickles one behind the other, and storages after them."""
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    claims = value(("storage", name("torch.FloatStorage"), "0", "cpu", LARGE, b"N")) + b"Q"
    with pytest.raises(DecodingError, match="ClaimError"):
        decode(head + b"\x80\x02" + tensor(claims, (LARGE,), (1,)) + b".")


def make_values() -> dict[str, Callable[[], Any]]:
    return {
        "tensor": lambda: torch.arange(6).reshape(2, 3),
        "view": lambda: torch.arange(12)[2:9:2],
        "wide view": lambda: torch.zeros(1).expand(1000),
        "empty": lambda: torch.zeros(0, 3),
        "scalar": lambda: torch.tensor(1.5),
        "complex": lambda: torch.zeros(3, dtype=torch.complex64),
        "half": lambda: torch.ones(3, dtype=torch.bfloat16),
        "boolean": lambda: torch.ones(3, dtype=torch.bool),
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "state": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        "large state": lambda: {str(number): torch.zeros(1) for number in range(500)},
        "shared": lambda: (base := torch.arange(10), base[3:]),
        "plain": lambda: {"a": [1, 2.5, None, True, "x" * 300], "b": (1 << 40, -1), "c": []},
        "bytes": lambda: {"a": b"abc\xff", "b": bytearray(b"abc\xff"), "c": bytearray()},
        "many numbers": lambda: list(range(20_000)),
        "set": lambda: {1, 2, 3},
        "large keys": lambda: {number << 70: {number} for number in range(2000)},
        "ordered": lambda: collections.OrderedDict([("a", 1), ("b", 2)]),
        "counter": lambda: collections.Counter("abca"),
        "size": lambda: torch.zeros(2, 3).shape,
        "type and device": lambda: [torch.float32, torch.device("cpu")],
        "sparse": lambda: torch.eye(50).to_sparse(),
        "sparse rows": lambda: torch.eye(50).to_sparse_csr(),
        "meta": lambda: torch.zeros(1 << 40, device="meta"),
        "long text": lambda: "x" * 3_000_000,
    }


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:Validating sparse")  # torch 2.14 says that it checks
def test_check_claims_accepts_what_torch_wrote() -> None:
    """Every value that loads with weights_only, in both formats."""
    for old, kind in itertools.product([False, True], make_values()):
        out = io.BytesIO()
        torch.save(make_values()[kind](), out, _use_new_zipfile_serialization=not old)
        check_claims(out.getvalue(), 1 << 30)
        torch.load(io.BytesIO(out.getvalue()), weights_only=True)


def test_decode_torch_refuses_when_an_archive_has_two_directories() -> None:
    """Python searches for the directory, torch believes the offset of it: each would read another one."""
    good, bomb = packed(value(1)), packed(BOMBS["bytearray"])
    at = bomb.index(b"PK\x01\x02")
    end = good.index(b"PK\x05\x06")
    both = bomb + good[:end] + good[end : end + 16] + struct.pack("<L", at) + good[end + 20 :]
    with pytest.raises(DecodingError, match="does not end with its directory"):
        decode(both)
    with pytest.raises(DecodingError, match="does not end with its directory"):
        decode(good + b"x")


def test_decode_torch_refuses_when_an_archive_has_an_entry_twice() -> None:
    """Which of two data.pkl counts is for each reader to say."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + BOMBS["bytearray"] + b".")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data.pkl", b"\x80\x02" + value(1) + b".")
    with pytest.raises(DecodingError, match="two entries of one name"):
        decode(out.getvalue())


def test_decode_torch_refuses_when_a_pickle_has_codes_that_torch_does_not_know() -> None:
    """BYTEARRAY8 takes the memory that it claims."""
    for code in [b"\x96" + struct.pack("<Q", 1 << 40), b"\x8b" + struct.pack("<i", 1 << 30), b"0", b"\x8e"]:
        with pytest.raises(DecodingError, match="more than the tensors and containers"):
            decode(packed(code))
