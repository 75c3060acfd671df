"""Folders of files: which files make samples, in which order, and what is passed over."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.cli.create.assembling import Problems, SampleAssembler
from torchdata_wds.cli.create.part_lists import SampleFolder
from torchdata_wds.errors import SpecError


def write_files(folder: Path, *names: str) -> None:
    """Files whose content is their name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """The samples of a folder, without their URL."""
    samples = list(SampleAssembler(SampleFolder(str(folder))))
    assert {sample.pop("__url__") for sample in samples} == {str(folder)}
    return samples


def problems_of(folder: Path) -> list[str]:
    """The lines of the error that a folder gives, without the first."""
    with pytest.raises(SpecError) as caught:
        samples_of(folder)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def skipped(folder: Path) -> dict[str, int]:
    """What is passed over, by reason."""
    files = SampleFolder(str(folder))
    list(files.parts(Problems(files.name)))
    return dict(files.skipped)


def test_folder_groups_where_a_sort_by_name_would_not(tmp_path: Path) -> None:
    """``a-b.jpg`` sorts between ``a-b`` and ``a.``; keys with folders, dots in folders, capitals in fields."""
    write_files(tmp_path, "a.txt", "a-b.jpg", "a.JPG", "a b.txt", "d.v1/a.txt", "d/a.seg.png", "d/a.txt", "B.txt")
    assert samples_of(tmp_path) == [
        {"__key__": "B", "txt": b"B.txt"},
        {"__key__": "a", "jpg": b"a.JPG", "txt": b"a.txt"},
        {"__key__": "a b", "txt": b"a b.txt"},
        {"__key__": "a-b", "jpg": b"a-b.jpg"},
        {"__key__": "d.v1/a", "txt": b"d.v1/a.txt"},
        {"__key__": "d/a", "seg.png": b"d/a.seg.png", "txt": b"d/a.txt"},
    ]


def test_folder_is_read_alike_when_its_name_ends_in_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the working directory."""
    write_files(tmp_path, "d/a.txt")
    monkeypatch.chdir(tmp_path)
    for name in (f"{tmp_path}/", ".", "./"):
        assert [sample["__key__"] for sample in SampleAssembler(SampleFolder(name))] == ["d/a"]


def test_folder_counts_what_makes_no_sample(tmp_path: Path) -> None:
    """By reason; hidden folders as a whole."""
    write_files(
        tmp_path, "a.txt", "README", "d/LICENSE", ".hidden.txt", "x.", ".git/a.txt", "__meta__/a.json", "._a.txt"
    )
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    assert skipped(tmp_path) == {
        "no extension": 2,
        "hidden file": 1,
        "empty extension": 1,
        "hidden folder": 1,
        "metadata": 1,
        "macOS metadata": 1,
        "no regular file": 1,
    }
    assert [sample["__key__"] for sample in samples_of(tmp_path)] == ["a"]


def test_folder_passes_over_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one would fail."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("a.sock")
        assert skipped(Path()) == {"no regular file": 1}


def test_folder_follows_links_to_files_only(tmp_path: Path) -> None:
    """A link to a folder may lead in a circle."""
    write_files(tmp_path, "outside/b.txt", "data/a.txt")
    data = tmp_path / "data"
    (data / "link.txt").symlink_to(tmp_path / "outside/b.txt")
    (data / "circle").symlink_to(data)
    (data / "folder.txt").symlink_to(tmp_path / "outside")
    assert samples_of(data) == [{"__key__": "a", "txt": b"data/a.txt"}, {"__key__": "link", "txt": b"outside/b.txt"}]
    assert skipped(data) == {"link to a folder": 2}


def test_folder_names_links_that_lead_nowhere(tmp_path: Path) -> None:
    """They are files that are missing; one that leads to itself cannot be read."""
    write_files(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to("nothing")
    (tmp_path / "c.txt").symlink_to("c.txt")
    missing, circle = problems_of(tmp_path)
    assert "there is no file" in missing
    assert "b.txt" in missing
    assert "Too many levels of symbolic links" in circle
    (tmp_path / "c.txt").unlink()
    samples = SampleAssembler(SampleFolder(str(tmp_path)), "skip-file")
    assert [sample["__key__"] for sample in samples] == ["a"]
    assert (samples.missing_files, samples.left_out) == (1, 1)


def test_folder_refuses_fields_that_differ_in_case_only(tmp_path: Path) -> None:
    """They would be read as one; both files are named."""
    write_files(tmp_path, "a.JPG", "a.jpg")
    (problem,) = problems_of(tmp_path)
    assert problem == (
        f"file '{tmp_path}/a.jpg': field 'jpg' of sample 'a' is given before, by file '{tmp_path}/a.JPG'"
    )


def test_folder_refuses_names_that_could_not_be_read_back(tmp_path: Path) -> None:
    """Those that are no UTF-8, and reserved fields."""
    write_files(tmp_path, "a.__key__", "\udcff.txt")
    reserved, garbled = problems_of(tmp_path)
    assert "field '__key__' has a name of the form __x__" in reserved
    assert "not a character of its own" in garbled


def test_folder_names_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read."""
    write_files(tmp_path, "a.txt", "b.txt")
    monkeypatch.setattr(os, "access", lambda path, _: not path.endswith("a.txt"))
    (problem,) = problems_of(tmp_path)
    assert problem.endswith("a.txt' cannot be read: Permission denied")


def test_folder_says_so_when_a_folder_vanishes(tmp_path: Path) -> None:
    """What could not be listed is no silence."""
    (problem,) = problems_of(tmp_path / "gone")
    assert problem == f"folder '{tmp_path}/gone/': it cannot be read: No such file or directory"


@pytest.mark.parametrize("names", [(), ("README",)])
def test_folder_without_samples_is_an_error(names: tuple[str, ...], tmp_path: Path) -> None:
    """Most likely it is the wrong folder."""
    write_files(tmp_path, *names)
    with pytest.raises(SpecError, match="has no samples: there is nothing to write"):
        samples_of(tmp_path)


def test_folder_goes_as_deep_as_folders_do(tmp_path: Path) -> None:
    """There is no recursion that could end."""
    name = "d/" * 300 + "a.txt"
    write_files(tmp_path, name)
    assert samples_of(tmp_path) == [{"__key__": name.removesuffix(".txt"), "txt": name.encode()}]
