"""Every other store, by fsspec."""

from __future__ import annotations

import gc
import gzip
import io
import logging
import os
import random
import subprocess
import sys
import threading
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry

from tests.kits.processes import in_child
from tests.kits.servers import serve_folder
from tests.kits.shards import write_tar
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import StorageOptions, open_shard
from torchdata_wds.storage import retrying as patience
from torchdata_wds.storage.sources.fsspec import RemoteSource

DATA = os.urandom(100_000)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Shards in fsspec's memory filesystem."""
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/shards/a.tar": DATA, "/shards/b.tar": gzip.compress(DATA), "/shards/empty.tar": b""})
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def read(url: str, offset: int = 0, **options: Any) -> bytes:
    with open_shard(url, offset=offset, **options) as stream:
        return stream.read(1 << 20) + stream.read(1)


@pytest.mark.parametrize("offset", [0, 1, 512, 100_000])
@pytest.mark.parametrize("name", ["a", "b"])
def test_open_shard_reads_when_fsspec_knows_the_scheme(name: str, offset: int) -> None:
    """Plain and compressed shards are read from any decompressed byte on."""
    assert read(f"memory://shards/{name}.tar", offset) == DATA[offset:]


@pytest.mark.parametrize("name", ["a", "b", "empty"])
def test_open_shard_raises_when_the_offset_lies_behind_the_end(name: str) -> None:
    """An offset behind the end is an error and not an empty shard."""
    with pytest.raises(ShardFormatError, match="before the offset 100,001"):
        read(f"memory://shards/{name}.tar", 100_001)
    assert read("memory://shards/empty.tar") == b""


def test_open_shard_reads_when_urls_are_chained(tmp_path: Path) -> None:
    """Archives and caches stand before the URL that they read through."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("in/a.tar", DATA)
    cache = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    assert read(f"zip://in/a.tar::file://{tmp_path}/x.zip") == DATA
    assert read(f"zip://in/a.tar::{tmp_path}/x.zip", 7) == DATA[7:]
    assert read("simplecache::memory://shards/a.tar", 7, storage_options=cache) == DATA[7:]
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("url", ["memory://shards/no.tar", "zip://no.tar::memory://shards/no.zip"])
def test_open_shard_raises_when_not_found(url: str) -> None:
    """What is not there is said to be not found, with the original exception as the cause."""
    with pytest.raises(ShardOpenError, match="not found") as caught:
        open_shard(url)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.shard == url


def test_open_shard_lists_the_known_when_the_scheme_is_unknown() -> None:
    """An unknown scheme is named, with those that are known."""
    with pytest.raises(ShardOpenError, match=r"unknown scheme s4; known are .*memory.*, s3, "):
        open_shard("s4://bucket/x.tar")


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("abfs", "azure"), ("hf", "hf"), ("s3", "s3")])
def test_open_shard_names_the_extra_when_the_package_is_missing(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme whose package is not installed is answered with the command that installs it."""
    for package in ("gcsfs", "adlfs", "huggingface_hub", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(ShardOpenError, match=rf"pip install 'torchdata_wds\[{extra}\]'"):
        open_shard(f"{scheme}://bucket/x.tar")


class Picky(MemoryFileSystem):  # type: ignore[misc]
    """A store that keeps what it was made with, and fails as it is told."""

    protocol = ("picky", "fussy")
    made: list[dict[str, Any]]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].lstrip("/") if "://" in path else path

    def __init__(self, *args: Any, **options: Any) -> None:
        self.made.append(options)
        if options.get("secret") == "wrong":
            raise PermissionError("no access with https://host/?X-Amz-Signature=abc")
        super().__init__(*args, **options)


@pytest.fixture
def picky() -> type[Picky]:
    Picky.made = []
    for name in Picky.protocol:
        fsspec.register_implementation(name, Picky, clobber=True)
    return Picky


@pytest.mark.parametrize("name", ["picky", "fussy"])
def test_open_shard_gives_the_store_its_options(name: str, picky: type[Picky]) -> None:
    """Options arrive under either name of the store, those of other stores do not; what was given is unchanged."""
    options = {name: {"secret": "right"}, "s3": {"key": "k"}}
    assert read("picky://shards/a.tar", storage_options=options) == DATA
    assert picky.made == [{"secret": "right"}]
    assert options == {name: {"secret": "right"}, "s3": {"key": "k"}}


def test_open_shard_masks_secrets_when_the_store_refuses(picky: type[Picky]) -> None:
    """The store's own message is passed on without signatures."""
    with pytest.raises(ShardOpenError, match=r"PermissionError: no access .*Signature=\*\*\*"):
        open_shard("picky://x.tar", storage_options=StorageOptions({"picky": {"secret": "wrong"}}))


class Shrinking:
    """A file object that says it is larger than it is, or fails in the middle."""

    size = 1000

    def __init__(self, data: bytes, failure: Exception | None = None) -> None:
        self.data, self.failure, self.closed = data, failure, False

    def read(self, size: int) -> bytes:
        if not self.data and self.failure:
            raise self.failure
        data, self.data = self.data[:size], self.data[size:]
        return data

    def seek(self, offset: int) -> None:
        self.data = self.data[offset:]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failure", [None, TimeoutError("too slow"), RuntimeError("client broke")])
def test_remote_source_raises_when_the_object_breaks_off_again_and_again(
    failure: Exception | None, picky: type[Picky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than the store announced, or any exception of its client, come after the data before it."""
    file = Shrinking(DATA[:700], failure)
    monkeypatch.setattr(picky, "open", lambda *args, **options: file)
    with open_shard("picky://x.tar") as stream:
        assert stream.read(700) == DATA[:700]
        with pytest.raises(ShardOpenError, match="gave up at byte 700 after 6 attempts without progress") as caught:
            stream.read(1)
        assert ("700 of 1,000" if failure is None else str(failure)) in str(caught.value)
    assert file.closed


def test_remote_source_closes_its_file_when_closed_early(picky: type[Picky], monkeypatch: pytest.MonkeyPatch) -> None:
    """An early close closes the store's file."""
    file = Shrinking(DATA)
    monkeypatch.setattr(picky, "open", lambda *args, **options: file)
    open_shard("picky://x.tar").close()
    assert file.closed


# ------------------------------------------------------------------------------------------- reads that fail half-way
class Planned:
    """A file object that gives what its store's plan says: so many bytes, and then an error or an early end."""

    def __init__(self, store: type[Breaking], data: bytes, details: dict[str, Any]) -> None:
        self.store, self.data, self.details, self.size = store, data, details, len(data)
        self.left, self.failure = store.plan.pop(0) if store.plan else (len(data), None)
        self.place = 0

    def read(self, size: int) -> bytes:
        if self.left <= 0 and self.place < self.size:
            if isinstance(self.failure, Exception):
                raise self.failure
            if self.failure == "ends":
                return b""
        count = min(size, self.left) if self.failure else size
        data = self.data[self.place : self.place + count]
        self.left -= len(data)
        self.place += len(data)
        return data

    def seek(self, offset: int) -> None:
        self.place = offset
        self.store.sought.append(offset)

    def close(self) -> None:
        self.store.closed += 1


class Prefixes(MemoryFileSystem):  # type: ignore[misc]
    """Opens a folder as an empty object, as clients of S3, GCS and Azure do."""

    protocol = "prefixes"
    cachable = False
    tells: ClassVar[bool] = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].strip("/") if "://" in path else path

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if not self.isdir(path):
            return super()._open(path, mode, **options)
        file: Any = type("Empty", (io.BytesIO,), {"size": 0, "details": {"size": 0, "type": "directory"}})()
        if not self.tells:
            file.details = {"size": 0}
        return file


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(
    ("url", "offset"), [("prefixes://shards", 0), ("prefixes://shards", 512), ("memory://shards", 0)]
)
def test_open_shard_names_the_folder_when_a_url_lacks_its_slash(
    url: str, offset: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the store opens it as an empty object, and says so, or does not find it."""
    monkeypatch.setattr(Prefixes, "tells", tells)
    fsspec.register_implementation("prefixes", Prefixes, clobber=True)
    with pytest.raises(
        ShardOpenError, match=r"it is a folder; \.list_shards\(\) lists its shards if its URL ends in /"
    ):
        open_shard(url, offset=offset)
    assert read("prefixes://shards/empty.tar") == b""
    with pytest.raises(ShardOpenError, match=r"not found$"):
        open_shard("memory://nothing")


@pytest.mark.parametrize(
    ("url", "is_pattern"),
    [("memory://shards/{0..3}.tar", True), ("memory://shards/*.tar", True), ("memory://shards/x.tar?a=1", False)],
)
def test_open_shard_names_the_cure_when_a_pattern_was_not_expanded(url: str, is_pattern: bool) -> None:
    """As for local paths."""
    with pytest.raises(ShardOpenError) as caught:
        open_shard(url)
    assert ("put .list_shards() before the loader" in str(caught.value)) is is_pattern


class Breaking(MemoryFileSystem):  # type: ignore[misc]
    """A store whose files break as its plan says, one entry for each opening."""

    protocol = "breaking"
    cachable = False
    plan: ClassVar[list[tuple[int, Any]]] = []
    sought: ClassVar[list[int]] = []
    versions: ClassVar[list[tuple[bytes, dict[str, Any]]]] = []
    refusals: ClassVar[list[Exception]] = []
    opened = closed = forgotten = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].lstrip("/") if "://" in path else path

    def invalidate_cache(self, path: str | None = None) -> None:
        type(self).forgotten += 1

    def open(self, path: str, *args: Any, **options: Any) -> Planned:
        if self.refusals:
            raise self.refusals.pop(0)
        type(self).opened += 1
        data, details = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return Planned(type(self), data, details)


@pytest.fixture
def breaking() -> type[Breaking]:
    fsspec.register_implementation("breaking", Breaking, clobber=True)
    Breaking.plan, Breaking.sought, Breaking.refusals = [], [], []
    Breaking.versions = [(DATA, {"ETag": "one"})]
    Breaking.opened = Breaking.closed = Breaking.forgotten = 0
    return Breaking


def test_remote_source_goes_on_when_reads_fail(breaking: type[Breaking], caplog: pytest.LogCaptureFixture) -> None:
    """It is opened again where it broke, whatever broke it, by no old listing; nothing is lost or doubled."""
    breaking.plan = [(10, ConnectionResetError("reset")), (0, TimeoutError("X-Amz-Signature=abc")), (30_000, "ends")]
    with caplog.at_level(logging.INFO):
        assert read("breaking://x.tar") == DATA
    assert breaking.sought == [10, 10, 30_010]
    assert breaking.opened == breaking.closed == 4
    assert breaking.forgotten == 3
    assert "failed at byte 10: ConnectionResetError: reset; attempt 1 of 5 follows" in caplog.text
    assert "abc" not in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_remote_source_gives_the_same_bytes_when_a_plan_of_failures_is_drawn(
    seed: int, breaking: type[Breaking]
) -> None:
    """As long as there is progress now and then, the number of failures does not matter."""
    rng = random.Random(seed)
    failures: list[Any] = [OSError("x"), ConnectionResetError("y"), RuntimeError("z"), "ends"]
    for _ in range(rng.randrange(1, 40)):
        breaking.plan += [(0, rng.choice(failures)) for _ in range(rng.randrange(5))]
        breaking.plan.append((rng.randrange(1, 9000), rng.choice(failures)))
    offset = rng.randrange(len(DATA))
    with open_shard("breaking://x.tar") as stream:
        assert stream.read(offset) + stream.read() == DATA


@pytest.mark.parametrize(
    "failure", [FileNotFoundError("gone"), PermissionError("expired"), IsADirectoryError("x"), TypeError("bug")]
)
def test_remote_source_gives_up_at_once_when_it_is_hopeless(failure: Exception, breaking: type[Breaking]) -> None:
    """What no second attempt will change is an error that names the shard and the byte."""
    breaking.plan = [(10, failure)]
    with open_shard("breaking://x.tar") as stream:
        assert stream.read(10) == DATA[:10]
        said = rf"breaking://x.tar broke off after 10 of 100,000 bytes: {type(failure).__name__}"
        with pytest.raises(ShardOpenError, match=said):
            stream.read(1)
    assert breaking.opened == breaking.closed == 1


def test_remote_source_counts_attempts_without_progress(breaking: type[Breaking]) -> None:
    """Each byte of progress gives as many attempts again; without any, six end it."""
    breaking.plan = [(1, OSError("x")), *[(0, OSError("x"))] * 4] * 3 + [(0, OSError("last"))] * 9
    said = "broke off after 3 of 100,000 bytes: OSError: last; gave up at byte 3 after 6 attempts"
    with open_shard("breaking://x.tar") as stream, pytest.raises(ShardOpenError, match=said):
        stream.read()


@pytest.mark.parametrize(
    ("data", "details", "said"),
    [
        (DATA, {"ETag": "two", "mtime": 1}, "its ETag was one, and is two"),
        (DATA[:-1], {"ETag": "one"}, "it had 100,000 bytes, and has 99,999"),
        (DATA + b"x", {}, "it had 100,000 bytes, and has 100,001"),
        (DATA, {"mtime": 2}, "its mtime was 1, and is 2"),
        (DATA, {"ETag": "one", "mtime": 2}, None),
        (DATA, {"other": 2}, None),
    ],
)
def test_remote_source_raises_when_the_object_was_changed(
    data: bytes, details: dict[str, Any], said: str | None, breaking: type[Breaking]
) -> None:
    """What is opened again must have the same size, and the same version as far as the store tells one."""
    breaking.plan = [(10, OSError("x"))]
    breaking.versions = [(DATA, {"ETag": "one", "mtime": 1}), (data, details)]
    with open_shard("breaking://x.tar") as stream:
        assert stream.read(10) == DATA[:10]
        if said is None:
            assert stream.read() == DATA[10:]
        else:
            with pytest.raises(ShardOpenError, match=f"x.tar was changed while it was read, after 10 bytes: {said}"):
                stream.read()
    assert breaking.opened == breaking.closed == 2


def test_remote_source_takes_another_version_when_nothing_was_read(breaking: type[Breaking]) -> None:
    """What a store knew from an old listing is no reason to refuse the object as it is."""
    breaking.plan = [(0, OSError("pre-conditions"))]
    breaking.versions = [(DATA, {"ETag": "one"}), (DATA[:100], {"ETag": "two"})]
    assert read("breaking://x.tar") == DATA[:100]


def test_remote_source_compares_versions_without_quotes(breaking: type[Breaking]) -> None:
    """Azure's listings leave out the quotes that its answers have."""
    breaking.plan = [(10, OSError("x"))]
    breaking.versions = [(DATA, {"etag": "one"}), (DATA, {"etag": '"one"'})]
    assert read("breaking://x.tar") == DATA


def test_remote_source_asks_the_store_when_its_files_know_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory file that is written anew is another one."""
    filesystem = fsspec.filesystem("memory")
    source = RemoteSource(filesystem, "/shards/a.tar", "x")
    assert source.read(10) == DATA[:10]
    filesystem.pipe("/shards/a.tar", DATA[::-1])
    monkeypatch.setattr(MemoryFile, "read", lambda *_: 1 / 0)
    with pytest.raises(ShardOpenError, match=r"after 10 bytes: its (modified|created) was"):
        source.read(10)


def test_open_shard_tries_again_when_opening_fails(breaking: type[Breaking]) -> None:
    """The store may be away for a moment; what is hopeless is said at once."""
    breaking.refusals = [OSError("busy"), TimeoutError("slow")]
    assert read("breaking://x.tar") == DATA
    breaking.refusals = [OSError("busy"), PermissionError("no"), OSError("busy")]
    with pytest.raises(ShardOpenError, match=r"breaking://x\.tar: PermissionError: no"):
        open_shard("breaking://x.tar")
    assert len(breaking.refusals) == 1
    breaking.refusals = [OSError("busy")] * 9
    with pytest.raises(ShardOpenError, match=r"breaking://x\.tar: OSError: busy"):
        open_shard("breaking://x.tar")
    assert len(breaking.refusals) == 6


def test_remote_source_does_not_wait_when_it_is_interrupted(
    breaking: type[Breaking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits to try again ends at once when nobody wants the shard any more."""
    monkeypatch.setattr(patience, "seconds_to_wait", lambda failures, asked=0.0: 300.0)
    breaking.plan = [(10, OSError("x"))]
    source = RemoteSource(fsspec.filesystem("breaking"), "/x.tar", "x")
    assert source.read(10) == DATA[:10]
    timer = threading.Timer(0.05, source.interrupt)
    timer.start()
    with pytest.raises(ShardOpenError, match=r"broke off after 10 of 100,000 bytes: .*; reading was interrupted"):
        source.read(10)
    timer.join()
    source.close()
    source.interrupt()


def test_open_shard_reads_in_a_forked_child_when_the_parent_has_read() -> None:
    """A child process makes its own client."""
    assert read("memory://shards/a.tar") == DATA

    def read_rest() -> None:
        assert read("memory://shards/a.tar", 10) == DATA[10:]

    assert in_child(read_rest) == 0


class Waiting(AsyncFileSystem):  # type: ignore[misc]
    """A store with an asynchronous client."""

    protocol = "waiting"


def test_clients_of_the_parent_are_kept_when_a_child_is_forked() -> None:
    """Collecting one in the child would wait for the parent's thread, so it lives on there, unused."""
    fsspec.register_implementation("waiting", Waiting, clobber=True)
    client = weakref.ref(fsspec.filesystem("waiting"))

    def collect() -> None:
        gc.collect()
        assert client() is not None
        assert fsspec.filesystem("waiting") is not client()

    assert in_child(collect) == 0


# ------------------------------------------------------------------------------------------------------------- memory
PEAK = """
import sys
from pathlib import Path
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
for url in sys.argv[1:]:
    pipe = IterableWrapper([url]).list_shards().load_wds_shards().group_by_key()
    count = sum(1 for _ in pipe)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(count, peak.split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM")
def test_remote_shards_are_read_in_constant_memory(tmp_path: Path) -> None:
    """A shard of a hundred thousand members takes hardly more than one of a thousand."""
    counts = (1_000, 100_000)
    for members in counts:
        write_tar(tmp_path / f"{members}.tar", [(f"{number:06d}.txt", b"x") for number in range(members)])
    with serve_folder(tmp_path) as address:
        command = [sys.executable, "-c", PEAK, *(f"{address}/{members}.tar" for members in counts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    small, peak_small, large, peak_large = map(int, done.stdout.split())
    assert (small, large) == counts
    assert peak_large - peak_small < 48 * 1024


def test_interrupt_counts_when_it_comes_while_the_object_is_opened(
    breaking: type[Breaking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt follows for a reader that has left."""
    source = RemoteSource(fsspec.filesystem("breaking"), "/x.tar", "x")
    opening = source._open

    def interrupted() -> Any:
        source.interrupt()
        return opening()

    monkeypatch.setattr(source, "_open", interrupted)
    breaking.plan = [(0, OSError("x"))]
    source.connect()
    with pytest.raises(ShardOpenError, match="reading was interrupted"):
        source.fill(memoryview(bytearray(10)))
    assert breaking.opened == 1
