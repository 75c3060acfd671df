"""The create command: what it writes, and what it refuses before it writes anything."""

import os
import tarfile
from pathlib import Path

import fsspec
import pytest

from tests.kits.tool_kit import Result, read_samples, run_wds, write_example_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: images/, recipe.txt and plan.tsv."""
    write_example_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def create(*arguments: object, stdin: str = "") -> Result:
    """Runs the command, and expects nothing but an archive on standard output."""
    done = run_wds("create", *arguments, stdin=stdin.encode())
    assert "Traceback" not in done.err
    return done


def images() -> dict[str, bytes]:
    """What the folder holds, by path."""
    return {str(path.relative_to("images")): path.read_bytes() for path in Path("images").rglob("*.*")}


def test_create_writes_a_folder(folder: Path) -> None:
    """Every file, in order of keys; nothing is said."""
    Path("images/cat/1-b.txt").write_text("between")
    assert create("images", "-o", "x.tar") == Result(0, b"", "")
    with tarfile.open("x.tar") as tar:
        assert tar.getnames() == [
            "cat/1.jpg", "cat/1.txt", "cat/1-b.txt", "cat/2.jpg", "cat/2.txt", "dog/1.jpg", "dog/1.txt"
        ]  # fmt: skip
    found = {f"{s['__key__']}.{field}": s[field] for s in read_samples("x.tar") for field in s if field != "__key__"}
    assert found == images()
    assert {path.name for path in folder.glob("x.tar*")} == {"x.tar"}


def test_create_writes_a_recipe() -> None:
    """Files and texts."""
    assert create("recipe.txt", "-o", "x.tar") == Result(0, b"", "")
    assert read_samples("x.tar") == [
        {"__key__": key, "jpg": images()[f"{key}.jpg"], "cls": str(number).encode()}
        for number, key in enumerate(("cat/1", "cat/2", "dog/1"))
    ]


def test_create_writes_a_plan() -> None:
    """Files and texts, by column."""
    assert create("plan.tsv", "-o", "x.tar") == Result(0, b"", "")
    assert read_samples("x.tar") == [
        {"__key__": key, "jpg": images()[f"{key}.jpg"], "txt": f"this is {key}".encode()}
        for key in ("cat/1", "cat/2", "dog/1")
    ]


@pytest.mark.parametrize("arguments", [(), ("-",), ("--from", "recipe", "-", "-o", "-")])
def test_create_reads_standard_input_and_writes_standard_output(arguments: tuple[str, ...]) -> None:
    """By default; relative paths are those of the working directory."""
    done = create(*arguments, stdin="a.jpg images/cat/1.jpg\na.txt text:hello\n")
    assert done.status == 0, done.err
    assert read_samples(done.out) == [{"__key__": "a", "jpg": images()["cat/1.jpg"], "txt": b"hello"}]


def test_create_reads_a_plan_from_standard_input_when_told() -> None:
    """With what belongs to plans: delimiter, format of keys, Base64."""
    plan = "@jpg;bin\n1.jpg;base64:/w==\n"
    done = create("--from", "plan", "-C", "images/cat", "--delimiter", ";", "--key-format", "k{number}", "--base64",
                  stdin=plan)  # fmt: skip
    assert done.status == 0, done.err
    assert read_samples(done.out) == [{"__key__": "k0", "jpg": images()["cat/1.jpg"], "bin": b"\xff"}]
    for tab in ("\\t", "tab", "\t"):
        done = create("--from", "plan", "--delimiter", tab, "--no-escapes", stdin="a\tb\n\\t\t2\n")
        assert read_samples(done.out) == [{"__key__": "000000000", "a": b"\\t", "b": b"2"}]


def test_create_gives_the_same_bytes_for_the_same_input() -> None:
    """Whatever the files' times and the order in which the system lists them."""
    first = create("images").out
    for name, data in images().items():
        Path("images", name).unlink()
        Path("images", name).write_bytes(data)
    assert create("images/").out == first


def test_create_passes_options_on_to_the_writer() -> None:
    """Compression by suffix, an index, new keys."""
    done = create("recipe.txt", "--rekey", "{shard}/{number:02d}", "--index", "-o", "x.tar.gz")
    assert done.status == 0, done.err
    assert Path("x.tar.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert Path(".wds-index/x.tar.gz.index").exists()
    assert [sample["__key__"] for sample in read_samples("x.tar.gz")] == ["recipe/00", "recipe/01", "recipe/02"]


def test_create_tells_what_it_passes_over() -> None:
    """Odd names and links, with counts; that is no loss."""
    for name in ("README", "LICENSE", ".hidden.txt"):
        Path("images", name).write_text("x")
    Path("images/link").symlink_to("cat")
    done = create("images", "-o", "x.tar")
    assert done.status == 0
    assert done.err == (
        "wds: passed over 1 in folder images that belong to no sample: hidden file\n"
        "wds: passed over 1 in folder images that belong to no sample: link to a folder\n"
        "wds: passed over 2 in folder images that belong to no sample: no extension\n"
    )
    assert len(read_samples("x.tar")) == 3


def test_create_tells_what_it_passed_over_when_nothing_is_left() -> None:
    """The reason why there is nothing."""
    Path("odd").mkdir()
    Path("odd/README").write_text("x")
    done = create("odd", "-o", "x.tar")
    assert done.status == 1
    assert "passed over 1 in folder odd that belong to no sample: no extension\n" in done.err
    assert done.err.endswith("folder odd has no samples: there is nothing to write\n")


def test_create_writes_no_control_characters_to_the_terminal() -> None:
    """Wherever the name of the source stands."""
    folder = Path("red\x1b[31m\n")
    folder.mkdir()
    for name in ("README", "a.txt"):
        (folder / name).write_text("x")
    (folder / "b.txt").symlink_to("nothing")
    for arguments in ((), ("--missing", "skip-file")):
        done = create(folder, *arguments, "-o", "x.tar")
        assert "\x1b" not in done.err
        assert r"folder red\x1b[31m\n" in done.err
        assert all(line.startswith(("wds", "  file ")) for line in done.err.splitlines())


# ----------------------------------------------------------------------------------------------------- before anything
def test_create_reports_all_problems_and_writes_nothing(folder: Path) -> None:
    """One run says all that is to mend; also to standard output not a byte is written."""
    recipe = "a.txt text:1\nb.txt nothing.txt\nc text:2\na.jpg images/cat/1.jpg\n"
    for output in ("x.tar", "-"):
        done = create("-o", output, stdin=recipe)
        assert (done.status, done.out) == (1, b"")
        first, *problems = done.err.splitlines()
        assert first == "wds create: error: recipe on standard input has 3 problems, and nothing was written:"
        assert [problem.split(":")[0] for problem in problems] == ["  line 2", "  line 3", "  line 4"]
    assert not list(folder.glob("x.tar*"))


def test_create_does_not_replace_a_file_without_force() -> None:
    """It is said before the sources are looked at."""
    Path("x.tar").write_text("precious")
    done = create("nothing", "-o", "x.tar")
    assert done.status == 1
    assert "--force" in done.err
    assert Path("x.tar").read_text() == "precious"
    assert create("recipe.txt", "-o", "x.tar", "--force").status == 0
    assert len(read_samples("x.tar")) == 3


def test_create_leaves_nothing_whole_when_a_command_fails_in_the_middle(folder: Path) -> None:
    """The samples before are in an unfinished file at most."""
    done = create("--allow-pipe", "-o", "x.tar", stdin="a.txt text:1\nb.txt pipe:exit 3\n")
    assert done.status == 1
    assert "recipe on standard input, line 2: field 'txt' of sample 'b': " in done.err
    assert "exit status 3" in done.err
    assert not Path("x.tar").exists()
    done = create("--allow-pipe", stdin="a.txt text:1\nb.txt pipe:exit 3\n")
    assert b"a.txt" in done.out
    assert not done.out.endswith(bytes(1024))  # no end marker: a reader sees that it is cut


@pytest.mark.parametrize(
    ("missing", "message", "keys"),
    [
        ("skip-file", "left out: 2 missing files, 1 sample (--missing skip-file)", ["a", "c"]),
        ("skip-sample", "left out: 2 missing files, 2 samples (--missing skip-sample)", ["c"]),
        ("empty", "took 2 missing files as empty (--missing empty)", ["a", "b", "c"]),
    ],
)
def test_create_leaves_out_what_is_missing_when_asked(missing: str, message: str, keys: list[str]) -> None:
    """Each is named, and counted at the end."""
    recipe = "a.txt text:1\na.jpg gone.jpg\nb.jpg pipe:exit 3\nc.txt text:2\n"
    done = create("--allow-pipe", "--missing", missing, "-o", "x.tar", stdin=recipe)
    assert done.status == 0
    told = done.err.splitlines()
    assert told[0] == "wds: recipe on standard input, line 2: field 'jpg' of sample 'a': there is no file 'gone.jpg'"
    assert "line 3: field 'jpg' of sample 'b': " in told[1]
    assert "exit status 3" in told[1]
    assert told[-1] == f"wds: {message}"
    assert [sample["__key__"] for sample in read_samples("x.tar")] == keys


def test_create_names_only_the_first_of_many_missing_files() -> None:
    """The count is of all."""
    recipe = "".join(f"{number}.txt gone\n" for number in range(100)) + "a.txt text:1\n"
    done = create("--missing", "skip-file", "-o", "x.tar", stdin=recipe)
    assert len(done.err.splitlines()) == 21
    assert done.err.endswith("left out: 100 missing files, 100 samples (--missing skip-file)\n")


def test_create_is_an_error_when_nothing_is_left() -> None:
    """No empty archive appears, and what was there stays."""
    Path("x.tar").write_text("precious")
    done = create("--missing", "skip-file", "-o", "x.tar", "--force", stdin="a.txt gone\n")
    assert done.status == 1
    assert "no sample is left, and nothing was written" in done.err
    assert Path("x.tar").read_text() == "precious"


@pytest.mark.parametrize("place", ["recipe.txt", "-", "memory://create-tool/recipe.txt"])
@pytest.mark.parametrize("policy", ["error", "skip-file", "empty"])
def test_create_runs_commands_of_a_recipe_only_when_allowed(place: str, policy: str, folder: Path) -> None:
    """Wherever it is from, as with other lists: it may be a stranger's. The message names the option."""
    recipe = "a.cls text:1\na.txt pipe:touch ran; echo x\n"
    Path("recipe.txt").write_text(recipe)
    with fsspec.open("memory://create-tool/recipe.txt", "w") as file:
        file.write(recipe)
    refused = create(place, "--missing", policy, "-o", "x.tar", stdin=recipe)
    assert refused.status == 1
    assert "line 2: member 'a.txt': pipe:touch ran; echo x runs a command" in refused.err
    assert "--allow-pipe" in refused.err
    assert not Path("ran").exists()
    assert not Path("x.tar").exists()
    allowed = create(place, "--missing", policy, "-o", "x.tar", "--allow-pipe", stdin=recipe)
    assert (allowed.status, allowed.err) == (0, "")
    assert read_samples("x.tar") == [{"__key__": "a", "cls": b"1", "txt": b"x\n"}]


def test_create_runs_no_command_under_wds_secure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1, and nothing is run."""
    monkeypatch.setenv("WDS_SECURE", "1")
    done = create("-o", "x.tar", "--allow-pipe", "--missing", "empty", stdin="a.txt pipe:touch ran\n")
    assert done.status == 1
    assert "WDS_SECURE=1 forbids" in done.err
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.tsv", "--allow-pipe"], "--allow-pipe is for a recipe"),
        (["images", "--sort"], "--sort is for a recipe, but images is a folder"),
        (["plan.tsv", "--sort"], "--sort is for a recipe"),
        (["recipe.txt", "--delimiter", ";"], "--delimiter is for a plan"),
        (["recipe.txt", "--key-format", "{number}"], "--key-format is for a plan"),
        (["images", "--no-escapes"], "--no-escapes is for a plan"),
        (["images", "--base64"], "--base64 is for a plan"),
        (["images", "-C", "."], "-C is for a recipe or a plan"),
        (["plan.tsv", "--delimiter", "ab"], "delimiter of a table is one character"),
        (["plan.tsv", "--key-format", "{key}"], "needs {number}, and nothing else"),
        (["images", "-o", "images/x.tar"], "would be inside the folder that is read"),
        ([".", "-o", "x.tar"], "would be inside the folder that is read"),
        (["images", "--missing", "never"], "invalid choice"),
        (["images", "recipe.txt"], "unknown arguments"),
    ],
)
def test_create_exits_with_2_when_arguments_do_not_fit(arguments: list[str], message: str, folder: Path) -> None:
    """Nothing is written."""
    done = create("-o", "y.tar", *arguments) if "-o" not in arguments else create(*arguments)
    assert (done.status, done.out) == (2, b"")
    assert message in done.err
    assert not list(folder.rglob("[xy].tar*"))


def test_create_refuses_standard_output_that_is_a_file_of_the_folder() -> None:
    """As a shell has made it for ``> images/x.tar``: it would become a member, half or empty."""
    before = os.dup(1)
    try:
        with Path("images/0.tar").open("wb") as file:
            os.dup2(file.fileno(), 1)
        done = create("images")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert (done.status, done.out) == (2, b"")
    assert "would be inside the folder that is read" in done.err


def test_create_makes_of_a_table_what_the_table_was_made_of() -> None:
    """``wds tsv``, then ``wds create``: keys and texts come back, with tabs and line ends in them."""
    recipe = "d/a.txt base64:YQliXAo=\nd/a.cls text:3\nd/b.txt text:größe\nd/b.cls text:\n"
    archive = create(stdin=recipe).out
    table = run_wds("tsv", "-f", "txt cls", stdin=archive)
    assert table.status == 0, table.err
    Path("x.tsv").write_bytes(table.out)
    assert create("x.tsv").out == archive
