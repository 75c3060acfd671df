"""Samples as folders of files: what is there is the sample, and nothing else is touched."""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.cli.proc.sample_folders import read_folder, write_folder
from torchdata_wds.errors import EncodingError, SampleError

SAMPLE: dict[str, Any] = {"__key__": "d/a", "__url__": "x.tar", "jpg": b"image", "seg.png": b"\0\xff", "cls": b"3"}


def written(folder: Path, sample: dict[str, Any] = SAMPLE) -> dict[str, Any]:
    """A sample that was just written to a folder."""
    write_folder(sample, folder)
    return sample


def test_write_folder_makes_a_file_for_each_field_and_the_key(tmp_path: Path) -> None:
    """Bytes as they are; what only describes the sample is left out."""
    written(tmp_path, {**SAMPLE, "__local_path__": "/secret"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "sample.__key__": b"d/a",
        "sample.jpg": b"image",
        "sample.seg.png": b"\0\xff",
        "sample.cls": b"3",
    }


@pytest.mark.parametrize("key", ["a", "d.v1/b", "with\nline feed\n", "é ' \" $(x)"])
def test_folder_gives_the_sample_back_when_nobody_touches_it(key: str, tmp_path: Path) -> None:
    """Also with odd keys and fields: each is what it was."""
    sample = {**SAMPLE, "__key__": key, ".jpg": b"1", "JPG": b"2", "a b;$(x)": b"", "ü": b"4", "-rf": b"5"}
    write_folder(sample, tmp_path)
    assert read_folder(tmp_path, sample) == ([sample], [])


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("x" * 300, b"", SampleError, r"'d/a' of shard x.tar cannot have its field 'xxx+' in a file: .*307 bytes"),
        ("a/b", b"", SampleError, "slash"),
        ("../b", b"", SampleError, "slash"),
        ("\udc80", b"", SampleError, "lone surrogate"),
        ("txt", "text", EncodingError, "not encoded"),
    ],
)
def test_write_folder_refuses_what_can_be_no_file(
    field: str, value: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """The error names sample and field, and nothing is written elsewhere."""
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(error, match=message) as caught:
        write_folder({**SAMPLE, field: value}, folder)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_write_folder_says_which_file_when_the_system_fails(tmp_path: Path) -> None:
    """A full or missing disk is no fault of the sample."""
    with pytest.raises(FileNotFoundError, match=r"cannot write a sample's file of 3 bytes: .*sample.__key__"):
        write_folder(SAMPLE, tmp_path / "no")


def test_read_folder_takes_what_is_there(tmp_path: Path) -> None:
    """Deleted fields vanish, new ones appear, changed ones change; other files are listed."""
    sample = written(tmp_path)
    (tmp_path / "sample.cls").unlink()
    (tmp_path / "sample.jpg").write_bytes(b"other")
    (tmp_path / "sample.new.txt").write_bytes(b"new")
    others = [".sample.txt", "Sample.txt", "other.txt", "sample", "sample-.txt", "sample-1", "sample.", "samples.txt"]
    for name in others:
        (tmp_path / name).write_bytes(b"no field")
    assert read_folder(tmp_path, sample) == (
        [{"__key__": "d/a", "__url__": "x.tar", "jpg": b"other", "new.txt": b"new", "seg.png": b"\0\xff"}],
        others,
    )


@pytest.mark.parametrize(
    ("told", "key"), [(b"new", "new"), (b"new\n", "new"), (b"a b/\xc3\xa9\r\n", "a b/é"), (b"\n", ""), (None, "d/a")]
)
def test_read_folder_takes_the_key_from_its_file(told: bytes | None, key: str, tmp_path: Path) -> None:
    """As echo writes it; without the file it is the old one. Whether it can be written the writer says."""
    sample = written(tmp_path)
    if told is None:
        (tmp_path / "sample.__key__").unlink()
    else:
        (tmp_path / "sample.__key__").write_bytes(told)
    assert [found["__key__"] for found in read_folder(tmp_path, sample)[0]] == [key]


@pytest.mark.parametrize("keeps_key", [True, False])
def test_read_folder_gives_nothing_when_no_field_is_left(keeps_key: bool, tmp_path: Path) -> None:
    """A key alone is no sample."""
    sample = written(tmp_path)
    for path in tmp_path.iterdir():
        if not (keeps_key and path.name == "sample.__key__"):
            path.unlink()
    (tmp_path / "empty").mkdir()
    assert read_folder(tmp_path, sample) == ([], [])


def test_read_folder_makes_a_sample_of_each_subfolder(tmp_path: Path) -> None:
    """By name, behind what is left in the folder itself; their keys follow from the folder's unless they say theirs."""
    sample = written(tmp_path)
    for name, fields in {
        "2": {"txt": b"2"},
        "1": {"txt": b"1", "cls": b"1"},
        "other": {"txt": b"3", "__key__": b"own/key\n"},
        "none": {},
    }.items():
        (tmp_path / name).mkdir()
        for field, data in fields.items():
            (tmp_path / name / f"sample.{field}").write_bytes(data)
    (tmp_path / "1" / "empty").mkdir()
    assert read_folder(tmp_path, sample) == (
        [
            sample,
            {"__key__": "d/a/1", "__url__": "x.tar", "cls": b"1", "txt": b"1"},
            {"__key__": "d/a/2", "__url__": "x.tar", "txt": b"2"},
            {"__key__": "own/key", "__url__": "x.tar", "txt": b"3"},
        ],
        [],
    )


def test_read_folder_makes_a_sample_of_each_number(tmp_path: Path) -> None:
    """As tarp and tarproc name them: in the order of the numbers, with gaps, names instead, and in subfolders."""
    (tmp_path / "sub").mkdir()
    for name in ("10.txt", "2.seg.png", "2.txt", "b.txt", "a.__key__", "a.txt", "000001.txt"):
        (tmp_path / f"sample-{name}").write_text(name)
    (tmp_path / "sub" / "sample-7.txt").touch()
    (tmp_path / "sub" / "sample.txt").touch()
    samples, others = read_folder(tmp_path, {"__key__": "d/k"})
    assert [(made["__key__"], sorted(made)[1:]) for made in samples] == [
        ("d/k/000001", ["txt"]),
        ("d/k/2", ["seg.png", "txt"]),
        ("d/k/10", ["txt"]),
        ("a.__key__", ["txt"]),
        ("d/k/b", ["txt"]),
        ("d/k/sub", ["txt"]),
        ("d/k/sub/7", ["txt"]),
    ]
    assert others == []


def bind(path: Path) -> None:
    """Makes a socket, by a name that is short enough."""
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


@pytest.mark.parametrize("place", ["", "sub/", "sub/deeper/", "sub/deeper/sample.d/"])
def test_read_folder_lists_what_belongs_to_no_sample(place: str, tmp_path: Path) -> None:
    """At every depth, whatever it is: links are not followed."""
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in {"a": Path.touch, "fifo": os.mkfifo, "socket": bind, "link": link, "z": dangle}.items():
        make(folder / name)  # type: ignore[operator]
    (folder / "folder").symlink_to("/etc")
    assert sorted(read_folder(tmp_path, {"__key__": "k"})[1]) == [
        f"{place}{name}" for name in ("a", "fifo", "folder", "link", "socket", "z")
    ]


def test_read_folder_lists_keys_without_fields_and_samples_that_lie_too_deep(tmp_path: Path) -> None:
    """They would be lost otherwise; the folder's own key is ours."""
    sample = written(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("sample-1.__key__", "a/sample.__key__", "a/b/sample.txt"):
        (tmp_path / name).touch()
    samples, others = read_folder(tmp_path, sample)
    assert samples == [sample]
    assert others == ["sample-1.__key__", "a/sample.__key__", "a/b/sample.txt"]


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangle(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("sample.x", link, "symbolic link"),
        ("sample.x", dangle, "symbolic link"),
        ("sample.x", Path.mkdir, "folder"),
        ("sample.x", os.mkfifo, "a device, a pipe or a socket"),
        ("sub/sample.x", link, "symbolic link"),
        ("sample.__url__", Path.touch, "metadata"),
        ("sub/sample.__x__", Path.touch, "metadata"),
        ("sample-1.x", link, "symbolic link"),
        ("sub/sample-1.x", Path.mkdir, "folder"),
        ("sample-1.__x__", Path.touch, "metadata"),
    ],
)
def test_read_folder_refuses_what_is_no_field(
    name: str, make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    """Nothing outside the folder is read, and nothing hangs: the error names sample, shard and file."""
    sample = written(tmp_path)
    (tmp_path / "sub").mkdir()
    make(tmp_path / name)
    with pytest.raises(
        SampleError, match=rf"sample 'd/a' of shard x.tar has a file .*{name[-8:]}.*{message}"
    ) as caught:
        read_folder(tmp_path, sample)
    assert (caught.value.key, caught.value.shard) == ("d/a", "x.tar")


def test_read_folder_reads_a_file_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no further, if a process that has got away writes on meanwhile."""
    sample = written(tmp_path)
    fstat = os.fstat

    def grow(file: int) -> os.stat_result:
        status = fstat(file)
        if status.st_size == len(b"image"):
            with (tmp_path / "sample.jpg").open("ab") as other:
                other.write(b" and more")
        return status

    monkeypatch.setattr("torchdata_wds.cli.proc.sample_folders.os.fstat", grow)
    assert read_folder(tmp_path, sample)[0][0]["jpg"] == b"image"
    assert (tmp_path / "sample.jpg").read_bytes() == b"image and more"


@pytest.mark.parametrize(
    ("make", "error"), [(link, "cannot be read: Too many levels of symbolic links"), (os.mkfifo, "no longer regular")]
)
def test_read_folder_is_not_fooled_when_a_file_is_swapped(
    make: Callable[[Path], object], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was checked, a link or a pipe is there: it is not followed, and nothing hangs."""
    sample = written(tmp_path)
    path, opened = tmp_path / "sample.jpg", os.open

    def swap(name: str, *flags: int) -> int:
        if name == str(path):
            path.unlink()
            make(path)
        return opened(name, *flags)

    monkeypatch.setattr("torchdata_wds.cli.proc.sample_folders.os.open", swap)
    with pytest.raises(SampleError, match=error):
        read_folder(tmp_path, sample)


def test_read_folder_says_which_file_is_too_large(tmp_path: Path) -> None:
    """A hole needs no disk, but memory."""
    sample = written(tmp_path)
    os.truncate(tmp_path / "sample.jpg", 1 << 43)
    with pytest.raises(SampleError, match=r"'sample.jpg' of 8,796,093,022,208 bytes, for which there is not enough"):
        read_folder(tmp_path, sample)


def test_read_folder_refuses_a_key_that_is_no_text(tmp_path: Path) -> None:
    """It says what it found."""
    sample = written(tmp_path)
    (tmp_path / "sample.__key__").write_bytes(b"\xff\xfe")
    with pytest.raises(SampleError, match=r"not UTF-8 text: b'\\xff\\xfe'"):
        read_folder(tmp_path, sample)


def test_read_folder_refuses_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A command that has deleted its folder has not meant to leave the sample out."""
    with pytest.raises(SampleError, match="no longer has its folder"):
        read_folder(tmp_path / "no", SAMPLE)


def test_sample_errors_mask_secrets(tmp_path: Path) -> None:
    """A signed URL is shown without its signature."""
    sample = {**SAMPLE, "__url__": "https://host/x.tar?X-Amz-Signature=abc"}
    with pytest.raises(SampleError, match=r"Signature=\*\*\*"):
        read_folder(tmp_path / "no", sample)
