"""Samples as lines of JSON."""

import base64
import gzip
import io
import json
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch

from torchdata_wds.cli.tables import JsonLines, StoredField
from torchdata_wds.errors import DecodingError


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def strict(line: bytes) -> Any:
    """Reads a line as programs do that know no NaN."""

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    assert b"\n" not in line
    return json.loads(line, parse_constant=refuse)


def holding_itself() -> list[Any]:
    """What torch saves and loads."""
    value: list[Any] = [1]
    value.append(value)
    return value


def doubled(value: Any, times: int) -> Any:
    """A small file that would be long in JSON."""
    for _ in range(times):
        value = [value, value]
    return value


VALUES = [
    ("txt", "größe\n\u2028".encode(), "größe\n\u2028"),
    ("cls", b" 7\n", 7),
    ("json", b'{"a": [1, 2.5, null, true, "\xc3\xa4"]}', {"a": [1, 2.5, None, True, "ä"]}),
    ("x.json", b"[]", []),
    ("npy", npy(np.array([[1, 2], [3, 4]])), [[1, 2], [3, 4]]),
    ("npz", npz(a=np.array([1.5]), b=np.array(2)), {"a": [1.5], "b": 2}),
    ("pth", saved({"w": torch.tensor([1, 2]), "n": [torch.tensor(0.5)]}), {"w": [1, 2], "n": [0.5]}),
    ("msgpack", msgpack.packb({"a": 1}), {"a": 1}),
    ("cbor", cbor2.dumps({"a": [True]}), {"a": [True]}),
    ("wnid", b"n01440764", "n01440764"),
    ("caption.gz", gzip.compress(b"text", mtime=0), "text"),
    ("json", b"12345678901234567890123", 12345678901234567890123),
    ("txt", b"", ""),
    ("bin", b"", ""),
]

BINARY = [
    ("pth", saved(holding_itself())),
    ("pth", saved(torch.empty(3, device="meta"))),
    ("pth", saved(torch.zeros(1).expand(1 << 40))),
    ("pth.gz", __import__("gzip").compress(saved(doubled("x" * (1 << 20), 30)))),
    ("cbor", cbor2.dumps(holding_itself(), value_sharing=True)),
    ("jpg", b"P6 this is text"),
    ("bin", b"\xff\x00"),
    ("pyd", b"I1\n."),
    ("json", b"[NaN]"),
    ("json", b'{"a": -Infinity}'),
    ("npy", npy(np.array([np.nan, 1]))),
    ("npy", npy(np.array([1j]))),
    ("msgpack", msgpack.packb({1: 2})),
    ("msgpack", msgpack.packb([b"raw"])),
    ("mp4", bytes(3)),
]


@pytest.mark.parametrize(("field", "data", "value"), VALUES)
def test_line_has_the_decoded_value_when_json_can_hold_it(field: str, data: bytes, value: Any) -> None:
    """By the field's name, as everywhere."""
    assert strict(JsonLines()({"__key__": "k", field: data})) == {"__key__": "k", field: value}


@pytest.mark.parametrize(("field", "data"), BINARY)
def test_line_has_base64_when_json_cannot_hold_the_value(field: str, data: bytes) -> None:
    """The stored bytes, whatever they are: nothing is lost, nothing is changed, and the JSON is strict."""
    assert base64.b64decode(strict(JsonLines()({"__key__": "k", field: data}))[field]["base64"]) == data


@pytest.mark.parametrize(("field", "data"), BINARY)
def test_line_leaves_out_when_binary_is_skipped(field: str, data: bytes) -> None:
    """What was left out is counted."""
    lines = JsonLines(binary="skip")
    assert strict(lines({field: data, "cls": b"1"})) == {"cls": 1}
    assert lines.skipped == 1


def test_line_decodes_by_the_old_name_when_a_field_was_renamed() -> None:
    """And null stands for a field that is not there."""
    assert strict(JsonLines()({"label": StoredField("cls", b"3"), "nix": None})) == {"label": 3, "nix": None}


def test_text_that_says_nan_stays_when_it_is_a_string() -> None:
    """Only numbers are looked at."""
    assert strict(JsonLines()({"txt": b"NaN", "json": b'["Infinity"]'})) == {"txt": "NaN", "json": ["Infinity"]}


@pytest.mark.parametrize(("field", "data"), [("cls", b"x"), ("json", b"{"), ("txt", b"\xff")])
def test_line_raises_when_a_field_does_not_decode(field: str, data: bytes) -> None:
    """The sample and the field are named."""
    with pytest.raises(DecodingError, match=f"{field}.*'k'"):
        JsonLines()({"__key__": "k", field: data})
