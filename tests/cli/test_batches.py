"""Samples written many at once: the same archives, messages and statuses as one by one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.kits.odd_archives import odd_archive
from tests.kits.shards import text_keys, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds
from torchdata_wds.cli import outputs
from torchdata_wds.cli.create.assembling import SampleAssembler
from torchdata_wds.cli.create.part_lists import SampleFolder
from torchdata_wds.errors import SampleError
from torchdata_wds.format.tar.packing import SamplePacker


@contextmanager
def one_by_one() -> Iterator[None]:
    """Checks, packs and writes each file and sample alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleAssembler, "_check_files", lambda *_: False)
        patch.setattr(SamplePacker, "pack_all", lambda *_: None)
        yield


def make_tree(random: Random, folder: Path) -> None:
    """A folder of samples in folders, one of three with what makes no sample, or cannot be written."""
    is_odd = random.random() < 0.33
    for number in range(random.randint(1, 12)):
        for field in random.choice([["txt", "cls"], ["txt"], ["seg.png", "json"]]):
            stem = random.choice(["", "d/", "d.v1/e/", "x" * 60 + "/" + "y" * 50])
            path = folder / f"{stem}{number:03d}.{field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(random.randbytes(random.choice([0, 1, 511, 512, 513, 30_000])))
            if is_odd and random.random() < 0.2:
                make_odd(random, path)


def make_odd(random: Random, path: Path) -> None:
    """Puts something beside a file, or in its place."""
    which = random.randrange(9)
    if which == 0:
        path.with_name("README").write_text("words")
    elif which == 1:
        (path.parent / ".hidden").mkdir(exist_ok=True)
    elif which == 2:
        path.with_suffix(".TXT").write_text("case")
    elif which == 3:
        path.with_suffix(".lnk").symlink_to(path.name)
    elif which == 4:
        path.with_suffix(".gone").symlink_to("nowhere")
    elif which == 5:
        Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff.txt")).write_text("no UTF-8")
    elif which == 6:
        path.with_suffix(".__x__").write_text("metadata")
    elif which == 7:
        path.with_suffix(".dir").symlink_to("..")
    else:
        path.unlink()
        os.mkfifo(path)


@pytest.mark.slow
def test_create_writes_a_folder_at_once_as_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, messages and status, for seeded trees of which some cannot be written."""
    statuses = set()
    for seed in range(120):
        random = Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        make_tree(random, folder / "in")
        options = random.choice([[], ["--missing", "skip-file"], ["--missing", "skip-sample"], ["--missing", "empty"]])
        options = [*options, *random.choice([[], [], ["--rekey", "#"], ["--index"]])]
        done = run_wds("create", "in", "-o", "at-once.tar", *options)
        with one_by_one():
            assert run_wds("create", "in", "-o", "alone.tar", *options) == done, seed
        assert Path("at-once.tar").exists() == Path("alone.tar").exists() == (done.status == 0), seed
        if done.status == 0:
            assert Path("at-once.tar").read_bytes() == Path("alone.tar").read_bytes(), seed
        statuses.add(done.status)
    assert statuses == {0, 1}


def grow(path: Path) -> None:
    path.write_bytes(b"abcd")


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [(grow, r"changed after .* \(3 bytes then, 4 now\)"), (touch, "changed after"), (Path.unlink, "No such file")],
)
def test_file_of_a_folder_that_changes_after_the_check_is_an_error(change, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """With the file and its place, as in a recipe."""
    for name in ("a.txt", "b.bin"):
        (tmp_path / name).write_bytes(b"abc")
    assembler = SampleAssembler(SampleFolder(str(tmp_path)))
    assembler.check()
    change(tmp_path / "b.bin")
    samples = iter(assembler)
    assert next(samples)["txt"] == b"abc"
    with pytest.raises(SampleError, match=rf"file '.*b\.bin': field 'bin' of sample 'b': .*{message}"):
        next(samples)


@pytest.mark.slow
def test_cat_writes_samples_at_once_as_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, messages and status, for shards of every kind, whole and damaged."""
    monkeypatch.chdir(tmp_path)
    statuses = set()
    for seed in range(60):
        random = Random(seed)
        names = ["a.tar", "b.tar", "c.tar"][: random.randint(1, 3)]
        for name in names:
            Path(name).write_bytes(odd_archive(random))
        options = ["--errors", random.choice(["stop", "skip"])]
        options += random.choice([[], ["--on-reappearing", "allow"], ["-c", "5"], ["--keep-case"]])
        found = []
        for batch in (0, 2000, 1 << 18):
            monkeypatch.setattr(outputs, "_BATCH", batch)
            done = run_wds("cat", *names, *options, "-o", "out.tar", "--force")
            left = [path.read_bytes() for path in map(Path, ("out.tar", "out.tar.partial")) if path.exists()]
            found.append((done.status, sorted(done.err.split("\n")), left))
            for path in tmp_path.glob("out.tar*"):
                path.unlink()
        assert found[0] == found[1] == found[2], seed
        statuses.add(done.status)
    assert statuses == {0, 1}


def test_cat_keeps_what_it_has_read_before_an_error(tmp_path: Path) -> None:
    """A shard that cannot be read leaves the samples before it in the unfinished file."""
    first, second = write_text_shards(tmp_path, (7, 3))
    Path(second).write_bytes(b"no archive" * 100)
    out = tmp_path / "out.tar"
    done: Result = run_wds("cat", first, second, "-o", out)
    assert done.status == 1
    assert [sample["__key__"] for sample in read_samples(f"{out}.partial")] == text_keys((7,))
