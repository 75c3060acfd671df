"""The field table: each extension decodes to its value, alone, with parts before it, in any case; what names mean."""

import gzip
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch
import webdataset.autodecode
import webdataset.tenbin

from tests.kits.shards import jpeg_bytes
from torchdata_wds import codecs
from torchdata_wds.codecs import CODECS, IMAGE_FIELDS, Decoder, handle_extension

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
RECORD = {"name": "x", "list": [1, 2.5, None, True], "nested": {"k": "ü"}}


def npy_bytes(array: Any) -> bytes:
    """An npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz_bytes(*arrays: Any, **named: Any) -> bytes:
    """An npz file."""
    out = io.BytesIO()
    np.savez(out, *arrays, **named)
    return out.getvalue()


def torch_bytes(value: Any) -> bytes:
    """What torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


ROWS: list[tuple[str, bytes, Any]] = [
    ("txt text transcript", "größer\n".encode(), "größer\n"),
    ("cls cls2 class count index inx id", b" 17\n", 17),
    ("json jsn", json.dumps(RECORD).encode(), RECORD),
    ("npy", npy_bytes(ARRAY), ARRAY),
    ("npz", npz_bytes(ARRAY, a=ARRAY + 1), {"arr_0": ARRAY, "a": ARRAY + 1}),
    ("pth pt", torch_bytes({"w": torch.arange(3)}), {"w": torch.arange(3)}),
    ("ten tenbin tb", bytes(webdataset.tenbin.encode_buffer([ARRAY, ARRAY + 1])), [ARRAY, ARRAY + 1]),
    ("mp msg msgpack", msgpack.packb(RECORD), RECORD),
    ("cbor", cbor2.dumps(RECORD), RECORD),
    ("pyd pkl pickle", pickle.dumps(RECORD), RECORD),
    ("bin mp4 avi mov mkv webm mpg mjpeg ogv h264 wmv flac wav mp3 ogg m4a", b"\x00any\xff", b"\x00any\xff"),
    (" ".join(IMAGE_FIELDS), jpeg_bytes(1), jpeg_bytes(1)),
]
CASES = [(extension, data, value) for extensions, data, value in ROWS for extension in extensions.split()]


def equal(left: Any, right: Any) -> bool:
    """Whether two decoded values are of the same types and equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_decoder_decodes_each_extension_when_it_is_the_last_part() -> None:
    """A field is decoded by the last part of its name, in any case, whatever stands before it."""
    for extension, data, value in CASES:
        for field in (extension, f"meta.{extension}", f"a.b.{extension}", extension.upper()):
            assert equal(Decoder(allow_pickle=True)({field: data})[field], value)


def test_table_has_exactly_the_decoded_extensions_when_listed() -> None:
    """No extension is in the table that the tests above do not see."""
    extensions = {extension for extensions, _, _ in ROWS for extension in extensions.split()}
    assert set(CODECS) == extensions - set(ROWS[-2][0].split())


WEBDATASET_CASES = [case for case in CASES if case[0] in webdataset.autodecode.decoders and case[0] != "cbor"]


def test_decoder_equals_webdataset_when_both_know_the_extension() -> None:
    """Where webdataset decodes a field, it gives the same value."""
    for extension, data, _ in WEBDATASET_CASES:
        theirs = webdataset.autodecode.Decoder([])({"__key__": "a", extension: data})
        assert equal(Decoder(allow_pickle=True)({"__key__": "a", extension: data}), theirs)


def test_import_needs_no_optional_package_when_codecs_are_imported() -> None:
    """Importing the codecs imports no image, tensor or record package."""
    code = (
        "import sys, types, numpy, zipfile; before = set(sys.modules);"
        f"package = types.ModuleType('torchdata_wds'); package.__path__ = [{str(Path(codecs.__file__).parents[1])!r}];"
        "sys.modules['torchdata_wds'] = package; import torchdata_wds.codecs;"
        "lazy = {'torch', 'PIL', 'msgpack', 'cbor2', 'zstandard', 'isal', 'simplejpeg', 'torchdata'};"
        "print(sorted(lazy & set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


MATCHES = [
    ("png", "png", True), ("png", "input.png", True), ("png", "a.b.png", True), ("png", "xpng", False),
    ("png", "png.txt", False), ("png", "PNG", True), ("PNG", "input.Png", True), (".png", "png", True),
    (".seg.png", "seg.png", True), ("seg.png", "a.seg.png", True), ("seg.png", "png", False),
    ("seg.png", "xseg.png", False), ("jpg png", "png", True), ("jpg png", "gif", False),
]  # fmt: skip


def test_handle_extension_takes_a_field_when_its_last_parts_match() -> None:
    """An extension means whole dot-separated parts at the end, in any case: webdataset's rule, leading dot or not."""
    for extensions, field, expected in MATCHES:
        decoder = handle_extension(extensions, len)
        assert decoder("." + field, b"abc") == (3 if expected else None)
        assert Decoder(decoder)({field: b"abc"})[field] == (3 if expected else b"abc" if "txt" not in field else "abc")
        if not extensions.startswith("."):
            theirs = webdataset.autodecode.handle_extension(extensions, len)
            assert theirs("." + field, b"abc") == decoder("." + field, b"abc")


def test_handle_extension_passes_when_its_function_gives_none() -> None:
    """None from the function leaves the field to the next decoder."""
    assert Decoder(handle_extension("cls", lambda _: None))({"cls": b"7"}) == {"cls": 7}


def test_handle_extension_pickles_when_its_function_does() -> None:
    """The decoder goes to worker processes."""
    decoder = pickle.loads(pickle.dumps(handle_extension("jpg .seg.png", len)))
    assert decoder(".seg.png", b"ab") == 2
    assert repr(decoder) == "handle_extension('jpg seg.png', len)"


def test_handle_extension_raises_when_its_arguments_are_wrong() -> None:
    """Extensions are str, at least one, and the function is callable."""
    for extensions in ["", "  ", "."]:
        with pytest.raises(ValueError, match="extension"):
            handle_extension(extensions, len)
    for extensions, fn in [("jpg", None), ("jpg", "len"), (None, len), (b"jpg", len), (3, len), ([1], len)]:
        with pytest.raises(TypeError):
            handle_extension(extensions, fn)


def test_only_decodes_the_named_fields_when_given() -> None:
    """`only` names whole fields or globs, as str or list, as webdataset's `only` does; the others stay bytes."""
    for only, decoded in [
        (None, {"cls", "a.cls", "json.gz", "txt"}), ("cls", {"cls"}), ("*.cls", {"a.cls"}),
        ("*cls", {"cls", "a.cls"}), ("a.cls", {"a.cls"}), (".CLS", {"cls"}), ("json", set()),
        ("json.gz", {"json.gz"}), ("*.gz", {"json.gz"}), ("json.gz;txt cls", {"cls", "json.gz", "txt"}),
        (["txt", "a.cls"], {"txt", "a.cls"}), (("txt",), {"txt"}), ({"txt"}, {"txt"}), ("nothing", set()),
        ("", set()), ([], set()),
    ]:  # fmt: skip
        sample = {"cls": b"1", "a.cls": b"2", "json.gz": gzip.compress(b"3"), "txt": b"4"}
        result = Decoder(only=only)(sample)
        assert {field for field in sample if result[field] != sample[field]} == decoded


def test_only_keeps_users_decoders_away_when_a_field_is_not_named() -> None:
    """`only` holds for the user's functions too, and for names in any case."""
    assert Decoder(lambda *_: 0, only="cls")({"cls": b"1", "txt": b"a"}) == {"cls": 0, "txt": b"a"}
    assert Decoder(only="cls *.txt")({"CLS": b"1", "A.TXT": b"a"}) == {"CLS": 1, "A.TXT": "a"}


def test_only_raises_when_it_names_no_fields() -> None:
    """Anything but names is a TypeError."""
    for only in [1, b"cls", [b"cls"], [None], True]:
        with pytest.raises(TypeError, match="only"):
            Decoder(only=only)
