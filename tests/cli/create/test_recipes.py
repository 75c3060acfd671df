"""Recipes: lines to parts, and what is no line."""

from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.cli.create import open_part_list
from torchdata_wds.cli.create.assembling import SampleAssembler
from torchdata_wds.cli.create.part_lists import Recipe
from torchdata_wds.errors import SpecError, UnsafeDataError


def samples_of(text: str | bytes, folder: Path | str = "", **options: Any) -> list[dict[str, Any]]:
    """The samples of a recipe, without their URL."""
    data = text if isinstance(text, bytes) else text.encode()
    samples = list(SampleAssembler(Recipe(data, "x.txt", str(folder), **{"allow_pipe": True, **options})))
    assert {sample.pop("__url__") for sample in samples} == {"x.txt"}
    return samples


def problems_of(text: str | bytes, folder: Path | str = "", **options: Any) -> list[str]:
    """The lines of the error that a recipe gives, without the first."""
    with pytest.raises(SpecError) as caught:
        samples_of(text, folder, **options)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_recipe_takes_every_kind_of_source(tmp_path: Path) -> None:
    """A path, file:, text:, base64:, pipe: and a URL, each byte for byte."""
    (tmp_path / "a b.bin").write_bytes(b"\x00\xff\n")
    recipe = (
        "a.path a b.bin\n"
        "a.file file:a%20b.bin\n"
        f"a.absolute {tmp_path}/a b.bin\n"
        "a.text text:  two words \n"
        "a.none text:\n"
        "a.base64 base64:AP8K\n"
        "a.pipe pipe:printf '1 2' | tr 1 3\n"
        f"a.url file://{tmp_path}/a%20b.bin\n"
    )
    content = b"\x00\xff\n"
    assert samples_of(recipe, tmp_path) == [
        {
            "__key__": "a",
            "path": content,
            "file": content,
            "absolute": content,
            "text": b"  two words ",
            "none": b"",
            "base64": content,
            "pipe": b"3 2",
            "url": content,
        }
    ]


def test_recipe_keeps_its_order_of_samples() -> None:
    """Nobody has asked to sort them."""
    assert [sample["__key__"] for sample in samples_of("z.a text:1\nb.a text:2\nm.a text:3")] == ["z", "b", "m"]


def test_recipe_is_sorted_by_key_when_asked() -> None:
    """The lines of a sample come together from wherever they are."""
    assert samples_of("b.x text:1\na-b.x text:2\na.x text:3\nb.y text:4\n", sort=True) == [
        {"__key__": "a", "x": b"3"},
        {"__key__": "a-b", "x": b"2"},
        {"__key__": "b", "x": b"1", "y": b"4"},
    ]


def test_recipe_refuses_lines_of_a_sample_that_are_apart() -> None:
    """Both lines are named, and the cure."""
    (problem,) = problems_of("a.x text:1\nb.x text:2\na.y text:3\n")
    assert problem == (
        "line 3: sample 'a' began at line 1, and others stand between. "
        "Put the lines of a sample together, or sort them (--sort)"
    )


@pytest.mark.parametrize("sort", [False, True])
def test_recipe_refuses_a_field_that_comes_twice(sort: bool) -> None:
    """Also where it differs in case only: it would be read as the same."""
    assert problems_of("a.jpg text:1\na.JPG text:2\n", sort=sort) == [
        "line 2: field 'jpg' of sample 'a' is given before, by line 1"
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a.txt", "expected a name and a source"),
        ("a.txt \t", "expected a name and a source"),
        ("README text:x", "belongs to no sample: no extension"),
        ("d/.hidden.txt text:x", "belongs to no sample: hidden file"),
        ("__meta__/a.txt text:x", "belongs to no sample: metadata"),
        ("/a.txt text:x", "key '/a' cannot be written"),
        ("../a.txt text:x", "key '../a' cannot be written"),
        ("a.__key__ text:x", "field '__key__' has a name of the form __x__"),
        ("a.txt -", "standard input ('-') cannot be the source"),
        ("a.txt file:", "it names no file"),
        ("a.txt file://elsewhere/x", "not of host 'elsewhere'"),
        ("a.txt pipe: ", "pipe: names no command"),
        ("a.txt base64:!!", "what follows base64: is not Base64"),
        ("a.txt nothing.txt", "there is no file"),
        ("a.txt .", "is a folder"),
        ("a.txt /dev/null", "is not a regular file"),
        (b"\xff.txt text:x", "'\\udcff', which is not a character of its own"),
    ],
)
def test_recipe_says_what_is_wrong_with_a_line(line: str | bytes, problem: str, tmp_path: Path) -> None:
    """The second line, between good ones."""
    data = line if isinstance(line, bytes) else line.encode()
    (found,) = problems_of(b"x.txt text:1\n" + data + b"\ny.txt text:2\n", tmp_path)
    assert found.startswith("line 2: ")
    assert problem in found


def test_recipe_reports_the_first_twenty_problems_and_counts_all() -> None:
    """A recipe is not mended line by line."""
    with pytest.raises(SpecError, match=r"^recipe x\.txt has 1,001 problems, and nothing was written:\n") as caught:
        samples_of("a.txt\n" * 1001)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[20].startswith("  line 20: ")
    assert lines[21] == "  and 981 more"


def test_recipe_takes_lines_of_other_systems_and_blank_ones() -> None:
    r"""A BOM, \r\n, blank lines, blanks before a name, a tab between, no line end at the end."""
    assert samples_of("\ufeffa.txt\t \ttext:1\r\n\r\n  \n  b.txt text:\u2028\x0b2") == [
        {"__key__": "a", "txt": b"1"},
        {"__key__": "b", "txt": "\u2028\x0b2".encode()},
    ]


def test_recipe_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    """In the name of a file, and in a text."""
    (tmp_path / "\udcff.bin").write_bytes(b"found")
    assert samples_of(b"a.path \xff.bin\na.text text:\xfe\n", tmp_path) == [
        {"__key__": "a", "path": b"found", "text": b"\xfe"}
    ]


def test_recipe_is_refused_when_it_is_no_text() -> None:
    """A shard that was given for it, say."""
    with pytest.raises(SpecError, match=r"not text with lines .* it has a NUL at byte 3"):
        Recipe(b"a.x\0\0\0", "x.tar")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_recipe_without_lines_is_an_error(text: str) -> None:
    """An empty archive is nothing that anybody wants."""
    with pytest.raises(SpecError, match="has no samples"):
        samples_of(text)


def test_recipe_runs_no_command_when_it_is_not_trusted() -> None:
    """The message names the cure."""
    (problem,) = problems_of("a.txt pipe:echo\n", allow_pipe=False)
    assert "pipe:echo runs a command, which no recipe may do unasked. Pass --allow-pipe" in problem


def test_recipe_runs_no_command_under_wds_secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused while it is checked."""
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1 forbids"):
        samples_of(f"a.txt pipe:touch {tmp_path}/x\n")
    assert not list(tmp_path.iterdir())


def test_recipe_masks_secrets_in_messages() -> None:
    """A signed URL and a token of a command."""
    with pytest.raises(SpecError) as caught:
        samples_of("a.txt pipe:curl --token abcdef\na.txt nohost://u:abcdef@h/?token=abcdef\n")
    assert "field 'txt' of sample 'a' is given before, by line 1" in str(caught.value)
    assert "abcdef" not in str(caught.value)


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_recipe_finds_relative_paths_in_its_folder_or_another(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the recipe, or the one that is named."""
    monkeypatch.chdir(tmp_path)
    for name in ("lists", "elsewhere"):
        Path(name).mkdir()
        (Path(name) / "x.bin").write_text(name)
    Path("lists/r.txt").write_text("a.txt x.bin\n")
    assert [sample["txt"] for sample in SampleAssembler(open_part_list("lists/r.txt", folder=folder))] == [
        (folder or "lists").encode()
    ]
