"""Web servers: status, length, redirects, ranges, and what goes wrong with them."""

import base64
import gc
import gzip
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.processes import in_child
from tests.kits.servers import QuietServer, serving
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage import retrying as patience
from torchdata_wds.storage.sources import http_client

DATA = os.urandom(100_000)
ZIPPED = gzip.compress(DATA)


HALF = DATA[:50_000]
CHUNKED = {"Transfer-Encoding": "chunked"}

#: Path -> status, body, headers. Bodies of another length than is told end with their connection.
REPLIES: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "whole": (200, DATA, {}),
    "missing": (404, b"<html>no</html>", {}),
    "wrongrange": (206, DATA[:100], {"Content-Range": f"bytes 0-99/{len(DATA)}"}),
    "short": (200, HALF, {"Content-Length": str(len(DATA))}),
    "chunked": (200, b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA), CHUNKED),
    "chunkcut": (200, b"%x\r\n%b" % (len(DATA), HALF), {**CHUNKED, "Connection": "close"}),
    "chunkend": (200, b"%x\r\n%b\r\n" % (50_000, HALF), {**CHUNKED, "Connection": "close"}),
    "untold": (200, DATA, {"Connection": "close"}),
    "encoded": (200, ZIPPED, {"Content-Encoding": "gzip"}),
    "twice": (200, gzip.compress(ZIPPED), {"Content-Encoding": "gzip"}),
    "brotli": (200, DATA, {"Content-Encoding": "br"}),
    "broken": (500, b"", {}),
    "moved": (302, b"", {"Location": "/whole?Signature=abc"}),
    "gone": (302, b"", {"Location": "/missing?Signature=abc"}),
    "loop": (302, b"", {"Location": "/loop"}),
    "tofile": (302, b"", {"Location": "file:///etc/passwd"}),
    "manydigits": (416, b"", {"Content-Range": f"bytes */{'9' * 5000}"}),
    "longlength": (404, b"", {"Content-Length": "9" * 5000}),
}
RANGED = {"ranged": DATA, "zipped": ZIPPED, "tiny": b"abc"}
NO_HTTP = {"junk": b"HTTP/1.1 418 \x1b[31m token=abc\r\nContent-Length: 0\r\n\r\n", "nothing": b""}


class Handler(BaseHTTPRequestHandler):
    """Serves what the path names; "onward" redirects to `target`."""

    protocol_version = "HTTP/1.1"
    timeout = 5
    requests: ClassVar[list[tuple[str, dict[str, str]]]] = []
    target = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.requests.append((self.path, {name.title(): value for name, value in self.headers.items()}))
        name = self.path.partition("?")[0].strip("/").partition("/")[0]
        if name in NO_HTTP:
            self.wfile.write(NO_HTTP[name])
            self.close_connection = not NO_HTTP[name]
        elif name in RANGED:
            self.reply(*self.part(RANGED[name]))
        elif name == "onward":
            self.reply(302, b"", {"Location": self.target})
        else:
            self.reply(*REPLIES.get(name, REPLIES["missing"]))

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        told = {} if {"Connection", "Transfer-Encoding"} & headers.keys() else {"Content-Length": str(len(body))}
        for name, value in {**told, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection |= headers.get("Content-Length", str(len(body))) != str(len(body))

    def part(self, data: bytes) -> tuple[int, bytes, dict[str, str]]:
        asked = self.headers.get("Range")
        if asked is None:
            return 200, data, {}
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            return 416, b"", {"Content-Range": f"bytes */{len(data)}"}
        end = min(int(last) + 1 if last else len(data), len(data))
        return 206, data[int(first) : end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(QuietServer(("127.0.0.1", 0), Handler)) as address:
        yield address.removeprefix("http://")


@pytest.fixture
def server(address: str) -> str:
    """The address of the server, as host:port, which has had no requests."""
    Handler.requests.clear()
    return address


def read(url: str, offset: int = 0, **options: Any) -> bytes:
    with open_shard(url, offset=offset, **options) as stream:
        return stream.read(1 << 20) + stream.read(1)


@pytest.mark.parametrize("path", ["whole", "ranged", "chunked", "untold", "zipped", "encoded", "twice", "moved"])
def test_open_shard_reads_when_the_server_serves(path: str, server: str) -> None:
    """Length given, chunked or untold, compressed by the author or by the server, redirected or not: same bytes."""
    assert read(f"http://{server}/{path}") == DATA


@pytest.mark.parametrize("path", ["whole", "ranged", "chunked", "untold", "zipped", "encoded"])
@pytest.mark.parametrize("offset", [1, 512, 99_999, 100_000])
def test_open_shard_gives_the_rest_when_there_is_an_offset(path: str, offset: int, server: str) -> None:
    """The offset counts decompressed bytes, whether the server gives parts, ignores the range or compresses."""
    assert read(f"http://{server}/{path}", offset) == DATA[offset:]


def test_open_shard_asks_for_a_range_when_the_server_gives_parts(server: str) -> None:
    """The bytes before the offset are not sent."""
    assert read(f"http://{server}/ranged", 90_000) == DATA[90_000:]
    assert [headers.get("Range") for _, headers in Handler.requests] == ["bytes=0-9", "bytes=90000-"]


def test_open_shard_asks_for_no_compression(server: str) -> None:
    """The server is asked for the bytes as they are."""
    read(f"http://{server}/whole")
    assert Handler.requests[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("path", ["whole", "ranged", "zipped", "tiny"])
def test_open_shard_raises_when_the_offset_lies_behind_the_end(path: str, server: str) -> None:
    """An offset behind the end is an error and not an empty shard."""
    with pytest.raises(ShardFormatError, match=r"before the offset 100,001"):
        read(f"http://{server}/{path}", 100_001)


def test_open_shard_raises_when_the_server_gives_another_range(server: str) -> None:
    """A part that is not the one asked for is refused."""
    with pytest.raises(ShardOpenError, match="206"):
        read(f"http://{server}/wrongrange", 500)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "404 Not Found"),
        ("broken", "500 Internal Server Error"),
        ("gone", r"404 Not Found \(redirected to http://.*/missing\?Signature=\*\*\*\)"),
        ("loop", "redirect"),
        ("tofile", "cannot open shard"),
        ("brotli", "Content-Encoding 'br'"),
        ("nothing", "cannot open shard"),
        ("junk", r"418 \\x1b\[31m token="),
        ("manydigits", "416"),
        ("longlength", "404"),
        ("wrongrange", "206"),
    ],
)
def test_open_shard_raises_when_the_server_refuses(path: str, said: str, server: str) -> None:
    """A refusal names status, reason and URL, without what is secret in it."""
    url = f"http://{server}/{path}?part=1&token=abc"
    with pytest.raises(ShardOpenError, match=said) as caught:
        open_shard(url)
    assert f"http://{server}/{path}?part=1&token=***" in str(caught.value)
    assert "abc" not in str(caught.value)
    assert caught.value.shard == f"http://{server}/{path}?part=1&token=***"


def test_hosts_are_the_same_when_only_the_usual_port_is_added() -> None:
    """Names in any case; another scheme or port is another host."""
    origin = http_client._origin
    assert origin("http://host/x") == origin("HTTP://HOST:80/y?z")
    assert origin("https://host/x") == origin("https://host:443")
    assert len({origin(url) for url in ("http://host", "https://host", "http://host:443", "http://other")}) == 4


def test_open_shard_gives_up_at_once_when_redirects_go_round(server: str) -> None:
    """Eight are followed, and not once more from the beginning."""
    with pytest.raises(ShardOpenError, match="more than 8 redirects"):
        open_shard(f"http://{server}/loop")
    assert len(Handler.requests) == 9


@pytest.mark.parametrize("path", ["short", "chunkcut", "chunkend"])
def test_http_delivers_what_came_before_the_error_when_the_body_breaks_off(path: str, server: str) -> None:
    """What has arrived is delivered; the read behind it raises, again and again, with both numbers where known."""
    with open_shard(f"http://{server}/{path}") as stream:
        assert stream.read(50_000) == DATA[:50_000]
        for _ in range(2):
            with pytest.raises(ShardOpenError, match=r"broke off after 50,000 (of 100,000 )?bytes"):
                stream.read(1)


def test_open_shard_raises_when_nobody_listens() -> None:
    """A refused connection is an error that says so and shows no password."""
    with pytest.raises(ShardOpenError, match=r"http://u:\*\*\*@127\.0\.0\.1:9/x.*Connection refused") as caught:
        open_shard("http://u:secret@127.0.0.1:9/x")
    assert "secret" not in str(caught.value)


def test_open_shard_raises_when_the_server_is_silent() -> None:
    """A server that accepts and says nothing runs into the time limit."""
    import socket

    options = {"http": {"read_timeout": 0.1, "retries": 1}}
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ShardOpenError, match="timed out"):
        open_shard(f"http://127.0.0.1:{silent.getsockname()[1]}/x", storage_options=options)


def test_open_shard_sends_headers_when_given_options(server: str) -> None:
    """Headers come from the options of the URL's own scheme; a user name in the URL is basic authentication."""
    read(
        f"http://{server}/whole",
        storage_options={"http": {"headers": {"X-Me": "1"}}, "https": {"headers": {"X-No": "1"}}},
    )
    read(f"http://me:p%40w@{server}/whole")
    assert Handler.requests[0][1]["X-Me"] == "1"
    assert "X-No" not in Handler.requests[0][1]
    assert Handler.requests[1][1]["Authorization"] == "Basic bWU6cEB3"


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"header": {"Authorization": "secret"}}, TypeError, r"only 'headers', 'retries'.*, found 'header'"),
        ({"headers": "secret"}, TypeError, "'headers' must map names to values, found a str"),
        ({"headers": {"X-Token": b"secret"}}, TypeError, "'X-Token': a bytes"),
        ({"headers": {"X-Token": "secr\u20act"}}, ValueError, "'X-Token' .*Latin-1"),
        ({"headers": {"X-Token": "sec\nret"}}, ValueError, "'X-Token' .*control characters"),
        ({"headers": {"": "secret"}}, ValueError, "header ''"),
        ({"headers": {"range": "bytes=5-"}}, ValueError, "'range' is set by the reader"),
        ({"retries": "8"}, TypeError, "'retries' must be an int, found a str"),
        ({"retries": True}, TypeError, "'retries' must be an int, found a bool"),
        ({"retries": -1}, ValueError, "'retries' must not be negative, found -1"),
        ({"connect_timeout": None}, TypeError, "'connect_timeout' must be a number of seconds, found a NoneType"),
        ({"read_timeout": 0}, ValueError, "'read_timeout' must be more than 0 seconds, found 0"),
        ({"read_timeout": float("nan")}, ValueError, "'read_timeout' must be more than 0 seconds, found nan"),
    ],
)
def test_open_shard_raises_when_an_option_is_wrong(options: Any, kind: type[Exception], said: str) -> None:
    """A wrong option is named with what is valid, and no value that may be secret is shown."""
    with pytest.raises(kind, match=said) as caught:
        open_shard("http://127.0.0.1:9/x.tar", storage_options={"http": options})
    assert "sec" not in str(caught.value).replace("seconds", "")


def test_open_shard_goes_through_a_proxy_when_the_environment_names_one(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual variables are honoured, with their exceptions."""
    monkeypatch.setenv("http_proxy", f"http://{server}")
    with pytest.raises(ShardOpenError, match="404"):
        open_shard("http://shards.invalid/x.tar")
    assert Handler.requests[0][0] == "http://shards.invalid/x.tar"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(f"http://{server}/whole") == DATA
    http_client._pool.cache_clear()


def test_a_proxy_gets_its_own_password_and_no_other_when_addresses_have_some(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy's goes to the proxy; that of the shard's address is a header, not a part of what is asked for."""
    monkeypatch.setenv("http_proxy", f"http://us:p%40ss@{server}")
    with pytest.raises(ShardOpenError, match="404"):
        open_shard("http://me:hunter2@shards.invalid/x.tar")
    path, headers = Handler.requests[0]
    assert path == "http://shards.invalid/x.tar"
    assert headers["Proxy-Authorization"] == "Basic " + base64.b64encode(b"us:p@ss").decode()
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"me:hunter2").decode()
    http_client._pool.cache_clear()


def test_no_log_line_shows_a_secret_when_the_server_answers(server: str, caplog: pytest.LogCaptureFixture) -> None:
    """What urllib3 logs of each request is masked, and what is logged of failures."""
    with caplog.at_level("DEBUG"):
        read(f"http://{server}/whole?X-Amz-Signature=hunter2")
        with pytest.raises(ShardOpenError):
            read(f"http://{server}/broken?X-Amz-Signature=hunter2")
    assert "GET /whole?X-Amz-Signature=***" in caplog.text
    assert "answered 500 Internal Server Error; attempt 1 of 8 follows" in caplog.text
    assert "hunter2" not in caplog.text


# ----------------------------------------------------------------------------------------------------------- https
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that nobody has signed, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", names, "-keyout", str(path), "-out", f"{path}.cert"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.cert").read_text())
    return path


@pytest.fixture
def secure(certificate: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with that certificate, which this process trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.cert")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    running = QuietServer(("127.0.0.1", 0), Handler)
    running.socket = context.wrap_socket(running.socket, server_side=True)
    http_client._pool.cache_clear()
    with serving(running) as address:
        yield address.replace("http:", "https:")
    http_client._pool.cache_clear()


def test_open_shard_reads_over_https_when_the_certificate_is_trusted(secure: str) -> None:
    """An encrypted connection gives the same bytes, whole and in parts."""
    assert read(f"{secure}/whole") == DATA
    assert read(f"{secure}/ranged", 90_000) == DATA[90_000:]


def test_open_shard_raises_at_once_when_the_certificate_is_wrong(secure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second attempt would end otherwise."""
    monkeypatch.delenv("SSL_CERT_FILE")
    http_client._pool.cache_clear()
    waits: list[float] = []
    monkeypatch.setattr(patience, "seconds_to_wait", lambda failures, asked=0.0: waits.append(asked) or 0.0)
    with pytest.raises(ShardOpenError, match=r"(?i)cannot open shard https://.*certificate verify failed"):
        open_shard(f"{secure}/whole")
    assert not waits


def test_open_shard_raises_when_a_redirect_leaves_encryption(secure: str, server: str) -> None:
    """From https, no redirect leads to http."""
    Handler.target = f"http://{server}/whole?Signature=abc"
    with pytest.raises(
        ShardOpenError, match=r"redirects from https to http://.*Signature=\*\*\*, which is not encrypted"
    ):
        open_shard(f"{secure}/onward")
    assert len(Handler.requests) == 1
    Handler.target = f"{secure}/whole"
    assert read(f"http://{server}/onward") == DATA


@pytest.mark.slow
def test_early_closes_leave_no_socket_when_there_are_many(server: str) -> None:
    """Early closes, broken bodies, refusals and whole readings leave no connection but the one that is kept."""
    read(f"http://{server}/whole")
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for turn in range(100):
        try:
            with open_shard(
                f"http://{server}/{('whole', 'short', 'missing', 'ranged')[turn % 4]}", offset=turn % 2
            ) as stream:
                stream.read(512 if turn % 8 < 4 else 1 << 20)
        except ShardOpenError:
            pass
    http_client._pool(None, os.getpid()).clear()
    for _ in range(100):
        if (after := len(list(Path("/proc/self/fd").iterdir()))) <= before:
            break
        threading.Event().wait(0.02)
    assert after <= before


def test_open_shard_reads_in_a_forked_child_when_the_parent_has_a_connection(server: str) -> None:
    """A child process makes its own connections, and the parent's stream goes on."""
    with open_shard(f"http://{server}/whole") as stream:
        start = stream.read(1000)

        def read_whole() -> None:
            assert read(f"http://{server}/whole") == DATA

        assert in_child(read_whole) == 0
        assert start + stream.read(1 << 20) == DATA


def test_open_shard_shows_no_secret_when_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the message, the chain of causes nor any log line shows a signature."""
    with caplog.at_level("DEBUG"), pytest.raises(ShardOpenError) as caught:
        open_shard("http://127.0.0.1:1/x.tar?X-Amz-Signature=hunter2")
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("url", ["http://h:99999999/x.tar", "http://[bad/x.tar"])
def test_open_shard_names_the_shard_when_its_address_is_malformed(url: str) -> None:
    """A malformed address is a ShardOpenError like any other."""
    with pytest.raises(ShardOpenError, match="malformed") as caught:
        open_shard(url)
    assert caught.value.shard == url


def test_open_http_names_the_cure_when_braces_were_not_expanded(server: str) -> None:
    """As for local paths; other failures and names say nothing of it."""
    for path, is_pattern in {"missing?{0..3}": True, "missing?%7Ba,b%7D": True, "missing?{a}": False}.items():
        with pytest.raises(ShardOpenError) as caught:
            open_shard(f"http://{server}/{path}")
        assert ("a pattern that was not expanded" in str(caught.value)) is is_pattern
