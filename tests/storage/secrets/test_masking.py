"""What is secret in URLs, commands and messages of libraries is never shown."""

import logging
import re
import shlex
import traceback
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kits.secret_forms import COMMANDS, QUERIES, URLS
from torchdata_wds.errors import WdsError
from torchdata_wds.storage import StorageOptions, list_urls, mask_url, open_shard, open_target
from torchdata_wds.storage.secrets import masking
from torchdata_wds.storage.secrets.masking import mask_text, without_credentials

# What may stand in a secret, in a URL or in a word of a shell, without being quoted.
SECRETS = st.text("abcXYZ0123456789+=%@!.~^*_,$", min_size=6, max_size=20).map("s3".__add__)


@settings(max_examples=30, deadline=None)
@given(SECRETS)
@example("s300000=")  # as Base64 ends
@example("s3000==")
def test_mask_url_hides_a_secret_wherever_it_stands(secret: str) -> None:
    """In commands, before hosts and in queries; what is beside it stays readable."""
    urls = ["pipe:" + form.format(secret, secret) for form in COMMANDS]
    urls += [form.format(secret) for form in URLS]
    urls += [f"https://host/x.tar?part=1&{name}={secret}&last=2" for name in QUERIES]
    for url in urls:
        masked = mask_url(url)
        assert secret not in masked, masked
        assert "***" in masked
        assert "x.tar" in masked
        assert ("last=2" in masked) is ("last=2" in url)
    for name in QUERIES:
        assert secret not in mask_url(f"https://host/x.tar#{name}={secret}")


@pytest.mark.parametrize("quoted", ["{}", "'{}'", '"{}"', "no: {}: isn't there"])
def test_mask_text_hides_secrets_when_a_library_quotes_a_url_or_command(quoted: str) -> None:
    """Its quotes may end where the command's begin; values that have quotes inside are left out here."""
    for form in (*COMMANDS, *URLS):
        if "; sid" not in form and '"a"' not in form:
            text = quoted.format(form.format("hunter2", "hunter2"))
            assert "hunter2" not in mask_text(text), text


def test_mask_text_hides_secrets_when_arguments_are_shown_as_a_list() -> None:
    """As subprocess does: ``Command '['curl', '-u', 'me:secret']' returned non-zero exit status 22``."""
    lists = [form for form in COMMANDS if "{}" in form and not set("<|;`$") & set(form) and "{{" not in form]
    forms = [form for form in lists if not form.startswith("fetch")]
    assert len(forms) > 60
    for form in forms:
        text = f"Command '{shlex.split(form.format('hunter2', 'hunter2'))}' returned non-zero exit status 22"
        assert "hunter2" not in mask_text(text), text


@pytest.mark.parametrize(
    "text",
    [
        "gpg --passphrase-fd 3 -d x", "gpg --passphrase-file p.txt -d x", "openssl enc -d -pass env:PASS",
        "openssl enc -d -pass file:/run/pass", "curl -d @form.txt h", "curl -b cookies.txt h", "curl -u me h",
        "curl -H 'Accept: text/plain' -H 'Range: bytes=0-9' h", "curl -sSfL -o x.tar --retry 5 https://h/x.tar",
        "curl -x proxy:8080 h", "tar -xp -b 20 -u x", "sort -u a:b", "awk -F: '{print $1}' a", "unzip -p a.zip x.tar",
        "cat key.tar token.tar", "the author: me", "https://h/x?author=me&monkey=2&design=3&passage=4&sasha=5&codec=6",
        "https://h:8080/a@b/x.tar", "abfs://container@account.dfs.core.windows.net/x", "scp me@host:x.tar .",
        "mail mailto:me@host", "ssh -p 22 me@host cat x.tar", "s3://b/key=3/token=4/x.tar", "docker://h/image:tag@sha256",
    ],
)  # fmt: skip
def test_mask_text_changes_nothing_when_nothing_is_secret(text: str) -> None:
    """Options of the same letters, names that begin alike, and places where a program finds a secret."""
    assert mask_text(text) == text


@pytest.mark.parametrize("piece", ["curl -u ", "token=", "a:b", "a://b:c", "'", '"x', "-H 'a: b'", "[('", "\\", "x@"])
def test_mask_text_stays_fast_when_the_text_is_long(piece: str) -> None:
    """Linear time: a second pass over what a first one has seen would take minutes here."""
    assert mask_text(piece * 10_000)


def test_without_credentials_leaves_what_tells_shards_apart() -> None:
    """Parameters that may name an object, and data that a command sends, stay."""
    for url, kept in {
        "https://me:pw@h/get?key=a.tar&X-Amz-Signature=abc": "https://h/get?key=a.tar&X-Amz-Signature=***",
        "sftp://me:pw@h/x.tar": "sftp://me@h/x.tar",
        "pipe:curl -u me:pw -d file=a.tar -H 'Authorization: Bearer abc' h": (
            "pipe:curl -u me:*** -d file=a.tar -H 'Authorization: ***' h"
        ),
        "pipe:AWS_SECRET_ACCESS_KEY=abc aws s3 cp s3://b/x.tar -": (
            "pipe:AWS_SECRET_ACCESS_KEY=*** aws s3 cp s3://b/x.tar -"
        ),
    }.items():
        assert without_credentials(url) == kept


@pytest.mark.parametrize(
    "url",
    [
        "pipe:exit 3; curl -u me:{} -H 'X-Any: {}' h/x.tar",
        "pipe:echo 'curl -su me:{} --pass {} x.tar failed' >&2; exit 3",
        "http://me:{}@127.0.0.1:1/x.tar?sas={}",
        "https:/me:{}@host/{{0..1}}.tar",
        "nosuch://me:{}@host/x.tar?pass={}",
        "file://host/x.tar?token={}",
    ],
)
def test_open_shard_shows_no_secret_when_it_fails(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the exception, nor in what it was raised from, nor in a log; listing and writing neither."""
    secret = "hunter2"
    given = url.format(secret, secret)
    options = StorageOptions({"http": {"retries": 0}}, rewrite={"never": f"http://me:{secret}@host"})

    def read() -> None:
        with open_shard(given, storage_options=options) as stream:
            stream.read()

    def write() -> None:
        target = open_target(given, storage_options=options)
        target.write(b"1")
        target.abort()

    def listed() -> None:
        list(list_urls(given + "/{a,", storage_options=options))

    with caplog.at_level(logging.DEBUG):
        for action in (read, write, listed):
            try:
                action()
            except (WdsError, OSError, ValueError) as error:
                frames = "".join(traceback.format_exception(error))
                shown = "\n".join(line for line in frames.splitlines() if not line.startswith("    "))
                assert secret not in shown
                assert secret not in repr(error)
    assert secret not in caplog.text
    assert secret not in repr(options)


def test_plain_urls_are_left_alone_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of most shards have nowhere to put a secret, whatever words they are made of."""
    words = (
        "token",
        "secret-key",
        "-p",
        "--password",
        "curl",
        "a.tar",
        "..",
        "AKIA0123",
        "bearer",
        "sig",
        "x_password",
        "",
    )
    schemes = ("https", "http", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "ais")
    urls = [f"{scheme}://{one}/{two}-{three}" for scheme, one, two, three in product(schemes, words, words, words)]
    assert [mask_text(url) for url in urls] == [without_credentials(url) for url in urls] == urls
    monkeypatch.setattr(masking, "_PLAIN_URL", re.compile("(?!)"))
    assert [mask_text(url) for url in urls[::7]] == [without_credentials(url) for url in urls[::7]] == urls[::7]
