"""``wds split``: every sample once, in shards that are no larger than asked for."""

import gzip
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.processes import open_files
from tests.kits.shards import sample_members, text_keys, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds
from torchdata_wds import ShardWriter
from torchdata_wds.cli.split import HookCommand, number_of, numbered_pattern
from torchdata_wds.format.shards import ShardNames

SIZES = (5, 0, 7)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Some shards, one of them empty."""
    return write_text_shards(tmp_path / "in", SIZES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the shards go."""
    path = tmp_path / "out"
    path.mkdir()
    return path


def names(folder: Path) -> list[str]:
    """The files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def lines(result: Result) -> list[str]:
    """What was printed."""
    return result.text.splitlines()


def keys(*paths: Path | str) -> list[str]:
    """The keys in some shards, in order."""
    return [sample["__key__"] for path in paths for sample in read_samples(path)]


def test_split_makes_shards_of_so_many_samples_and_prints_their_paths(shards: list[str], folder: Path) -> None:
    """Every sample once and in order, over the borders of the input's shards; the sum is told on stderr."""
    done = run_wds("split", *shards, "-n", 5, "-o", folder / "x")
    assert done.status == 0
    assert lines(done) == [str(folder / f"x-00000{number}.tar") for number in range(3)]
    assert names(folder) == ["x-000000.tar", "x-000001.tar", "x-000002.tar"]
    assert [len(read_samples(path)) for path in lines(done)] == [5, 5, 2]
    assert [sample for path in lines(done) for sample in read_samples(path)] == [
        sample for shard in shards for sample in read_samples(shard)
    ]
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert done.err == f"wds: finished 3 shards with 12 samples and {size:,} bytes\n"


@pytest.mark.parametrize("size", [10_240, 20_480, 25_000, 30_720])
def test_split_counts_bytes_with_headers_before_the_sample_that_would_pass(
    size: int, shards: list[str], folder: Path
) -> None:
    """No shard is larger, and none smaller than it must be."""
    done = run_wds("split", *shards, "-s", size, "-o", folder / "x")
    assert done.status == 0
    sizes = [Path(path).stat().st_size for path in lines(done)]
    assert max(sizes) <= size
    fit = (size // 10_240 * 10_240 - 1024) // 3072
    assert {len(read_samples(path)) for path in lines(done)[:-1]} == {fit}
    assert keys(*lines(done)) == text_keys(SIZES)


def test_split_gives_a_sample_that_is_too_large_a_shard_of_its_own(tmp_path: Path, folder: Path) -> None:
    """Nothing is lost, and it is told."""
    members = [*sample_members("a", bin=b"1"), *sample_members("b", bin=bytes(50_000)), *sample_members("c", bin=b"1")]
    done = run_wds("split", write_tar(tmp_path / "x.tar", members), "-s", "20kB", "-o", folder / "x")
    assert done.status == 0
    assert [keys(path) for path in lines(done)] == [["a"], ["b"], ["c"]]
    assert "sample 'b' alone makes a shard" in done.err


def test_split_reads_standard_input_and_may_write_nothing(shards: list[str], folder: Path) -> None:
    """An empty input makes no shard."""
    assert lines(run_wds("split", "-o", folder / "x", stdin=Path(shards[0]).read_bytes())) == [
        str(folder / "x-000000.tar")
    ]
    done = run_wds("split", shards[1], "-o", folder / "y")
    assert (done.status, done.out) == (0, b"")
    assert names(folder) == ["x-000000.tar"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "x.tar"], "x-000003.tar"),
        (["-o", "x.tar.gz"], "x-000003.tar.gz"),
        (["-o", "x.tgz"], "x-000003.tgz"),
        (["-o", "x", "--compress", "gz"], "x-000003.tar.gz"),
        (["-o", "x.tar", "--compress", "gz"], "x-000003.tar.gz"),
        (["-o", "x.tar.gz", "--compress", "none"], "x-000003.tar.gz"),
        (["-o", "x-%02d.tar"], "x-03.tar"),
        (["-o", "{shard:04d}"], "0003"),
        (["-o", "v1.2/x"], "v1.2/x-000003.tar"),
        (["-o", "v1.2/"], "v1.2/000003.tar"),
        (["-o", "100%"], "100%-000003.tar"),
    ],
)
def test_split_names_shards(
    arguments: list[str], expected: str, shards: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name gets the number, a pattern is used as it is, and the suffix tells the compression."""
    monkeypatch.chdir(folder)
    (folder / "v1.2").mkdir()
    done = run_wds("split", shards[0], "--start", 3, *arguments)
    assert lines(done) == [expected], done.err
    data = (folder / expected).read_bytes()
    is_packed = expected.endswith("gz") and "none" not in arguments
    assert data.startswith(b"\x1f\x8b") is is_packed
    assert len(read_samples(gzip.decompress(data) if is_packed else data)) == 5


def test_split_goes_on_behind_the_highest_number_when_asked(shards: list[str], folder: Path) -> None:
    """And refuses to overwrite otherwise, before it writes anything."""
    assert run_wds("split", shards[0], "-n", 2, "-o", folder / "x").status == 0
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    refused = run_wds("split", shards[2], "-n", 2, "-o", folder / "x")
    assert (refused.status, refused.out) == (1, b"")
    assert "--force" in refused.err
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before
    done = run_wds("split", shards[2], "-n", 4, "-o", folder / "x", "--start", "next", "--post", "true {shard}")
    assert lines(done) == [str(folder / "x-000003.tar"), str(folder / "x-000004.tar")]
    done = run_wds("split", shards[2], "-n", 2, "-o", folder / "x", "--force")
    assert done.status == 0
    assert keys(folder / "x-000000.tar") == text_keys((0, 0, 2))
    assert f"higher numbers existed before and are unchanged, up to {folder}/x-000004.tar\n" in done.err


@pytest.mark.parametrize("name", ["file:{folder}/x-{}.tar", "link.tar"])
def test_split_replaces_no_shard_that_it_reads(
    name: str, shards: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller shards of the same names would take the place of some that are yet to be read."""
    monkeypatch.chdir(folder)
    assert run_wds("split", *shards, "-n", 6, "-o", "x-%d.tar").status == 0
    (folder / "link.tar").symlink_to("x-1.tar")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    inputs = [name.format(number, folder=folder) for number in range(2)] if "{}" in name else ["x-0.tar", name]
    arguments = ["split", *inputs, "-n", 2, "-o", "x-%d.tar", "--force"]
    refused = run_wds(*arguments)
    assert (refused.status, refused.out) == (2, b"")
    assert "is read, and must not be replaced" in refused.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run_wds(*arguments, "--max-shards", 1).status == 2
    assert run_wds(*arguments, "--start", 2).status == 0
    assert keys(*(f"x-{number}.tar" for number in range(2, 8))) == text_keys(SIZES)


def test_split_prints_paths_that_are_no_utf8(shards: list[str], folder: Path) -> None:
    """As the bytes that they are."""
    out = os.fsencode(folder) + b"/\xff"
    done = run_wds("split", shards[0], "-o", os.fsdecode(out))
    assert (done.status, done.out) == (0, out + b"-000000.tar\n")


# ------------------------------------------------------------------------------------------------------- max shards
@pytest.mark.parametrize("limit", [["-n", 2], ["-s", "10kB"]])
def test_split_stops_when_so_many_shards_are_full_and_says_how_to_go_on(
    limit: list[Any], shards: list[str], folder: Path
) -> None:
    """A clean end; what it says gives the rest."""
    arguments = ["split", *shards, *limit, "-o", folder / "x"]
    done = run_wds(*arguments, "--max-shards", 2)
    assert done.status == 0
    assert len(lines(done)) == 2
    used = len(keys(*lines(done)))
    assert f"To continue: --start 2 --slice {used}:\n" in done.err
    rest = run_wds(*arguments, *done.err.rpartition("To continue: ")[2].split())
    assert rest.status == 0
    assert keys(*lines(done), *lines(rest)) == text_keys(SIZES)


def test_split_stops_reading_at_once(shards: list[str], folder: Path, tmp_path: Path) -> None:
    """Damage behind the last sample that it needs is not seen."""
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(Path(shards[2]).read_bytes()[:-15_000])
    before = open_files()
    done = run_wds("split", shards[0], damaged, "-n", 2, "-o", folder / "x", "--max-shards", 3)
    assert done.status == 0
    assert keys(*lines(done)) == text_keys((5, 0, 1))
    assert open_files() <= before


def test_split_goes_on_in_the_middle_of_a_slice(shards: list[str], folder: Path) -> None:
    """The advice counts the samples of the input."""
    done = run_wds("split", *shards, "--slice", "1:12:2", "-n", 2, "--max-shards", 1, "-o", folder / "x")
    assert "--start 1 --slice 5:12:2\n" in done.err
    assert "from 0 again" not in done.err
    numbered = run_wds("split", *shards, "-n", 2, "--max-shards", 1, "-o", folder / "z", "--rekey", "#")
    assert "--rekey will number them from 0 again" in numbered.err
    assert "stopped" not in run_wds("split", *shards, "-n", 99, "--max-shards", 1, "-o", folder / "y").err


def test_writer_writes_no_sample_more_when_its_shards_are_full(folder: Path) -> None:
    """It says so before the sample where that can be known, and otherwise with it; nothing is half written."""
    samples = [{"__key__": f"{number}", "bin": b"1"} for number in range(9)]
    with ShardWriter(f"{folder}/x-%d.tar", max_count=2, max_shards=2) as writer:
        answers = [(writer.write(sample), writer.is_full) for sample in samples[:5]]
    assert answers == [(1024, False), (1024, False), (1024, False), (1024, True), (0, True)]
    assert [shard.count for shard in writer.shards] == [2, 2]
    with ShardWriter(f"{folder}/y-%d.tar", max_bytes=10_240, max_shards=1) as writer:
        written = [writer.write({**sample, "bin": bytes(3000)}) for sample in samples[:4]]
        assert [bool(size) for size in written] == [True, True, False, False]
        assert writer.is_full
        # finished at once
        assert [shard.count for shard in writer.shards] == [2]
    with pytest.raises(ValueError, match="max_shards must be at least 1"):
        ShardWriter(f"{folder}/z-%d.tar", max_shards=0)


# ------------------------------------------------------------------------------------------------------------- post
def test_split_runs_a_command_for_each_finished_shard(
    shards: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Values are one word each, whatever is in them; what it prints is no data, and it cannot eat the input."""
    out = tmp_path / "a $(touch bad) 'b"
    out.mkdir()
    log = tmp_path / "log"
    post = f"test -f {{path}} && printf '%s|' {{path}} {{name}} {{folder}} {{shard}} {{count}} >> {log}; cat; echo said"
    data = Path(shards[2]).read_bytes()
    done = run_wds("split", "-n", 4, "-o", out / "x y", "--start", 8, "--post", post, stdin=data)
    assert done.status == 0, done.err
    assert log.read_text() == "".join(
        f"{out}/x y-{number:06d}.tar|x y-{number:06d}.tar|{out}|{number}|{count}|" for number, count in ((8, 4), (9, 3))
    )
    assert lines(done) == [f"{out}/x y-000008.tar", f"{out}/x y-000009.tar"]
    assert capfd.readouterr() == ("", "said\nsaid\n")
    assert not (tmp_path / "bad").exists()


def test_split_stops_when_a_command_fails(shards: list[str], folder: Path) -> None:
    """Its status is checked; the shards stay, and nothing is half written."""
    done = run_wds("split", *shards, "-n", 2, "-o", folder / "x", "--post", "exit {shard}", "--delete")
    assert done.status == 1
    assert names(folder) == ["x-000001.tar"]
    assert lines(done) == [str(folder / "x-000000.tar"), str(folder / "x-000001.tar")]
    assert "'exit 1' failed with exit status 1" in done.err
    assert "2 shards with 4 samples" in done.err


def test_split_runs_no_command_where_that_is_forbidden(
    shards: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    monkeypatch.setenv("WDS_SECURE", "1")
    done = run_wds("split", *shards, "-o", folder / "x", "--post", "touch {path}.bad --token=abc")
    assert (done.status, done.out) == (1, b"")
    assert "WDS_SECURE" in done.err
    assert "abc" not in done.err
    assert names(folder) == []


# --------------------------------------------------------------------------------------------------- what goes wrong
def test_split_of_a_damaged_shard_keeps_what_is_whole(shards: list[str], folder: Path, tmp_path: Path) -> None:
    """Finished shards stay, an unfinished one does not appear; skipping goes on, with status 1."""
    data = Path(shards[2]).read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    arguments = ["split", shards[0], tmp_path / "cut.tar", shards[1], "-n", 4]
    done = run_wds(*arguments, "-o", folder / "x")
    assert done.status == 1
    assert "cut.tar is cut off" in done.err
    assert names(folder) == ["x-000000.tar", "x-000001.tar.partial"]
    skipped = run_wds(*arguments, "-o", folder / "y", "--errors", "skip")
    assert skipped.status == 1
    assert keys(*lines(skipped)) == text_keys((5, 0, 3))


def test_split_refuses_a_key_that_comes_twice_in_a_shard_and_names_the_cure(shards: list[str], folder: Path) -> None:
    """In different shards the same key is no harm."""
    assert run_wds("split", shards[0], shards[0], "-n", 5, "-o", folder / "x").status == 0
    done = run_wds("split", shards[0], shards[0], "-o", folder / "y")
    assert done.status == 1
    assert "--rekey" in done.err
    assert run_wds("split", shards[0], shards[0], "-o", folder / "z", "--rekey", "#").status == 0
    skipped = run_wds("split", shards[0], shards[0], "-o", folder / "w", "--errors", "skip")
    assert skipped.status == 1
    assert keys(*lines(skipped)) == text_keys((5,))


def test_split_goes_on_when_nobody_reads_the_names(
    shards: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost is a name, and must not be a sample."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        from torchdata_wds.cli.main import main

        monkeypatch.setattr(sys, "stdout", output)
        status = main(["split", *shards, "-n", "2", "-o", str(folder / "x")])
        monkeypatch.undo()
    assert status == 0
    assert keys(*sorted(folder.iterdir())) == text_keys(SIZES)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-o", "-"],
        ["-o", ""],
        ["-o", "x-%d-%d.tar"],
        ["-o", "x", "--delete"],
        ["-o", "x", "-n", "0"],
        ["-o", "x", "-s", "0"],
        ["-o", "x", "--max-shards", "0"],
        ["-o", "x", "--start", "last"],
        ["-o", "%d/x.tar", "--start", "next"],
        ["-o", "x", "--rekey", "same"],
        ["-o", "pipe:cat"],
        ["-o", "x", "--post", "echo '{path}'"],
    ],
)
def test_split_refuses_wrong_arguments(
    arguments: list[str], shards: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 2, and without output."""
    monkeypatch.chdir(folder)
    done = run_wds("split", *shards, *arguments)
    assert (done.status, done.out) == (2, b"")
    assert "error" in done.err
    assert names(folder) == []


# -------------------------------------------------------------------------------------------------- names of shards
@pytest.mark.parametrize("name", ["", "-"])
def test_no_pattern_is_made_of_what_is_no_name(name: str) -> None:
    """Several shards cannot go to one place."""
    with pytest.raises(ValueError, match="need a name"):
        numbered_pattern(name)


@pytest.mark.parametrize(
    ("pattern", "url", "expected"),
    [
        ("x1%d1.tar", "x1171.tar", 17),
        ("x1%d1.tar", "x11.tar", None),
        ("%06d.tar", "1234567.tar", 1234567),
        ("%06d.tar", "000000.tar", 0),
        ("%06d.tar", "0000000.tar", None),
        ("%040d.tar", f"{7:040d}.tar", 7),
        ("%d.tar", f"{'1' * 200}.tar", None),
        ("%d.tar", "a/7.tar", None),
        ("a/%d/x.tar", "a/../a/7/x.tar", 7),
        ("s3://a/%d.tar", "s3://a/7.tar", 7),
        ("s3://a/%d.tar", "a/7.tar", None),
        ("%d.tar", "-", None),
        ("pipe:cat > %d.tar", "7.tar", None),
    ],
)
def test_number_of_a_file_is_that_of_the_shard_that_would_replace_it(
    pattern: str, url: str, expected: int | None
) -> None:
    """None where no shard would."""
    assert number_of(ShardNames(pattern), url) == expected


def test_number_of_a_file_is_found_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folders and of the file, which is read at the link's end; a link in a shard's place is replaced itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in folder").mkdir()
    (tmp_path / "out").symlink_to("in folder")
    (tmp_path / "link.tar").symlink_to("out/x-3.tar")
    (tmp_path / "out/x-4.tar").symlink_to("/elsewhere")
    names = ShardNames("out/x-%d.tar")
    urls = ["in folder/x-2.tar", "link.tar", "out/x-4.tar", f"file:{tmp_path}/in%20folder/x-5.tar", "x-6.tar"]
    assert [number_of(names, url) for url in urls] == [2, 3, 4, 5, None]


# ------------------------------------------------------------------------------------------------- commands
NASTY = ["a b", "", "'", '"', "$(touch bad)", "`touch bad`", "\\", "*", "-n", "{path}", "a\nb", "ü", "; exit 3", "%s"]


def test_every_value_arrives_as_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in it; a value is not looked through for places."""
    monkeypatch.chdir(tmp_path)
    places = [f"p_{'x' * number}" for number in range(len(NASTY))]
    template = "printf '%s|' " + " ".join(f"{{{place}}}" for place in places) + " > out"
    HookCommand(template, places).run(dict(zip(places, NASTY, strict=True)))
    assert (tmp_path / "out").read_text() == "".join(f"{value}|" for value in NASTY)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("cmd {path}", "cmd 'x y'"),
        ("cmd{path}{path}", "cmd'x y''x y'"),
        ("cmd ${path} $path", "cmd ${path} $path"),
        ("cmd \\{path}", "cmd \\{path}"),
        ("awk '{print $1}' {path}", "awk '{print $1}' 'x y'"),
        ("echo ${name} ${count:-2} {a,b} {} {path}", "echo ${name} ${count:-2} {a,b} {} 'x y'"),
        ("echo \\' {path} \\'", "echo \\' 'x y' \\'"),
        ("echo 'a\\' {path}", "echo 'a\\' 'x y'"),
        ("true", "true"),
    ],
)
def test_places_are_filled_where_they_stand_outside_of_quotes(template: str, expected: str) -> None:
    """What belongs to the shell stays as it is."""
    assert HookCommand(template, ["path"]).fill({"path": "x y"}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("cmd '{path}'", "is inside quotes"),
        ('cmd "a {path} b"', "is inside quotes"),
        ('cmd "\\"{path}"', "is inside quotes"),
        ("cmd '\\' \"'{path}\"", "is inside quotes"),
        ("cmd {paht}", r"unknown place \{paht\}: there are \{path\}, \{name\}"),
        ("cmd 'it", "not closed"),
        ("cmd it's {path}", "not closed"),
    ],
)
def test_templates_that_would_not_do_what_they_look_like_are_refused(template: str, message: str) -> None:
    """Before any command is run."""
    with pytest.raises(ValueError, match=message):
        HookCommand(template, ["path", "name"])


@pytest.mark.parametrize(("command", "status"), [("exit 3", "exit status 3"), ("kill -9 $$", "signal SIGKILL")])
def test_failure_is_an_error_that_masks_secrets(command: str, status: str) -> None:
    """It says how the command ended."""
    with pytest.raises(ChildProcessError, match=status) as caught:
        HookCommand(f": --token=abc; {command}", []).run({})
    assert "abc" not in str(caught.value)
