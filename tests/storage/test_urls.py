"""URLs: what kind they are, and what of them is shown. Options: kept, and not shown."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.storage import StorageOptions, can_reopen, list_urls, mask_url, open_shard
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause
from torchdata_wds.storage.urls import is_chaining, scheme_of


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("-", "-"), ("x.tar", ""), ("./a:b.tar", ""), ("D:/x.tar", ""), ("D:x.tar", ""), ("a:b.tar", ""),
        ("a::b.tar", ""),
        ("http:x.tar", ""), ("/a/s3://x.tar", ""), ("", ""), ("--", ""), ("pipe:cat x", "pipe"), ("PIPE:cat x", "pipe"),
        ("file:x.tar", "file"), ("file:///x.tar", "file"), ("http://h/x", "http"), ("HTTPS://h/x", "https"),
        ("s3://b/x::y", "s3"), ("simplecache::s3://b/x", "simplecache"), ("zip://x.tar::s3://b/x", "zip"),
        ("new+kind://x", "new+kind"),
    ],
)  # fmt: skip
def test_scheme_of_tells_the_backend(url: str, scheme: str) -> None:
    """A scheme has two letters at least, and // behind it unless it is pipe, file or a chain."""
    assert scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("part", "chaining"),
    [
        ("simplecache", True), ("filecache", True), ("blockcache", True), ("zip://a.tar", True), ("tar://a", True),
        ("reference://a", True), ("dir", True), ("libarchive://a", True),
        ("a.tar", False), ("s3://b/a.tar", False), ("a", False), ("", False), ("https://h/a.tar", False), ("-", False),
    ],
)  # fmt: skip
def test_is_chaining_tells_what_reads_through_another_url(part: str, chaining: bool) -> None:
    """Archives and caches chain; stores and paths do not."""
    assert is_chaining(part) is chaining


@pytest.mark.parametrize(
    ("url", "reopens"),
    [
        ("-", False),
        ("pipe:cat x", False),
        ("x.tar", True),
        ("file:/x", True),
        ("https://h/x", True),
        ("s3://b/x", True),
    ],
)
def test_can_reopen_is_false_when_the_bytes_are_gone(url: str, reopens: bool) -> None:
    """Standard input and commands give their bytes once."""
    assert can_reopen(url) is reopens
    assert can_reopen(Path("x.tar"))


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        "https://user:s3cr3t@host/x.tar",
        "https://s3cr3t@host/x.tar",
        "ftp://user:s3cr3t@host/x.tar",
        "simplecache::https://user:s3cr3t@host/x.tar",
        *(
            f"https://host/x.tar?part=1&{name}=s3cr3t&last=2"
            for name in (
                "X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "x-amz-signature", "sig", "Signature",
                "token", "access_token", "key", "api_key", "apikey", "AWSAccessKeyId", "GoogleAccessId", "password",
                "X-Goog-Signature", "X-Goog-Credential", "Key-Pair-Id", "Policy", "client_secret", "auth", "jwt",
                "X%2DAmz%2DSignature", "hdnts_token", "session_id",
            )
        ),
        "pipe:curl -s 'https://user:s3cr3t@host/x.tar?part=1'",
        "pipe:curl -s 'https://host/x.tar?part=1&X-Amz-Signature=s3cr3t' | gunzip",
        "pipe:curl -H 'Authorization: Bearer s3cr3t' https://host/x.tar",
        "pipe:curl -H \"authorization: Basic s3cr3t==\" https://host/x.tar",
        "pipe:curl -H 'X-Auth-Token: s3cr3t' -H 'Cookie: a=s3cr3t; b=s3cr3t' https://host/x.tar",
        "pipe:curl -H 'PRIVATE-TOKEN: s3cr3t' https://host/x.tar",
        "pipe:fetch Bearer s3cr3t x.tar",
        "pipe:curl --user me:s3cr3t https://host/x.tar",
        "pipe:curl --user=me:s3cr3t https://host/x.tar",
        "pipe:curl -u me:s3cr3t https://host/x.tar",
        "pipe:curl -u 'me:s3cr3t' https://host/x.tar",
        "pipe:curl -ume:s3cr3t https://host/x.tar",
        "pipe:AWS_SECRET_ACCESS_KEY=s3cr3t aws s3 cp s3://b/x.tar -",
        "pipe:AWS_SECRET_ACCESS_KEY='s3cr3t and more' aws s3 cp s3://b/x.tar -",
        "pipe:wget --http-password=s3cr3t https://host/x.tar",
        "pipe:tool --token s3cr3t --verbose x.tar",
        "pipe:tool --api-key \"s3cr3t\" x.tar",
    ],
)  # fmt: skip
def test_mask_url_hides_when_something_is_secret(url: str) -> None:
    """Passwords, signatures, tokens and headers are masked; the rest stays readable."""
    masked = mask_url(url)
    assert SECRET not in masked
    assert "***" in masked
    assert "x.tar" in masked
    if "?part=1" in url:
        assert "?part=1" in masked
    assert ("last=2" in masked) is ("last=2" in url)


@pytest.mark.parametrize(
    "url",
    [
        "x.tar", "/data/key=3/token=4/x.tar", "a?sig=1.tar", "https://host/x.tar?part=1&monkey=2&design=3",
        "s3://bucket/key/x.tar", "abfs://container@account.dfs.core.windows.net/x.tar", "s3://bucket/x.tar?versionId=3",
        "pipe:cat key.tar | head -n 3", "pipe:sort -u a.txt", "pipe:tar c --sort=name x", "-", "file:///a/token=3",
        "https://host:8080/a:b/x.tar", "pipe:awk -F: '{print $1}' x",
    ],
)  # fmt: skip
def test_mask_url_changes_nothing_when_nothing_is_secret(url: str) -> None:
    """Ordinary names, paths and parameters are shown as they are."""
    assert mask_url(url) == url
    assert mask_url(Path("a")) == "a"


def test_mask_text_hides_queries_that_a_library_has_quoted() -> None:
    """``%3F``, ``%26`` and ``%3D`` hide no secret, and what is none stays."""
    text = f"no such object x.tar%3Fpart%3D1%26X-Amz-Signature%3D{SECRET}%2F%26last%3D2 in the bucket"
    assert mask_text(text) == "no such object x.tar%3Fpart%3D1%26X-Amz-Signature%3D***%26last%3D2 in the bucket"


def test_mask_text_stays_fast_when_the_text_is_long() -> None:
    """A long run of any one character is masked in linear time."""
    for character in "a/:?&'= -":
        assert len(mask_text(character * 100_000)) == 100_000


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
