"""S3, against a real server: list, read, slice, write, in workers, with credentials from everywhere."""

import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.s3_server import KEY, SECRET, S3Server, s3_server
from tests.kits.shards import tar_bytes, text_keys, text_samples
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from torchdata_wds.errors import ChangedShardError, ShardListError, ShardOpenError
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.storage import list_targets, list_urls, open_shard, remove_target

pytestmark = pytest.mark.slow

SIZES = (5, 0, 7, 3)


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    """A server with text shards under ``data/train``."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        # No test finds keys or a region of the machine.
        for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        for index, size in enumerate(SIZES):
            server.put(f"data/train/shard-{index:06d}.tar", tar_bytes(text_samples(f"s{index}-", size)))
        server.put("data/train/notes.txt", b"x")
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, with nothing recorded."""
    running.asked.clear()
    running.faults.clear()
    yield running
    # Sessions that a collected filesystem leaves warn about it, in some later test.
    gc.collect()


def samples(server: S3Server, *patterns: str, **options: Any) -> IterDataPipe[dict[str, Any]]:
    """The graph that reads patterns from the server."""
    chosen = {"storage_options": server.options, **options}
    listed = IterableWrapper(patterns).list_shards(**chosen)
    return listed.sharding_filter().load_wds_shards(**chosen).group_by_key()  # type: ignore[no-any-return]


def keys(pipe: Any) -> list[str]:
    return [sample["__key__"] for sample in pipe]


def test_s3_lists_reads_and_writes(server: S3Server) -> None:
    """Globs, folders and braces give the shards; what is saved is there, with its index, and reads back."""
    options = server.options
    urls = [f"s3://data/train/shard-{index:06d}.tar" for index in range(len(SIZES))]
    for pattern in ("s3://data/train/*.tar", "s3://data/train/", "s3://data/train/shard-{000000..000003}.tar"):
        assert list(list_urls(pattern, storage_options=options)) == urls
    assert keys(samples(server, "s3://data/train/")) == text_keys(SIZES)
    written = samples(server, urls[0], urls[2]).save_wds_shards(
        "s3://data/out/x-%02d.tar", max_count=6, index=True, storage_options=options
    )
    assert [shard.count for shard in written] == [6, 6]
    names = ["x-00.tar", "x-01.tar"]
    assert list_targets("s3://data/out", storage_options=options) == names
    indexes = list_targets("s3://data/out/.wds-index", storage_options=options)
    assert indexes == [f"{name}.index" for name in names]
    assert keys(samples(server, "s3://data/out/")) == text_keys((5, 0, 7))
    for name in names:
        remove_target(f"s3://data/out/{name}", storage_options=options)
    with pytest.raises(ShardOpenError, match="not found"):
        open_shard("s3://data/out/x-00.tar", storage_options=options)
    with pytest.raises(ShardListError):
        list(list_urls("s3://data/out/", storage_options=options))


def test_s3_shards_are_indexed_once_and_again_when_they_change(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was scanned is kept by size and ETag; indexes beside the shards are used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"storage_options": server.options}
    urls = [f"s3://data/once/{number}.tar" for number in range(3)]
    for number in range(3):
        server.put(f"data/once/{number}.tar", tar_bytes(text_samples("s", 2)))
    first = find_index(urls, **options)
    assert len(first) == 6
    assert first.shards[0].version is not None
    assert first.shards[0].version.tag
    gets = [asked for asked in server.asked if asked.method == "GET"]
    assert find_index(urls, **options) == first
    assert [asked for asked in server.asked if asked.method == "GET"] == gets
    server.put("data/once/1.tar", tar_bytes(text_samples("t", 2)))  # of the same size
    second = find_index(urls, **options)
    assert (second.find("s00001"), second.find("t00001")) == ([1, 5], [3])
    with pytest.raises(ShardListError, match="has no index beside it"):
        find_index(urls, True, **options)
    for url in urls:
        torchdata_wds.index_shard(url, **options)
    assert find_index(urls, True, **options) == second
    with torchdata_wds.TarWriter(urls[1], index=True, overwrite=True, **options) as writer:
        writer.write({"__key__": "w", "txt": "x"})
    assert find_index(urls, True, **options).find("w") == [2]
    with open_shard(urls[1], **options) as stream:
        server.put("data/once/1.tar", stream.read().replace(b"w.txt", b"v.txt"))
    with pytest.raises(ChangedShardError, match="the ETag"):
        find_index(urls, True, **options)


def test_s3_reads_slices_by_range(server: S3Server) -> None:
    """With an index a slice is read from its first sample on, and each consumer has its part."""
    options = server.options
    data = tar_bytes([(f"{number:04d}.bin", bytes(30_000)) for number in range(100)])
    server.put("data/big/x.tar", data)
    index = torchdata_wds.index_shard("s3://data/big/x.tar", storage_options=options)
    assert len(index) == 100
    index.save("s3://data/big/x.tar.index", storage_options=options)
    server.asked.clear()
    with open_shard("s3://data/big/x.tar", offset=1_024_000, storage_options=options) as stream:
        assert stream.read() == data[1_024_000:]
    assert any(asked.range.startswith("bytes=1024000-") for asked in server.asked)
    parts = []
    for instance in range(2):
        pipe = (
            IterableWrapper(["s3://data/big/x.tar"])
            .split_shards(storage_options=options)
            .load_wds_shards(storage_options=options)
            .group_by_key()
        )
        from torch.utils.data.graph_settings import apply_sharding

        apply_sharding(pipe, 2, instance)
        parts.append(keys(pipe))
    assert [len(part) for part in parts] == [50, 50]
    assert sorted(parts[0] + parts[1]) == [f"{number:04d}" for number in range(100)]


@pytest.mark.parametrize("workers", [0, 2])
def test_s3_is_read_once_when_shards_are_cached(workers: int, server: S3Server, tmp_path: Path) -> None:
    """A second pass asks for no object; the copies are the objects, byte for byte, and no secret is among them."""
    options = server.options
    shards = IterableWrapper(["s3://data/train/"]).list_shards(storage_options=options).sharding_filter()
    pipe = shards.cache_shards(tmp_path, storage_options=options).load_wds_shards(storage_options=options)
    with DataLoader2(pipe.group_by_key(), reading_service=WorkersReadingService(workers)) as loader:
        assert sorted(keys(loader)) == text_keys(SIZES)
        asked = len(server.gets())
        assert asked >= len(SIZES)
        assert sorted(keys(loader)) == text_keys(SIZES)
    assert len(server.gets()) == asked
    copies = sorted(tmp_path.glob("*.tar"))
    assert [path.read_bytes() for path in copies] == [
        tar_bytes(text_samples(f"s{index}-", size)) for index, size in enumerate(SIZES)
    ]
    assert not [path for path in tmp_path.iterdir() if SECRET in path.name]


def test_s3_asks_seldom_when_a_shard_has_many_members(server: S3Server) -> None:
    """A shard costs a request for its size and one for each 16 MiB, however many members it has."""
    server.put("data/many/x.tar", tar_bytes(text_samples("s", 5000)))
    server.asked.clear()
    assert len(keys(samples(server, "s3://data/many/x.tar"))) == 5000
    assert len(server.gets()) == 1
    assert len(server.asked) <= 3


# ---------------------------------------------------------------------------------------------------------- failures
def test_s3_goes_on_when_a_body_breaks_off(server: S3Server) -> None:
    """Bodies that are shorter than their length, one after another, lose nothing."""
    server.put("data/cut/x.tar", tar_bytes(text_samples("s", 200)))
    server.faults += [lambda body: body[: len(body) // 2], lambda body: body[:1000], lambda body: b""]
    assert keys(samples(server, "s3://data/cut/x.tar")) == [f"s{n:05d}" for n in range(200)]
    assert not server.faults


def test_s3_raises_when_the_object_changes_half_way(server: S3Server) -> None:
    """The next block is asked for under the condition that the object is the same."""
    server.put("data/changing/x.tar", bytes(40 << 20))
    with open_shard("s3://data/changing/x.tar", storage_options=server.options) as stream:
        assert len(stream.read(1 << 20)) == 1 << 20
        server.put("data/changing/x.tar", b"\1" * (40 << 20))
        with pytest.raises(ShardOpenError, match=r"x\.tar was changed while it was read, .* its ETag was"):
            stream.read()


def test_s3_lists_and_reads_what_is_there_now(server: S3Server) -> None:
    """Neither new shards nor new versions are hidden by the listings that the client keeps."""
    server.put("data/now/a.tar", tar_bytes(text_samples("a", 3)))
    pipe = samples(server, "s3://data/now/*.tar")
    assert len(keys(pipe)) == 3
    server.put("data/now/b.tar", tar_bytes(text_samples("b", 2)))
    assert len(keys(pipe)) == 5
    (url,) = list_urls("s3://data/now/a*", storage_options=server.options)
    server.put("data/now/a.tar", tar_bytes(text_samples("new", 30)))
    assert len(keys(samples(server, url))) == 30


@pytest.mark.parametrize("url", ["s3://data/no.tar", "s3://no-bucket/x.tar"])
def test_s3_raises_at_once_when_not_found(url: str, server: S3Server) -> None:
    """A missing object or bucket is no reason to try again."""
    with pytest.raises(ShardOpenError, match="not found"):
        open_shard(url, storage_options=server.options)
    assert len(server.asked) < 6


def test_s3_names_the_folder_when_a_url_lacks_its_slash(server: S3Server) -> None:
    """s3fs opens a prefix as an empty object; an object of that name is an empty shard, though."""
    server.put("data/folder/a.tar", tar_bytes(text_samples("a", 3)))
    for offset in (0, 512):
        with pytest.raises(ShardOpenError, match="it is a folder"):
            open_shard("s3://data/folder", offset=offset, storage_options=server.options)
    with pytest.raises(ShardOpenError, match="a pattern that was not expanded"):
        open_shard("s3://data/{a,b}.tar", storage_options=server.options)


# -------------------------------------------------------------------------------------------------------- credentials
def test_s3_takes_credentials_from_storage_options(server: S3Server) -> None:
    """Each stage signs with the keys that it was given, and shows them nowhere."""
    options = {"s3": {"key": "AKIDOTHER", "secret": SECRET, "endpoint_url": server.url}}
    server.put("other/x.tar", tar_bytes(text_samples("s", 2)), key="AKIDOTHER")
    server.asked.clear()
    pipe = samples(server, "s3://other/*.tar", storage_options=options)
    assert len(keys(pipe)) == 2
    with torchdata_wds.ShardWriter("s3://other/y-%d.tar", storage_options=options) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    spec = {"dataset": [{"shards": "s3://other/x.tar"}]}
    assert len(keys(torchdata_wds.load_dataset(spec, storage_options=options))) == 2
    assert {asked.key for asked in server.asked} == {"AKIDOTHER"}
    assert SECRET not in repr(vars(pipe)) + repr(vars(writer))
    with pytest.raises(ShardOpenError) as caught:
        open_shard("s3://other/no.tar", storage_options=options)
    assert SECRET not in str(caught.value) + repr(caught.value.__cause__)
    assert len(keys(pickle.loads(pickle.dumps(pipe)))) == 3


def test_s3_takes_a_profile(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of the AWS files is chosen by its name."""
    file = tmp_path / "credentials"
    file.write_text(f"[mine]\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = {"s3": {"profile": "mine", "endpoint_url": server.url}}
    server.put("prof/x.tar", b"x" * 2048, key="AKIDPROFILE")
    server.asked.clear()
    with open_shard("s3://prof/x.tar", storage_options=options) as stream:
        assert stream.read() == b"x" * 2048
    assert {asked.key for asked in server.asked} == {"AKIDPROFILE"}


def test_s3_takes_the_configuration_files_of_fsspec(server: S3Server, tmp_path: Path) -> None:
    """A file in FSSPEC_CONFIG_DIR gives keys and endpoint, in workers too; options are laid over it."""
    (tmp_path / "s3.json").write_text(
        f'{{"s3": {{"key": "{KEY}", "secret": "{SECRET}", "endpoint_url": "{server.url}"}}}}'
    )
    script = (
        "import torchdata_wds, sys\n"
        "from torch.utils.data.datapipes.iter import IterableWrapper\n"
        "pipe = IterableWrapper(['s3://data/train/']).list_shards().load_wds_shards().group_by_key()\n"
        "print(sum(1 for _ in pipe))\n"
    )
    environment = {**os.environ, "FSSPEC_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == f"{sum(SIZES)}\n", done.stderr
    assert {asked.key for asked in server.asked} == {KEY}


# ------------------------------------------------------------------------------------------------------------ workers
@pytest.mark.parametrize(
    ("context", "used_before"),
    [("fork", False), ("fork", True), ("spawn", True)],
    ids=["fork, fresh", "fork, used in the parent", "spawn, used in the parent"],
)
def test_s3_is_read_by_workers(context: str, used_before: bool, server: S3Server) -> None:
    """Two workers read each sample once, also where the parent's client and its thread existed before the fork."""
    held = None
    if used_before:
        held = open_shard("s3://data/train/shard-000000.tar", storage_options=server.options)
        assert held.read(512)
    else:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
    pipe = samples(server, "s3://data/train/")
    service = WorkersReadingService(2, multiprocessing_context=context, timeout=180)
    loader = DataLoader2(pipe, reading_service=service)
    try:
        for _ in range(2):
            assert sorted(keys(loader)) == sorted(text_keys(SIZES))
    finally:
        loader.shutdown()
    if held is not None:
        assert held.read(512)
        held.close()


def test_s3_is_read_in_a_forked_child_while_the_parent_reads(server: S3Server) -> None:
    """The child makes a client of its own, and the parent's goes on."""
    from tests.kits.processes import in_child

    stream = open_shard("s3://data/train/shard-000000.tar", storage_options=server.options)
    stream.read(10)

    def work() -> None:
        stream.close()
        gc.collect()
        assert len(keys(samples(server, "s3://data/train/"))) == sum(SIZES)

    assert in_child(work) == 0
    assert len(stream.read()) > 1000
    stream.close()


# ------------------------------------------------------------------------------------------------------------- memory
_PEAK = """
import json, sys
from pathlib import Path
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
def read(url):
    return sum(1 for _ in IterableWrapper([url]).load_wds_shards(storage_options=json.loads(sys.argv[1])))
read("s3://data/train/shard-000000.tar")
before = peak()
for name in ("large", "many"):
    print(read(f"s3://data/huge/{name}.tar"), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM")
def test_s3_keeps_little_of_a_large_object_in_memory(server: S3Server) -> None:
    """Of 120 MB, or of a hundred thousand members, no more than a few blocks of 16 MiB are held at a time."""
    for name, members, size in (("large", 120, 1 << 20), ("many", 100_000, 1)):
        data = tar_bytes([(f"{number:06d}.bin", bytes(size)) for number in range(members)])
        server.put(f"data/huge/{name}.tar", data)
    command = [sys.executable, "-c", _PEAK, json.dumps(server.options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    large, above_large, many, above_many = done.stdout.split()
    assert (int(large), int(many)) == (120, 100_000)
    assert max(float(above_large), float(above_many)) < 100, done.stdout
