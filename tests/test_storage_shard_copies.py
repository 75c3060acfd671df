"""Local copies of remote shards: one download, and never half a shard."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.processes import open_files, wait_until
from torchdata_wds.errors import CacheError, ShardFormatError, ShardOpenError
from torchdata_wds.storage.shard_copies import copy_name, is_copied, local_copy

DATA = os.urandom(3 << 20)


class _Counting(BaseHTTPRequestHandler):
    """Answers with DATA; waits in its middle for as long as `gate` is closed."""

    def __init__(self, *args: Any, requests: list[str], gate: threading.Event) -> None:
        self.requests = requests
        self.gate = gate
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.requests.append(self.path)
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(DATA)))
            self.end_headers()
            self.wfile.write(DATA[: 2 << 20])
            if self.path.startswith("/cut"):
                self.close_connection = True
                return
            self.gate.wait(20)
            self.wfile.write(DATA[2 << 20 :])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@contextmanager
def counting_server(gate: threading.Event) -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Counting, requests=requests, gate=gate))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def gate() -> threading.Event:
    """An open gate."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def server(gate: threading.Event) -> Iterator[tuple[str, list[str]]]:
    with counting_server(gate) as found:
        yield found


def names(folder: Path) -> list[str]:
    """What is in the cache, without locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_local_copy_downloads_once_when_asked_again(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    """The folder is made, a copy has the shard's bytes, and nothing stays open."""
    url, requests = server
    folder = tmp_path / "deep" / "cache"
    before = open_files()
    paths = {local_copy(f"{url}/x.tar", folder) for _ in range(3)}
    assert requests == ["/x.tar"]
    (path,) = paths
    assert path.read_bytes() == DATA
    assert names(folder) == [path.name] == [copy_name(f"{url}/x.tar")]
    assert open_files(collect=False) <= before + 1  # the server's kept connection


def test_local_copy_is_relative_to_the_folder_of_today_when_that_is_relative(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is absolute, whatever the folder is called."""
    monkeypatch.chdir(tmp_path)
    path = local_copy(f"{server[0]}/x.tar", "pipe:cache")
    assert path.is_absolute()
    assert path.parent == tmp_path / "pipe:cache"


def test_local_copy_leaves_nothing_to_be_served_when_the_source_breaks_off(
    tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    """The next attempt begins anew, with the leftover of the one before."""
    url, requests = server
    for _ in range(2):
        with pytest.raises(ShardOpenError, match="broke off"):
            local_copy(f"{url}/cut.tar", tmp_path)
        assert not [name for name in names(tmp_path) if name.endswith(".tar")]
    assert len(requests) == 2


def test_local_copy_is_decompressed_and_checked_when_the_shard_is_compressed(tmp_path: Path) -> None:
    """What is damaged is not kept."""
    import fsspec

    memory = fsspec.filesystem("memory")
    data = gzip.compress(b"shard" * 1000)
    memory.pipe("/shard_copies/x.tar.gz", data)
    memory.pipe("/shard_copies/bad.tar.gz", data[:-20])
    path = local_copy("memory://shard_copies/x.tar.gz", tmp_path)
    assert path.read_bytes() == b"shard" * 1000
    with pytest.raises(ShardFormatError):
        local_copy("memory://shard_copies/bad.tar.gz", tmp_path)
    assert [name for name in names(tmp_path) if name.endswith(".tar")] == [path.name]
    memory.rm("/shard_copies", recursive=True)


def test_local_copy_raises_when_the_folder_cannot_be_written(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no folder, a shard's place is taken by one, or the disk is full: the message names folder and shard."""
    url, requests = server
    (tmp_path / "file").write_bytes(b"")
    match = r"shard http://127.*/x\.tar cannot be kept in the cache folder /.*: .*choose a folder"
    with pytest.raises(CacheError, match=match) as caught:
        local_copy(f"{url}/x.tar", tmp_path / "file")
    assert caught.value.shard == f"{url}/x.tar"
    (tmp_path / "cache" / (copy_name(f"{url}/x.tar") + ".lock")).mkdir(parents=True)
    with pytest.raises(CacheError, match=match):
        local_copy(f"{url}/x.tar", tmp_path / "cache")
    assert requests == []

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchdata_wds.storage.writing.os.write", full)
    with pytest.raises(CacheError, match="No space left"):
        local_copy(f"{url}/x.tar", tmp_path / "full")
    assert not [name for name in names(tmp_path / "full") if name.endswith(".tar")]


def test_local_copy_needs_no_writing_when_the_copy_is_there(tmp_path: Path) -> None:
    """Not even a lock: the folder may be read-only, and the source gone."""
    path = tmp_path / copy_name("http://127.0.0.1:9/x.tar")
    path.write_bytes(b"whole")
    assert local_copy("http://127.0.0.1:9/x.tar", tmp_path) == path
    assert len(list(tmp_path.iterdir())) == 1


def test_copy_names_differ_when_urls_do() -> None:
    """By folder, host, query and scheme; the shard's own name can be read in them."""
    urls = [
        "s3://a/x/train-000.tar",
        "s3://b/y/train-000.tar",
        "gs://a/x/train-000.tar",
        "https://a/train-000.tar?v=1",
        "https://a/train-000.tar?v=2",
        "simplecache::s3://a/x/train-000.tar",
        "s3://a/x/train-000.tar.gz",
        "s3://a/x/train-000.tgz",
    ]
    found = [copy_name(url) for url in urls]
    assert len(set(found)) == len(urls)
    assert all(re.fullmatch(r"train-000-[0-9a-f]{32}\.tar", name) for name in found)


@pytest.mark.parametrize(
    "url", ["s3://b/", "s3://b/..", "s3://b/a b\n/ü?.tar", "s3://b/" + "x" * 500, "http://h/%2e%2e%2f", "abc://\udcff"]
)
def test_copy_names_are_plain_when_urls_are_odd(url: str) -> None:
    """No path leads out of the folder, and no file system is asked too much."""
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,180}", copy_name(url))


def test_local_files_and_commands_are_not_copied() -> None:
    """Only what comes from another machine is."""
    assert not any(map(is_copied, ["x.tar", "/x.tar", "file:///x.tar", "pipe:cat x.tar", "-"]))
    assert all(map(is_copied, ["http://h/x.tar", "s3://b/x.tar", "memory://x.tar", "simplecache::s3://b/x.tar"]))


def test_threads_share_one_download_when_they_ask_at_once(
    tmp_path: Path, server: tuple[str, list[str]], gate: threading.Event
) -> None:
    """All but one wait."""
    url, requests = server
    gate.clear()
    threads = [threading.Thread(target=local_copy, args=(f"{url}/x.tar", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(requests) == 1)
    assert not list(tmp_path.glob("*.tar"))
    gate.set()
    for thread in threads:
        thread.join(20)
    assert requests == ["/x.tar"]
    assert (tmp_path / copy_name(f"{url}/x.tar")).read_bytes() == DATA


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_one_download_when_the_first_is_killed(
    tmp_path: Path, server: tuple[str, list[str]], gate: threading.Event, method: str
) -> None:
    """The next one begins anew, the rest wait for it, and nobody sees half a shard."""
    url, requests = server
    gate.clear()
    context = multiprocessing.get_context(method)
    first = context.Process(target=local_copy, args=(f"{url}/x.tar", tmp_path))
    first.start()
    assert wait_until(lambda: bool(list(tmp_path.glob("*.partial"))), 30)
    others = [context.Process(target=local_copy, args=(f"{url}/x.tar", tmp_path)) for _ in range(3)]
    for process in others:
        process.start()
    os.kill(first.pid or 0, signal.SIGKILL)
    assert wait_until(lambda: len(requests) == 2, 30)
    assert not list(tmp_path.glob("*.tar"))
    gate.set()
    for process in (first, *others):
        process.join(30)
    assert [process.exitcode for process in others] == [0, 0, 0]
    assert requests == ["/x.tar"] * 2
    assert (tmp_path / copy_name(f"{url}/x.tar")).read_bytes() == DATA
