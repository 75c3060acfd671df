"""Every row of the field table: each extension decodes to its value, alone, with parts before it, in any case."""

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
import torch
import webdataset.autodecode
import webdataset.tenbin

from tests.kits.shards import jpeg_bytes
from torchdata_wds import codecs
from torchdata_wds.codecs import CODECS, IMAGE_FIELDS, Decoder

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
