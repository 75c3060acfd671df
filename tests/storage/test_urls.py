"""URLs: what kind they are, and what of them is shown. Options: kept, and not shown."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.storage import StorageOptions, can_reopen, list_urls, mask_url, open_shard
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause
from torchdata_wds.storage.urls import is_chaining, scheme_of

SCHEMES = {
    "-": ("-",),
    "": ("x.tar", "./a:b.tar", "D:/x.tar", "D:x.tar", "a:b.tar", "a::b.tar", "http:x.tar", "/a/s3://x.tar", "", "--"),
    "pipe": ("pipe:cat x", "PIPE:cat x"),
    "file": ("file:x.tar", "file:///x.tar"),
    "http": ("http://h/x",),
    "https": ("HTTPS://h/x",),
    "s3": ("s3://b/x::y",),
    "simplecache": ("simplecache::s3://b/x",),
    "zip": ("zip://x.tar::s3://b/x",),
    "new+kind": ("new+kind://x",),
}


def test_scheme_of_tells_the_backend() -> None:
    """A scheme has two letters at least, and // behind it unless it is pipe, file or a chain."""
    for scheme, urls in SCHEMES.items():
        for url in urls:
            assert scheme_of(url) == scheme, url


def test_is_chaining_tells_what_reads_through_another_url() -> None:
    """Archives and caches chain; stores and paths do not."""
    chaining = ["simplecache", "filecache", "blockcache", "zip://a.tar", "tar://a", "reference://a", "dir"]
    chaining.append("libarchive://a")
    others = ["a.tar", "s3://b/a.tar", "a", "", "https://h/a.tar", "-"]
    assert [part for part in chaining + others if is_chaining(part)] == chaining


def test_can_reopen_is_false_when_the_bytes_are_gone() -> None:
    """Standard input and commands give their bytes once."""
    assert not can_reopen("-")
    assert not can_reopen("pipe:cat x")
    assert all(map(can_reopen, ("x.tar", "file:/x", "https://h/x", "s3://b/x", Path("x.tar"))))


SECRET = "s3cr3t"


def test_mask_url_changes_nothing_when_nothing_is_secret() -> None:
    """Ordinary names, paths and parameters are shown as they are."""
    for url in (
        "x.tar", "/data/key=3/token=4/x.tar", "a?sig=1.tar", "https://host/x.tar?part=1&monkey=2&design=3",
        "s3://bucket/key/x.tar", "abfs://container@account.dfs.core.windows.net/x.tar", "s3://bucket/x.tar?versionId=3",
        "pipe:cat key.tar | head -n 3", "pipe:sort -u a.txt", "pipe:tar c --sort=name x", "-", "file:///a/token=3",
        "https://host:8080/a:b/x.tar", "pipe:awk -F: '{print $1}' x",
    ):  # fmt: skip
        assert mask_url(url) == url
    assert mask_url(Path("a")) == "a"


def test_mask_text_hides_queries_that_a_library_has_quoted() -> None:
    """``%3F``, ``%26`` and ``%3D`` hide no secret, and what is none stays."""
    text = f"no such object x.tar%3Fpart%3D1%26X-Amz-Signature%3D{SECRET}%2F%26last%3D2 in the bucket"
    assert mask_text(text) == "no such object x.tar%3Fpart%3D1%26X-Amz-Signature%3D***%26last%3D2 in the bucket"


OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"key": SECRET, "anon": False},
    "https": {"headers": {"Authorization": SECRET}},
}


def test_storage_options_shows_names_only() -> None:
    """Neither repr nor str nor formatting shows a value."""
    options = StorageOptions(OPTIONS)
    for text in (repr(options), str(options), f"{options}", repr([options]), repr(options.items())):
        assert SECRET not in text
    assert repr(options) == "StorageOptions(s3={key=***, anon=***}, https={headers=***})"


def test_storage_options_survives_pickling() -> None:
    """What is unpickled is equal and still masks."""
    options = pickle.loads(pickle.dumps(StorageOptions(OPTIONS)))
    assert dict(options) == OPTIONS
    assert options == StorageOptions(options) == OPTIONS
    assert hash(options) == hash(StorageOptions(OPTIONS))
    assert SECRET not in repr(options)


def test_storage_options_is_a_copy() -> None:
    """Neither the mapping it was made from nor what it gives out changes it."""
    given = {"s3": {"key": "a"}}
    options = StorageOptions(given)
    given["s3"]["key"] = "b"
    options["s3"]["key"] = "c"
    assert options == {"s3": {"key": "a"}}
    assert not StorageOptions(None)
    assert len(options) == 1


def raised(error: Exception, *, before: Exception | None = None, cause: Exception | None = None) -> Exception:
    """An exception as it is when it was raised from another, or while another one was handled."""
    error.__context__, error.__cause__ = before, cause
    error.__suppress_context__ = cause is not None
    return error


def test_masked_cause_shows_no_secret_wherever_a_traceback_would() -> None:
    """Neither its own text, nor what it was raised from, nor what was handled then, nor its notes."""
    told = OSError("https://host/?X-Amz-Signature=hunter2")
    noted = OSError("no")
    noted.add_note("token=hunter2")
    for error in (
        told,
        noted,
        raised(PermissionError("no access"), before=told),
        raised(PermissionError("no access"), cause=told),
        raised(PermissionError("no access"), before=raised(KeyError("x"), cause=told)),
        ExceptionGroup("no access", [told]),
    ):
        masked = masked_cause(error)
        assert "hunter2" not in "".join(traceback.format_exception(masked))
        assert str(masked).startswith(type(error).__name__)


def test_masked_cause_is_the_exception_itself_when_nothing_in_it_is_secret() -> None:
    """Whoever looks into the cause finds the client's own exceptions."""
    inner = KeyError("x")
    inner.__context__ = inner.__cause__ = inner  # nobody does that, and nobody may hang
    for error in (OSError("no"), raised(OSError("no"), before=inner), raised(OSError("no"), cause=inner)):
        assert masked_cause(error) is error


@pytest.mark.parametrize("wrong", ["s3", [("s3", {})], 3, {"anon": True}, {"s3": SECRET}, {3: {}}, {"s3": None}])
def test_storage_options_raises_when_the_shape_is_wrong(wrong: Any) -> None:
    """What is no mapping of mappings is a TypeError that shows what is valid, and no value."""
    for call in (
        StorageOptions,
        lambda o: open_shard("x", storage_options=o),
        lambda o: list_urls("xx", storage_options=o),
    ):
        with pytest.raises(TypeError, match="must map a protocol to a mapping") as caught:
            call(wrong)
        assert SECRET not in str(caught.value)
