"""AIStore: which URLs go there, what its gateway is shown, and reading and writing through its redirects."""

import gzip
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from fsspec.registry import _registry
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.servers import serving
from tests.kits.shards import tar_bytes, text_keys, text_samples
from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.storage import list_targets, list_urls, open_shard, open_target, remove_target
from torchdata_wds.storage.sources.aistore import object_address

DATA = os.urandom(100_000)
TOKEN = "secret-token"


class Node(BaseHTTPRequestHandler):
    """What gateway and target have in common."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[tuple[str, str, dict[str, str]]]] = []
    target = ""
    token = ""

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_any(self) -> None:
        self.asked.append((type(self).__name__, self.command, {k.lower(): v for k, v in self.headers.items()}))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.handle_request(unquote(urlsplit(self.path).path.removeprefix("/v1/objects/")), body)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_any  # noqa: N815

    def handle_request(self, name: str, body: bytes) -> None:
        raise AssertionError


class Gateway(Node):
    """Looks at the token and sends to the target."""

    def handle_request(self, name: str, body: bytes) -> None:
        assert not body
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(401, b"token required")
        provider = re.search(r"provider=(\w+)", self.path)
        assert provider is not None
        return self.answer(307, Location=f"{self.target}{self.path}&pid=signed&owner={provider[1]}")


class Target(Node):
    """Has the objects, under owner/bucket/name."""

    def handle_request(self, name: str, body: bytes) -> None:
        owner = re.search(r"&owner=(\w+)", self.path)
        assert owner is not None, "nobody gets here without the gateway"
        name = f"{owner[1]}/{name}"
        if self.command == "PUT":
            self.objects[name] = body
            return self.answer(200)
        if name not in self.objects:
            return self.answer(404, b"no such object")
        if self.command == "DELETE":
            del self.objects[name]
            return self.answer(200)
        data = self.objects[name]
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            return self.answer(200, data, ETag='"1"')
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self.answer(416, Content_Range=f"bytes */{len(data)}")
        place = f"bytes {first}-{last}/{len(data)}"
        return self.answer(206, data[first : last + 1], Content_Range=place, ETag='"1"')


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """A gateway and a target."""
    gateway, target = (ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Gateway, Target))
    with serving(gateway) as address, serving(target) as Gateway.target:
        yield address


@pytest.fixture(autouse=True)
def ais(servers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment points to the gateway, which wants a token."""
    Node.objects.clear()
    Node.asked.clear()
    Node.objects["ais/b/x.tar"] = Node.objects["aws/b/a dir/ü?.tar"] = DATA
    for name in ("USE_AIS_FOR", "WDS_REWRITE", "GOPEN_REWRITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Gateway, "token", TOKEN)
    monkeypatch.setenv("AIS_ENDPOINT", servers + "/")
    monkeypatch.setenv("AIS_AUTHN_TOKEN", TOKEN)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def read(url: str, offset: int = 0, **options: Any) -> bytes:
    with open_shard(url, offset=offset, **options) as stream:
        return stream.read()


def headers(node: type[Node]) -> list[dict[str, str]]:
    return [found for name, _, found in Node.asked if name == node.__name__]


# ---------------------------------------------------------------------------------------------------------- addresses
@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("ais://b/x.tar", "/v1/objects/b/x.tar?provider=ais"),
        ("s3://b/d/x y#1?.tar", "/v1/objects/b/d/x%20y%231%3F.tar?provider=aws"),
        ("GS://b/x%20.tar", "/v1/objects/b/x%2520.tar?provider=gcp"),
        ("az://b/x.tar", "/v1/objects/b/x.tar?provider=azure"),
        ("abfs://b@account.dfs.core.windows.net/x.tar", "/v1/objects/b/x.tar?provider=azure"),
        ("oci://b/x.tar", "/v1/objects/b/x.tar?provider=oci"),
    ],
)
def test_object_address_names_bucket_object_and_provider(url: str, address: str, servers: str) -> None:
    """The object's name is percent-encoded, whatever it looks like."""
    assert object_address(url) == servers + address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ais://b", "names no object in a bucket; write ais://bucket/object"),
        ("ais:///x.tar", "names no object"),
        ("hf://b/x.tar", "USE_AIS_FOR names 'hf', which AIStore does not know; known are ais, s3"),
    ],
)
def test_open_shard_raises_when_there_is_no_address(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL that AIStore cannot have is named."""
    monkeypatch.setenv("USE_AIS_FOR", "hf")
    with pytest.raises(ShardOpenError, match=said) as caught:
        open_shard(url)
    assert caught.value.shard == url


@pytest.mark.parametrize(
    ("endpoint", "said"), [("", "AIS_ENDPOINT is not set; set it"), ("me:hunter2@host", "not an address")]
)
def test_open_shard_raises_when_there_is_no_endpoint(endpoint: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable to set is named, for reading and writing."""
    monkeypatch.setenv("AIS_ENDPOINT", endpoint)
    for use in (open_shard, open_target, remove_target):
        with pytest.raises(ShardOpenError, match=said) as caught:
            use("ais://b/x.tar")  # type: ignore[operator]
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"headers": "hunter2"}, TypeError, "'ais': 'headers' must map names to values, found a str"),
        ({"headers": {"X-Key": b"hunter2"}}, TypeError, "'X-Key': a bytes"),
        ({"headers": {"X-Key": "hunter2\n\nx"}}, ValueError, "'X-Key' or its value contains control"),
        ({"token": "hunter2"}, TypeError, "for 'ais' takes only 'headers', .* found 'token'"),
    ],
)
def test_aistore_raises_when_an_option_is_wrong(options: Any, kind: type[Exception], said: str) -> None:
    """What no web server takes is refused for reading and writing alike, and not shown."""
    for use in (open_shard, open_target, remove_target):
        with pytest.raises(kind, match=said) as caught:
            use("ais://b/x.tar", storage_options={"ais": options})  # type: ignore[operator]
        assert "hunter2" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize("offset", [0, 7, 100_000])
def test_open_shard_reads_through_the_gateway(offset: int) -> None:
    """The gateway is shown the token, and the target is not."""
    assert read("ais://b/x.tar", offset) == DATA[offset:]
    assert {found["authorization"] for found in headers(Gateway)} == {f"Bearer {TOKEN}"}
    assert headers(Target)
    assert not any("authorization" in found for found in headers(Target))
    if offset == 7:
        assert any(found.get("range") == "bytes=7-" for found in headers(Target))


def test_open_shard_goes_to_aistore_when_use_ais_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes are read at call time, separated by colons; others go their own way."""
    Node.objects["gcp/b/x.tar"] = DATA
    monkeypatch.setenv("USE_AIS_FOR", "gs:s3")
    assert read("s3://b/a dir/ü?.tar") == read("gs://b/x.tar") == DATA
    monkeypatch.setenv("USE_AIS_FOR", "s3")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    asked = len(Node.asked)
    with pytest.raises(ShardOpenError, match="the package for gs: is not installed"):
        open_shard("gs://b/x.tar")
    assert len(Node.asked) == asked


def test_open_shard_gives_the_gateway_headers_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers under "ais" are sent besides the token, or in its place; those of web servers are not."""
    options = {"ais": {"headers": {"X-Team": "blue"}}, "http": {"headers": {"X-Web": "no"}}}
    assert read("ais://b/x.tar", storage_options=options) == DATA
    (found,) = headers(Gateway)
    assert (found["x-team"], found["authorization"]) == ("blue", f"Bearer {TOKEN}")
    assert "x-web" not in found
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "old")
    mine = {"ais": {"headers": {"authorization": f"Bearer {TOKEN}"}}}
    assert read("ais://b/x.tar", storage_options=mine) == DATA
    with pytest.raises(TypeError):
        open_shard("ais://b/x.tar", storage_options={"ais": {"no_such_option": 1}})


@pytest.mark.parametrize(("url", "status"), [("ais://b/no.tar", "404"), ("ais://b/x.tar", "401")])
def test_open_shard_names_both_when_aistore_refuses(url: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the URL as given and the address, and no token."""
    if status == "401":
        monkeypatch.setenv("AIS_AUTHN_TOKEN", "wrong-token")
    with pytest.raises(ShardOpenError, match=rf"/v1/objects/b/.*{status}.*AIStore's address of shard {url}") as caught:
        open_shard(url)
    assert caught.value.shard == url
    assert "wrong-token" not in str(caught.value)


def test_open_shard_names_the_url_when_reading_fails() -> None:
    """Damage that shows while reading is told of the URL as given, and offsets count decompressed bytes."""
    Node.objects["ais/b/x.tar.gz"] = gzip.compress(DATA)
    assert read("ais://b/x.tar.gz", 5) == DATA[5:]
    Node.objects["ais/b/x.tar.gz"] = gzip.compress(DATA)[:-5]
    with open_shard("ais://b/x.tar.gz") as stream, pytest.raises(ShardFormatError, match=r"shard ais://b/x\.tar\.gz\)"):
        stream.read()


def test_graph_reads_from_aistore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Braces are expanded, samples have the names as given, and rules may lead there."""
    for index, size in enumerate((2, 3)):
        Node.objects[f"gcp/b/{index}.tar"] = tar_bytes(text_samples(f"s{index}-", size))
    monkeypatch.setenv("USE_AIS_FOR", "gs")
    monkeypatch.setenv("WDS_REWRITE", "data/=gs://b/")
    for pattern in ("gs://b/{0..1}.tar", "data/{0..1}.tar"):
        samples = list(IterableWrapper([pattern]).list_shards().load_wds_shards().group_by_key())
        assert [sample["__key__"] for sample in samples] == text_keys((2, 3))
        assert samples[-1]["__url__"] == pattern.replace("{0..1}", "1")


@pytest.mark.parametrize("pattern", ["ais://b/*.tar", "ais://b/", "ais://b/x[0-3].tar"])
def test_list_urls_names_braces_when_asked_to_search(pattern: str) -> None:
    """AIStore is not searched, and the error says what to write."""
    with pytest.raises(ShardListError, match=r"write braces, as ais://bucket/train-\{000\.\.146\}\.tar"):
        list(list_urls(pattern))
    with pytest.raises(ShardOpenError, match="write braces"):
        list_targets("ais://b/")


# ------------------------------------------------------------------------------------------------------------ writing
def test_targets_are_written_through_the_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shard appears whole, by a redirected PUT, which the gateway gets no byte of; removing works too."""
    monkeypatch.setenv("USE_AIS_FOR", "s3")
    target = open_target("s3://b/new/y.tar")
    target.write(DATA)
    assert "aws/b/new/y.tar" not in Node.objects
    target.commit()
    assert Node.objects["aws/b/new/y.tar"] == DATA
    assert not any("authorization" in found for found in headers(Target))
    with pytest.raises(ShardOpenError, match=r"cannot write s3://b/new/y.tar: it already exists"):
        open_target("s3://b/new/y.tar")
    remove_target("s3://b/new/y.tar")
    remove_target("s3://b/new/y.tar")
    assert "aws/b/new/y.tar" not in Node.objects
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("wds-")]


def test_shard_writer_writes_to_aistore() -> None:
    """Shards and their indexes are put there, and read back from their middle."""
    with torchdata_wds.ShardWriter("ais://b/out-%02d.tar", max_count=20, index=True) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number:04d}", "txt": str(number)})
    names = {"ais/b/out-00.tar", "ais/b/out-01.tar"}
    assert names | {f"ais/b/.wds-index/out-0{number}.tar.index" for number in range(2)} <= set(Node.objects)
    pipe = IterableWrapper(["ais://b/out-{00..01}.tar"]).list_shards().split_shards().load_wds_shards().group_by_key()
    assert [sample["txt"] for sample in pipe] == [str(number).encode() for number in range(30)]


def test_targets_are_kept_when_aistore_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong token fails at once, and the file is kept; no token is in the message."""
    target = open_target("ais://b/y.tar")
    target.write(DATA)
    monkeypatch.setattr(Gateway, "token", "changed")
    with pytest.raises(ShardOpenError, match=r"could not be uploaded: PermissionError: AIStore answered 401") as caught:
        target.commit()
    assert TOKEN not in str(caught.value)
    (kept,) = (path for path in tmp_path.iterdir() if path.name.startswith("wds-"))
    assert kept.read_bytes() == DATA
    with pytest.raises(ShardOpenError, match="cannot check whether it exists: PermissionError"):
        open_target("ais://b/z.tar")
    with pytest.raises(ShardOpenError, match=r"cannot remove .*: PermissionError"):
        remove_target("ais://b/x.tar")
