"""TarWriter: one archive, whole or not there."""

import contextlib
import copy
import gc
import gzip
import hashlib
import inspect
import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, in_child, open_files
from torchdata_wds import (
    EncodingError,
    MissingFieldError,
    ReappearingKeyError,
    SampleError,
    ShardFormatError,
    ShardIndex,
    ShardOpenError,
    ShardWriter,
    TarWriter,
    UnsafeDataError,
    WebDataset,
)
from torchdata_wds.format.index import IndexHeader
from torchdata_wds.format.index.sidecars import index_urls, old_index_url
from torchdata_wds.storage import open_shard

SAMPLES = [{"__key__": f"d/{number:04d}", "cls": number, "txt": "ä" * number} for number in range(30)]


def write(file: Any, samples: list[dict[str, Any]] | None = None, **options: Any) -> None:
    """Writes samples, and closes."""
    with TarWriter(file, **options) as writer:
        for sample in SAMPLES if samples is None else samples:
            writer.write(sample)


def read(path: Path | str) -> list[dict[str, Any]]:
    """The samples of a shard, decoded."""
    return list(WebDataset(str(path), shardshuffle=False, decoder=[]))


def stripped(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples without their URL."""
    return [{field: value for field, value in sample.items() if field != "__url__"} for sample in samples]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst"])
def test_write_is_read_back_when_the_suffix_chooses_the_compression(suffix: str, tmp_path: Path) -> None:
    """Each suffix gives the compression that it names, and only the finished file is left."""
    path = tmp_path / f"x.{suffix}"
    write(path)
    assert stripped(read(path)) == SAMPLES
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert (path.read_bytes()[:3] == b"d/0") == (suffix == "tar")


def test_compress_overrules_the_suffix(tmp_path: Path) -> None:
    """False writes plain bytes into x.gz; a name or True compresses anything, as webdataset has it."""
    write(tmp_path / "x.gz", compress=False)
    write(tmp_path / "x.tar", compress="gz")
    write(tmp_path / "y.tar", compress=True)
    assert gzip.decompress((tmp_path / "x.tar").read_bytes()) == (tmp_path / "x.gz").read_bytes()
    assert (tmp_path / "y.tar").read_bytes() == (tmp_path / "x.tar").read_bytes()
    with pytest.raises(ValueError, match="zip"):
        TarWriter(tmp_path / "z.tar", compress="zip")


def test_write_returns_the_bytes_in_the_archive(tmp_path: Path) -> None:
    """Headers and padding are counted."""
    with TarWriter(tmp_path / "x.tar") as writer:
        sizes = [writer.write(sample) for sample in SAMPLES]
    assert (sizes[0], sizes[1]) == (1536, 2048)
    assert (tmp_path / "x.tar").stat().st_size == -(-(sum(sizes) + 1024) // 10240) * 10240


WRITE = """
import sys, time
from torchdata_wds import TarWriter
with TarWriter(sys.argv[1]) as writer:
    for number in range(200):
        sample = {"cls": number, "json": {"b": [1.5, "ü"], "a": None}, "txt": "x" * number}
        writer.write({"__key__": f"{number:04d}", **sample})
"""


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_same_samples_give_the_same_bytes_when_written_again(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another time, in another process and under another umask and user setting."""
    one, two = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    code = compile(WRITE, "write", "exec")
    monkeypatch.setattr(sys, "argv", ["write", str(one)])
    exec(code, {})
    old = os.umask(0o077)
    try:
        monkeypatch.setattr("time.time", lambda: 1.0)
        monkeypatch.setattr(sys, "argv", ["write", str(two)])
        exec(code, {})
    finally:
        os.umask(old)
    assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(two.read_bytes()).digest()


@pytest.mark.slow
def test_same_samples_give_the_same_bytes_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interpreters, with different seeds of their hashes: this one and a new one."""
    one, two = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    monkeypatch.setattr(sys, "argv", ["write", str(one)])
    exec(compile(WRITE, "write", "exec"), {})
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-c", WRITE, str(two)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=120)
    assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(two.read_bytes()).digest()


# ------------------------------------------------------------------------------------------------------ whole or not
def test_path_keeps_its_old_content_until_the_writer_is_closed(tmp_path: Path) -> None:
    """Readers see the old shard or the new one."""
    path = tmp_path / "x.tar"
    write(path, SAMPLES[:1])
    with TarWriter(path) as writer:
        writer.write(SAMPLES[1])
        assert stripped(read(path)) == SAMPLES[:1]
        assert (tmp_path / "x.tar.partial").exists()
    assert stripped(read(path)) == SAMPLES[1:2]


def test_path_is_not_replaced_when_that_is_refused(tmp_path: Path) -> None:
    """Whoever must not overwrite says so."""
    path = tmp_path / "x.tar"
    write(path, SAMPLES[:1], overwrite=False)
    before = path.read_bytes()
    with pytest.raises(ShardOpenError, match="already exists"):
        write(path, SAMPLES, overwrite=False)
    assert path.read_bytes() == before


def test_exception_leaves_a_partial_file_and_no_shard(tmp_path: Path) -> None:
    """What was written is in .partial, which no reader takes for a shard; the next try replaces it."""
    path, before = tmp_path / "x.tar", open_files()

    def fail(samples: list[dict[str, Any]]) -> None:
        with TarWriter(path, index=True) as writer:
            for sample in samples:
                writer.write(sample)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail(SAMPLES)
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == ["x.tar.partial"]
    assert open_files() <= before
    with pytest.raises(ShardFormatError, match="no end-of-archive"):
        read(tmp_path / "x.tar.partial")
    with pytest.raises(RuntimeError, match="stop"):
        fail(SAMPLES[:1])
    write(path)
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == ["x.tar"]


def test_exception_before_the_first_sample_leaves_nothing(tmp_path: Path) -> None:
    """Nothing is created before the first sample."""
    with pytest.raises(RuntimeError), TarWriter(tmp_path / "x.tar"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_no_sample_gives_an_empty_shard(tmp_path: Path) -> None:
    """A shard of which a filter left nothing is a valid, empty one."""
    write(tmp_path / "x.tar", [])
    assert read(tmp_path / "x.tar") == []
    assert (tmp_path / "x.tar").read_bytes() == bytes(10240)


def test_close_twice_does_nothing_and_writing_after_it_is_an_error(tmp_path: Path) -> None:
    """The archive is ended once."""
    writer = TarWriter(tmp_path / "x.tar")
    writer.write(SAMPLES[0])
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(SAMPLES[1])
    assert len(read(tmp_path / "x.tar")) == 1


# ---------------------------------------------------------------------------------------------------------- elsewhere
def test_open_file_is_written_and_left_open(tmp_path: Path) -> None:
    """The caller's file gets the archive from where it stands, and stays open."""
    out = io.BytesIO()
    write(out)
    write(tmp_path / "x.tar")
    assert out.getvalue() == (tmp_path / "x.tar").read_bytes()
    with (tmp_path / "y.tar").open("wb") as file:
        write(file, compress="gz")
        assert not file.closed
    assert stripped(read(tmp_path / "y.tar")) == SAMPLES


def test_open_file_has_no_end_marker_after_an_exception() -> None:
    """Readers see that it is no whole shard."""
    out = io.BytesIO()
    with pytest.raises(RuntimeError), TarWriter(out) as writer:
        writer.write(SAMPLES[0])
        raise RuntimeError
    assert len(out.getvalue()) == 1536
    assert any(out.getvalue()[-1024:])


@pytest.mark.parametrize("file", [io.StringIO(), 7, None, object()])
def test_file_that_takes_no_bytes_is_an_error(file: Any) -> None:
    """A text file or no file at all."""
    with pytest.raises((TypeError, ShardOpenError)):
        write(file)


class ShortFile(io.RawIOBase):
    """A raw file that takes 1,000 bytes at a time, then none."""

    def __init__(self, limit: int) -> None:
        self.data = b""
        self.limit = limit

    def write(self, data: Any, /) -> int | None:
        taken = bytes(data[: min(1000, self.limit - len(self.data))])
        self.data += taken
        return len(taken) or None


def test_file_that_takes_less_at_a_time_gets_everything() -> None:
    """Short writes lose nothing; a file that takes nothing is an error."""
    file = ShortFile(1 << 30)
    write(file)
    whole = io.BytesIO()
    write(whole)
    assert file.data == whole.getvalue()
    with pytest.raises(ShardOpenError, match="took None"):
        write(ShortFile(5000))


def test_commands_and_file_urls_and_stores_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be read can be written."""
    write(f"pipe:cat > {tmp_path}/x.tar")
    write(f"file://{tmp_path}/y%20z.tar")
    write("memory://folder/x.tar", index=True)
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "y z.tar").read_bytes()
    with open_shard("memory://folder/x.tar") as stream:
        assert stream.read() == (tmp_path / "x.tar").read_bytes()
    with open_shard("memory://folder/.wds-index/x.tar.index") as stream:
        assert stream.read().count(b"\n") == 31
    with pytest.raises(ShardOpenError, match="exit status 3"):
        write("pipe:cat > /dev/null; exit 3")
    with pytest.raises(ShardOpenError, match="http"):
        write("http://127.0.0.1:9/x.tar")
    with pytest.raises(ShardOpenError, match="does not exist"):
        write(tmp_path / "missing" / "x.tar")
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError):
        write(f"pipe:cat > {tmp_path}/z.tar")
    assert not children()


def test_command_gets_no_whole_shard_after_an_exception(tmp_path: Path) -> None:
    """It is killed before its input ends."""
    target = tmp_path / "x.tar"
    with pytest.raises(RuntimeError), TarWriter(f"pipe:cat > {target}.new && mv {target}.new {target}") as writer:
        writer.write(SAMPLES[0])
        raise RuntimeError
    assert not target.exists()
    assert not children()


@pytest.mark.slow
def test_standard_output_gets_the_archive(tmp_path: Path) -> None:
    """The shard and nothing else."""
    code = (
        "import sys; from torchdata_wds import TarWriter\nwith TarWriter('-') as w: w.write({'__key__': 'a', 'cls': 1})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        assert tar.getnames() == ["a.cls"]


def test_old_index_goes_with_the_old_shard(tmp_path: Path) -> None:
    """An index beside a shard is always its own."""
    for url in (str(tmp_path / "x.tar"), "memory://old/x.tar"):
        for place in index_urls(url):
            write(url, index=True)
            ShardIndex.beside(url).save(place)
            write(url, SAMPLES[:3])
            with pytest.raises(ShardOpenError, match=r"not found|not exist"):
                ShardIndex.beside(url)
        ShardIndex(IndexHeader("x.tar", "first_dot", 0, 10240), []).save(old_index_url(url))
        write(url, SAMPLES[:3], index=True)
        assert len(ShardIndex.beside(url)) == 3
        with pytest.raises(ShardOpenError, match=r"not found|not exist"):
            open_shard(old_index_url(url))


@pytest.mark.parametrize("file", ["-", "pipe:cat > /dev/null", io.BytesIO()])
def test_index_needs_a_place_beside_the_shard(file: Any) -> None:
    """Nothing lies beside a stream."""
    with pytest.raises(ValueError, match="no place"):
        TarWriter(file, index=True)


# ------------------------------------------------------------------------------------------------ refused, and skipped
def test_refused_sample_leaves_the_shard_as_it_was(tmp_path: Path) -> None:
    """The message names it; the samples before and behind it are written."""
    for sample, error, message in [
        ({"__key__": "", "cls": 1}, SampleError, "empty"),
        ({"__key__": "a.b", "cls": 1}, SampleError, "has a dot"),
        ({"__key__": "../a", "cls": 1}, SampleError, r"\.\."),
        ({"__key__": "/a", "cls": 1}, SampleError, "absolute"),
        ({"__key__": "d/0000", "cls": 1}, ReappearingKeyError, "key 'd/0000' comes twice"),
        ({"cls": 1}, MissingFieldError, "no __key__"),
        ({"__key__": "a"}, MissingFieldError, "'a' has no field"),
        ({"__key__": "a", "cls": None}, EncodingError, "'cls' of sample 'a'.*None"),
        ({"__key__": "a", "cls": "seven"}, EncodingError, "'cls' of sample 'a'.*integer"),
        ({"__key__": "a", "cls": 7.0}, EncodingError, "'cls' of sample 'a'"),
        ({"__key__": "a", "txt": 7}, EncodingError, "'txt' of sample 'a'"),
        ({"__key__": "a", "html": "<p>"}, EncodingError, "'html' of sample 'a'"),
        ({"__key__": "a", "JPG": b""}, SampleError, "'JPG' of sample 'a'.*lower case"),
        ({"__key__": "a", 3: b""}, SampleError, "field 3 of sample 'a'"),
        ({"__key__": "a", "x/y": b""}, SampleError, "slash"),
        ("sample", Exception, ""),
    ]:
        path = tmp_path / "x.tar"
        with TarWriter(path, index=True) as writer:
            writer.write(SAMPLES[0])
            with pytest.raises(error, match=f"(?s){message}"):
                writer.write(sample)
            writer.write(SAMPLES[1])
        assert stripped(read(path)) == SAMPLES[:2]


def test_encoder_false_takes_bytes_only(tmp_path: Path) -> None:
    """As webdataset has it, for samples that were not decoded."""
    samples = [{"__key__": "a", "jpg": b"\xff\xd8", "cls": bytearray(b"1")}]
    write(tmp_path / "x.tar", samples, encoder=False)
    with pytest.raises(EncodingError, match="'cls' of sample 'a'"):
        write(tmp_path / "y.tar", [{"__key__": "a", "cls": 1}], encoder=False)
    assert read(tmp_path / "x.tar")[0]["cls"] == 1


def test_encoder_may_be_functions_or_one_function(tmp_path: Path) -> None:
    """A dict serves its fields before the table does, a callable makes the whole sample."""
    sample = {"__key__": "a", "words": ["x", "y"], "cls": 1}
    write(tmp_path / "x.tar", [sample], encoder={"words": lambda words: " ".join(words).encode()})
    write(
        tmp_path / "y.tar",
        [sample],
        encoder=lambda sample: {"__key__": sample["__key__"], "words": b"x y", "cls": b"1"},
    )
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "y.tar").read_bytes()
    assert read(tmp_path / "x.tar")[0]["words"] == b"x y"


def test_options_of_images_are_passed_on(tmp_path: Path) -> None:
    """JPEG quality and PNG effort change the bytes."""
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    sizes = []
    for quality, effort in ((95, 0), (10, 9)):
        path = tmp_path / "x.tar"
        write(path, [{"__key__": "a", "jpg": image, "png": image // 64}], jpeg_quality=quality, png_compression=effort)
        with tarfile.open(path) as tar:
            sizes.append([entry.size for entry in tar])
    assert sizes[0][0] > sizes[1][0]
    assert sizes[0][1] > sizes[1][1]
    with pytest.raises(ValueError, match="jpeg_quality"):
        TarWriter(tmp_path / "x.tar", jpeg_quality=101)
    with pytest.raises(TypeError):
        TarWriter(tmp_path / "x.tar", unknown=1)  # type: ignore[call-arg]


# -------------------------------------------------------------------------------------------------- interrupted, copied
def interrupt_at(line: int, function: Callable[[], Any]) -> bool:
    """Calls a function and raises KeyboardInterrupt before the n-th line that runs in format/shards.py."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("format/shards.py"):
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_interrupt_anywhere_leaves_a_whole_shard_or_none(suffix: str, tmp_path: Path) -> None:
    """Who catches Ctrl-C and closes gets all samples that write took, or an error."""
    path = tmp_path / f"x.{suffix}"
    sample = {"__key__": "b", "bin": os.urandom(300_000)}
    for line in range(1, 1000):
        path.unlink(missing_ok=True)
        writer = TarWriter(path, index=True)
        writer.write({"__key__": "a", "bin": b"1"})
        interrupted = interrupt_at(line, partial(writer.write, sample))
        try:
            writer.close()
        except ShardOpenError as error:
            assert "not whole" in str(error)
            assert not path.exists()
            continue
        found = [found["__key__"] for found in read(path)]
        assert found in (["a"], ["a", "b"]) if interrupted else found == ["a", "b"]
        assert [row.key for row in ShardIndex.beside(path)] == found
        if not interrupted:
            break
    assert line > 10


def test_interrupt_while_closing_leaves_a_whole_shard_or_none(tmp_path: Path) -> None:
    """Nothing half written gets the name."""
    path = tmp_path / "x.tar.gz"
    for line in range(1, 1000):
        path.unlink(missing_ok=True)
        writer = TarWriter(path)
        writer.write(SAMPLES[0])
        if not interrupt_at(line, writer.close):
            break
        with contextlib.suppress(ShardOpenError):
            writer.close()
        assert not path.exists() or stripped(read(path)) == SAMPLES[:1]
    assert stripped(read(path)) == SAMPLES[:1]


def test_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard and index come to where they were opened, and nothing elsewhere is touched."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "x.tar.index").write_text("precious")
    monkeypatch.chdir(tmp_path / "one")
    writers = [TarWriter("x.tar"), TarWriter("y.tar", index=True)]
    for writer in writers:
        writer.write(SAMPLES[0])
    monkeypatch.chdir(tmp_path / "two")
    for writer in writers:
        writer.close()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [".wds-index", "x.tar", "y.tar"]
    assert len(ShardIndex.beside(tmp_path / "one" / "y.tar")) == 1
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["x.tar.index"]


@pytest.mark.parametrize("buffering", [0, -1])
def test_forked_child_leaves_the_parents_open_file_alone(buffering: int, tmp_path: Path) -> None:
    """A child that ends in its own way writes nothing of the parent's."""
    path = tmp_path / "x.tar"
    with path.open("wb", buffering) as file, TarWriter(file) as writer:
        for sample in SAMPLES[:3]:
            writer.write(sample)
        child = os.fork()
        if child == 0:
            del writer
            gc.collect()
            with contextlib.suppress(OSError):
                file.flush()
            os._exit(0)
        os.waitpid(child, 0)
        writer.write(SAMPLES[3])
    assert stripped(read(path)) == SAMPLES[:4]


def test_writers_are_neither_copied_nor_pickled(tmp_path: Path) -> None:
    """A copy would close what is the original's."""
    with TarWriter(tmp_path / "x.tar", encoder=False) as writer:
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="TarWriter cannot be pickled or copied"):
                copies(writer)
        writer.write({"__key__": "a", "cls": b"1"})


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    """Nothing is lost or doubled."""
    with TarWriter(tmp_path / "x.tar", encoder=False) as writer, ThreadPoolExecutor(4) as pool:
        samples = [{"__key__": f"{number}", "bin": bytes(40_000)} for number in range(300)]
        list(pool.map(writer.write, samples))
    assert {sample["__key__"] for sample in read(tmp_path / "x.tar")} == {sample["__key__"] for sample in samples}


def test_writer_that_is_never_closed_says_so(tmp_path: Path) -> None:
    """What was written is in .partial, and a warning tells that there is no shard."""
    writer = TarWriter(tmp_path / "x.tar")
    for sample in SAMPLES:
        writer.write(sample)
    with pytest.warns(ResourceWarning, match=r"x\.tar was never closed"):
        del writer
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar.partial"]
    assert (tmp_path / "x.tar.partial").stat().st_size > 30 * 1024


@pytest.mark.parametrize("sample", [[1, 2], None, "text", 7])
@pytest.mark.parametrize("encoder", [True, False])
def test_what_is_no_sample_is_refused(sample: Any, encoder: bool, tmp_path: Path) -> None:
    """By its type."""
    with (
        TarWriter(tmp_path / "x.tar", encoder=encoder) as writer,
        pytest.raises(SampleError, match="a sample is a dict"),
    ):
        writer.write(sample)


def test_names_that_leave_no_room_are_refused_at_once(tmp_path: Path) -> None:
    """Not after all the work."""
    for length, index in ((248, False), (242, True)):
        with pytest.raises(ShardOpenError, match="shorter"):
            TarWriter(tmp_path / ("n" * (length - 4) + ".tar"), index=index)


@pytest.mark.parametrize("mode", ["w", "rb"])
def test_file_of_the_wrong_mode_is_an_error_that_says_so(mode: str, tmp_path: Path) -> None:
    """Text files and files for reading."""
    (tmp_path / "x.tar").touch()
    with (tmp_path / "x.tar").open(mode) as file, pytest.raises(ShardOpenError, match="mode='wb'"):
        write(file)


def test_writers_say_what_was_meant_when_an_option_is_webdatasets_or_misspelled(tmp_path: Path) -> None:
    """ShardWriter and the form alike; TarWriter has no limits, and says that ShardWriter has."""
    for option, told in [
        ("maxsize", "did you mean 'max_bytes'"),
        ("maxcount", "did you mean 'max_count'"),
        ("max_size", "did you mean 'max_bytes'"),
        ("keep_meta", "not written"),
        ("format", "USTAR"),
        ("verbose", "INFO"),
        ("compression", "compress="),
        ("start", "did you mean 'start_shard'"),
        ("encode", "did you mean 'encoder'"),
    ]:
        calls: list[Callable[..., Any]] = [
            partial(ShardWriter, str(tmp_path / "x-%d.tar")),
            partial(IterableWrapper([]).save_wds_shards, str(tmp_path / "x-%d.tar")),
        ]
        if "start" not in option:
            calls.append(partial(TarWriter, tmp_path / "x.tar"))
        for call in calls:
            limits = call.func is TarWriter and "max" in option  # type: ignore[attr-defined]
            with pytest.raises(TypeError, match="ShardWriter has limits" if limits else told) as caught:
                call(**{option: 1})
            assert f"unknown option {option!r}: " in str(caught.value)
        assert not list(tmp_path.iterdir())


def test_closed_writer_refuses_a_sample_before_it_encodes_it() -> None:
    """The error is about the writer, whatever the sample is."""
    writer = TarWriter(io.BytesIO())
    writer.close()
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write({"__key__": "a", "png": object()})


def test_writer_of_an_open_file_may_be_used_in_a_forked_child(tmp_path: Path) -> None:
    """The file is the caller's, who may have opened it for the child."""
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        writer = TarWriter(file)

        def write() -> None:
            writer.write({"__key__": "a", "txt": "x"})
            writer.close()

        assert in_child(write) == 0
        writer.abort()  # this process has not written anything
    assert path.stat().st_size == 10240
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["a.txt"]


def test_signatures_of_writers_name_every_option() -> None:
    """For help(), editors and type checkers."""
    assert {"encoder", "compress", "mtime", "user", "group", "mode", "lowercase", "index", "overwrite"} <= set(
        inspect.signature(TarWriter).parameters
    )
