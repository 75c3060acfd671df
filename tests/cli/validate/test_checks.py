"""Fields are tried one by one, and pickles never."""

import gzip
import importlib.util
import pickle
from typing import Any

import pytest

from tests.kits.shards import jpeg_bytes
from torchdata_wds.cli.validate.findings import FieldChecker
from torchdata_wds.errors import DecodingError, UnsafeDataError

GOOD = {
    "__key__": "a",
    "__url__": "x.tar",
    "jpg": jpeg_bytes(1),
    "left.jpg": jpeg_bytes(2),
    "cls": b"3",
    "json.gz": gzip.compress(b"[1]"),
    "anything": b"\x00\xff",
}


class Trap:
    """A pickle that would be noticed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


def test_checker_has_nothing_against_good_fields() -> None:
    """Images, types of the table, and what nobody decodes."""
    assert list(FieldChecker()(GOOD)) == []


def test_checker_finds_each_field_that_does_not_decode() -> None:
    """Cut images too, whose head is good; each error names its field and place."""
    bad = {"left.jpg": jpeg_bytes(2)[:-80], "cls": b"three", "json.gz": gzip.compress(b"[1]")[:-4], "txt": b"\xff"}
    errors = list(FieldChecker()({**GOOD, **bad}))
    assert all(isinstance(error, DecodingError) for error in errors)
    assert {error.field for error in errors if isinstance(error, DecodingError)} == set(bad)
    assert all("sample 'a' in shard x.tar" in str(error) for error in errors)


def test_checker_never_loads_pickles() -> None:
    """It says that they were not tried."""
    data = pickle.dumps(Trap())
    errors = list(FieldChecker()({"__key__": "a", "pyd": data, "x.pkl.gz": gzip.compress(data)}))
    assert [type(error) for error in errors] == [UnsafeDataError, UnsafeDataError]


def test_checker_says_what_it_cannot_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Media without PyAV, which is no fault of the sample."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    [error] = FieldChecker()({**GOOD, "front.MP4": b"no video"})
    assert isinstance(error, ImportError)
    assert error.field == "front.MP4"  # type: ignore[attr-defined]
    assert "[media]" in str(error)


@pytest.mark.slow
def test_checker_tries_media() -> None:
    """PyAV says that it is none."""
    [error] = FieldChecker()({"__key__": "a", "mp4": b"no video"})
    assert isinstance(error, DecodingError)
