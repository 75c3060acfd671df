"""What all commands read and write: shards by every kind of name, ranges, damage, one archive, new keys."""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kits.servers import serve_folder
from tests.kits.shards import sample_members, tar_bytes, text_keys, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds
from torchdata_wds.cli.command import Part, UsageError, part_number
from torchdata_wds.cli.inputs import part_of
from torchdata_wds.cli.outputs import SampleOutput

SIZES = (3, 0, 4)
KEYS = text_keys(SIZES)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[str]]:
    """Three shards in a folder of their own."""
    return iter([write_text_shards(tmp_path / "in", SIZES)]).__next__()


def keys_of(done: Result) -> list[str]:
    """The keys of what a command has written, which must have succeeded."""
    assert done.status == 0, done.err
    return [sample["__key__"] for sample in read_samples(done.out)]


# ------------------------------------------------------------------------------------------------------------ input
def test_inputs_are_named_in_every_way(shards: list[str], tmp_path: Path) -> None:
    """Paths, braces, globs, a folder, a command, lists: the same samples."""
    folder = tmp_path / "in"
    names = tmp_path / "list.txt"
    names.write_text(f"# the shards\n\n{shards[0]}\n  {folder}/shard-00000[12].tar\n")
    for arguments in (
        shards,
        [f"{folder}/shard-{{000000..000002}}.tar"],
        [f"{folder}/*.tar"],
        [folder],
        [f"@{names}"],
        [f"pipe:cat {shards[0]}", *shards[1:]],
    ):
        assert keys_of(run_wds("cat", *arguments)) == KEYS


def test_inputs_may_have_a_name_of_one_letter(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is often called so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").rename("A")
    assert keys_of(run_wds("cat", "A")) == KEYS


def test_inputs_are_standard_input_when_there_are_none(shards: list[str]) -> None:
    """By no name, by its name, and as a list."""
    data = Path(shards[0]).read_bytes()
    assert keys_of(run_wds("cat", stdin=data)) == KEYS[:3]
    assert keys_of(run_wds("cat", "-", "-o", "-", stdin=gzip.compress(data))) == KEYS[:3]
    assert keys_of(run_wds("cat", "@-", stdin="\n".join(shards).encode())) == KEYS


@pytest.mark.parametrize("line", ["pipe:touch {}", "a-{{0..1}}::pipe:touch {}", "-", "reference://::http://x/y"])
def test_lists_run_nothing_when_that_is_not_allowed(line: str, shards: list[str], tmp_path: Path) -> None:
    """A list may be a stranger's, wherever it lies."""
    mark = tmp_path / "ran"
    names = tmp_path / "list.txt"
    names.write_text(f"{shards[0]}\n{line.format(mark)}\n")
    for arguments, stdin in ((f"@{names}", b""), ("@-", names.read_bytes())):
        done = run_wds("cat", arguments, stdin=stdin)
        assert (done.status, done.out) == (1, b"")
        assert "line 2" in done.err
        assert "--allow-pipe" in done.err
    assert not mark.exists()


def test_lists_may_name_commands_when_that_is_allowed(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But never where the program is to be secure."""
    names = tmp_path / "list.txt"
    names.write_text(f"pipe:cat {shards[0]}\r\n")
    assert keys_of(run_wds("cat", "--allow-pipe", f"@{names}")) == KEYS[:3]
    monkeypatch.setenv("WDS_SECURE", "1")
    assert "WDS_SECURE" in run_wds("cat", "--allow-pipe", f"@{names}").err


def test_lists_of_a_server_name_what_lies_beside_them(shards: list[str], tmp_path: Path) -> None:
    """Its relative names mean nothing here; its commands are refused."""
    (tmp_path / "in" / "list.txt").write_text("\ufeffshard-00000{0,2}.tar\n")
    (tmp_path / "in" / "bad.txt").write_text("pipe:cat x\n")
    with serve_folder(tmp_path / "in") as address:
        assert keys_of(run_wds("cat", f"@{address}/list.txt")) == KEYS
        assert "runs a command" in run_wds("cat", f"@{address}/bad.txt").err


@pytest.mark.parametrize("names", [["-", "-"], ["@-", "-"]], ids=" ".join)
def test_inputs_are_refused_when_standard_input_comes_twice(names: list[str]) -> None:
    """It can be read only once."""
    done = run_wds("cat", *names, "--allow-pipe", stdin=b"-\n")
    assert done.status == 1
    assert "only once" in done.err


def test_inputs_are_refused_when_there_is_nothing(tmp_path: Path) -> None:
    """One line on stderr, nothing on stdout, nothing written."""
    for name, message in ():
        target = tmp_path / "out.tar"
        done = run_wds("cat", tmp_path / name if name[0] != "@" else f"@{tmp_path}/{name[1:]}", "-o", target)
        assert (done.status, done.out, done.err.count("\n")) == (1, b"", 1)
        assert message in done.err
        assert not list(tmp_path.iterdir())


def test_inputs_are_refused_when_a_list_is_no_text(tmp_path: Path) -> None:
    """A shard behind the sign for a list."""
    path = tmp_path / "x.tar"
    path.write_bytes(b"\xff\xfe" * 100)
    done = run_wds("cat", f"@{path}")
    assert done.status == 1
    assert "is not UTF-8 text" in done.err


def test_slices_count_samples(shards: list[str]) -> None:
    """Of the whole stream, of each shard, and both."""
    for arguments, keys in (
        (["--slice", "2:6:2"], KEYS[2:6:2]),
        (["--slice", "1"], KEYS[1:2]),
        (["--slice", "100:"], []),
        (["--shard-slice", "1:"], KEYS[1:3] + KEYS[4:]),
        (["--shard-slice", "0"], [KEYS[0], KEYS[3]]),
        (["--shard-slice", "::2", "--slice", "1:"], [KEYS[2], KEYS[3], KEYS[5]]),
    ):
        assert keys_of(run_wds("cat", *shards, *arguments)) == keys


def test_damage_stops_when_nothing_else_is_asked(tmp_path: Path) -> None:
    """Nothing whole appears, and the message tells the place."""
    path = tmp_path / "cut.tar"
    path.write_bytes(tar_bytes(sample_members("a", txt=b"1") + sample_members("b", txt=b"2"), end=b""))
    done = run_wds("cat", path, "-o", tmp_path / "out.tar")
    assert done.status == 1
    assert "byte 2,048" in done.err
    assert "--no-end-marker" in done.err or "--errors skip" in done.err
    assert not (tmp_path / "out.tar").exists()


def test_names_of_strangers_do_not_act_on_a_terminal(tmp_path: Path) -> None:
    """Neither in the last words nor in a warning."""
    path = write_tar(tmp_path / "x.tar", [("\x1b[2Ja.txt", b""), ("b.txt", b""), ("\x1b[2Ja.cls", b"")])
    for arguments in ([], ["--errors", "skip"], ["--on-reappearing", "warn"]):
        done = run_wds("cat", path, *arguments)
        assert "\\x1b[2Ja" in done.err
        assert "\x1b" not in done.err


def test_damage_is_skipped_told_and_counted_when_asked(shards: list[str], tmp_path: Path) -> None:
    """All that is whole is written, and the exit status is 1."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(tar_bytes(sample_members("a", txt=b"1") + sample_members("b", txt=b"2"), end=b""))
    odd = write_tar(tmp_path / "odd.tar", [("c.txt", b""), ("c.txt", b""), ("d.txt", b"")])
    done = run_wds("cat", cut, odd, shards[0], "--errors", "skip", "-o", tmp_path / "out.tar")
    assert done.status == 1
    assert [sample["__key__"] for sample in read_samples(tmp_path / "out.tar")] == ["a", "d", *KEYS[:3]]
    assert done.err.count("wds: skipped: ") == 2
    assert "wds: lost: 2 shards or samples" in done.err
    assert "Error" not in done.err


def test_members_of_no_sample_are_told_by_reason(tmp_path: Path) -> None:
    """They are no samples: the status is 0."""
    path = write_tar(tmp_path / "x.tar", [("README", b""), ("._a.txt", b""), ("a.txt", b""), (".b", b""), ("c", b"")])
    done = run_wds("cat", path)
    assert keys_of(done) == ["a"]
    assert done.err.splitlines() == [
        "wds: left out 1 member that belongs to no sample: hidden file",
        "wds: left out 1 member that belongs to no sample: macOS metadata",
        "wds: left out 2 members that belong to no sample: no extension",
    ]


def test_options_of_grouping_reach_the_reader(tmp_path: Path) -> None:
    """Names, case, fields and keys that come twice, and the end of a shard."""
    path = write_tar(tmp_path / "x.tar", [("a.x.TXT", b"1"), ("a.y.txt", b"2")])
    assert read_samples(run_wds("cat", path).out)[0].keys() == {"__key__", "x.txt", "y.txt"}
    assert read_samples(run_wds("cat", path, "--keep-case").out)[0].keys() == {"__key__", "x.TXT", "y.txt"}
    assert keys_of(run_wds("cat", path, "--keys", r"(a)\.(.\..*)")) == ["a"]
    assert "--rekey '#'" in run_wds("cat", path, "--keys", "last_dot").err
    assert keys_of(run_wds("cat", path, "--keys", "last_dot", "--rekey", "#")) == ["000000000", "000000001"]
    path = write_tar(tmp_path / "y.tar", [("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b""), ("a.txt", b"3")], end=b"")
    options = ["--on-duplicate", "last", "--on-reappearing", "allow", "--no-end-marker", "--rekey", "#"]
    assert [sample["txt"] for sample in read_samples(run_wds("cat", path, *options).out)] == [b"2", b"", b"3"]


@pytest.mark.parametrize("rule", ["first", "(", "(a)", "(a)(b)(c)"])
def test_keys_are_refused_when_they_are_no_rule(rule: str) -> None:
    """Argparse tells what is valid."""
    done = run_wds("cat", "--keys", rule)
    assert done.status == 2
    assert "regular expression" in done.err


# ----------------------------------------------------------------------------------------------------------- fields
def test_fields_are_chosen_and_renamed(shards: list[str]) -> None:
    """With the counts of what was left out on stderr."""
    done = run_wds("cat", shards[0], "-f", "label=cls jpg;txt")
    assert [set(sample) for sample in read_samples(done.out)] == [{"__key__", "label", "txt"}] * 3
    done = run_wds("cat", shards[0], "-f", "jpg", "--missing", "skip")
    assert (keys_of(done), done.err) == ([], "wds: left out 3 samples without the fields (--missing skip)\n")
    done = run_wds("cat", shards[0], "-f", "cls jpg", "--missing", "empty")
    assert read_samples(done.out)[0]["jpg"] == b""
    assert done.err == "wds: left 3 missing fields empty (--missing empty)\n"


def test_fields_are_an_error_when_they_are_missing_or_malformed(shards: list[str]) -> None:
    """The message says which sample, or how a list is written."""
    assert "has no field 'jpg'" in run_wds("cat", shards[0], "-f", "jpg").err
    for arguments in (["-f", "a;"], ["-f", ""], ["--missing", "skip"]):
        assert run_wds("cat", shards[0], *arguments).status == 2


# ----------------------------------------------------------------------------------------------------------- output
def test_output_is_never_replaced_unless_forced(shards: list[str], tmp_path: Path) -> None:
    """Also where it is one of the inputs."""
    target = Path(shards[0])
    before = target.read_bytes()
    done = run_wds("cat", *shards, "-o", target)
    assert done.status == 1
    assert "already exists; pass --force" in done.err
    assert target.read_bytes() == before
    assert run_wds("cat", *shards, "-o", target, "--force").status == 0
    assert [sample["__key__"] for sample in read_samples(target)] == KEYS
    assert not list((tmp_path / "in").glob("*.partial"))


def test_output_is_compressed_by_its_suffix_or_as_asked(shards: list[str], tmp_path: Path) -> None:
    """Standard output too."""
    assert run_wds("cat", shards[0], "-o", tmp_path / "x.tar.gz", "--index").status == 0
    assert (tmp_path / "x.tar.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert (tmp_path / ".wds-index" / "x.tar.gz.index").exists()
    assert run_wds("cat", shards[0], "--compress", "xz").out[:4] == b"\xfd7zX"
    assert run_wds("cat", shards[0], "-o", tmp_path / "y.tar.gz", "--compress", "none").status == 0
    assert len(read_samples(tmp_path / "y.tar.gz")) == 3


def test_output_is_refused_when_it_is_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is nothing to look at."""
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    options = {"rekey": None, "compress": None, "index": False, "force": False}
    with SampleOutput(argparse.Namespace(output=str(tmp_path / "x.tar"), **options)):
        pass
    with pytest.raises(UsageError, match="terminal"):
        SampleOutput(argparse.Namespace(output="-", **options))


def test_output_is_refused_when_there_is_no_place_for_an_index(shards: list[str]) -> None:
    """Nothing lies beside standard output."""
    done = run_wds("cat", shards[0], "--index")
    assert (done.status, done.out) == (2, b"")


def test_keys_that_come_twice_are_refused_with_their_cure(shards: list[str], tmp_path: Path) -> None:
    """New keys keep both samples."""
    twice = [shards[0], shards[0]]
    done = run_wds("cat", *twice, "-o", tmp_path / "x.tar")
    assert done.status == 1
    assert "--rekey" in done.err
    assert not (tmp_path / "x.tar").exists()
    done = run_wds("cat", *twice, "--errors", "skip")
    assert (done.status, done.err.count("skipped")) == (1, 4)
    assert [sample["txt"] for sample in read_samples(run_wds("cat", *twice, "--rekey", "#").out)] == [
        f"text of {key}".encode() for key in KEYS[:3] * 2
    ]


@pytest.mark.parametrize(
    ("pattern", "key"), [("#", "000000000"), ("x{number}", "x0"), ("{shard}/{key}", f"shard-000000/{KEYS[0]}")]
)
def test_rekey_makes_keys_of_a_pattern(pattern: str, key: str, shards: list[str]) -> None:
    """From the number, the key and the shard's name."""
    assert keys_of(run_wds("cat", shards[0], "--rekey", pattern))[0] == key


@pytest.mark.parametrize("pattern", ["", "x", "{shard}", "{other}", "{}", "{key.real}", "{number:q}", "{"])
def test_rekey_is_refused_when_keys_would_be_one_or_none(pattern: str, shards: list[str]) -> None:
    """Nothing is read."""
    done = run_wds("cat", shards[0], "--rekey", pattern)
    assert (done.status, done.out) == (2, b"")


# -------------------------------------------------------------------------------------------------------------- --part
@pytest.mark.parametrize("total", [1, 2, 3, 5, 7, 100])
def test_parts_have_every_shard_once_in_order(total: int) -> None:
    """Whatever their number: the parts one after the other are the list, and their lengths differ by one at most."""
    urls = [f"{number}.tar" for number in range(7)]
    parts = [part_of(urls, Part(number, total)) for number in range(total)]
    assert [url for part in parts for url in part] == urls
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_part_is_taken_of_all_listed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of patterns and lists together, in every command that reads many shards."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (1, 1, 1, 1, 1))
    (tmp_path / "list.txt").write_text("shard-00000[34].tar\n")
    shards = ("shard-{000000..000002}.tar", "@list.txt", "--part")
    kept = [
        [sample["__key__"] for part in range(3) for sample in read_samples(run_wds(*command, *shards, f"{part}/3").out)]
        for command in (("cat",), ("sort",), ("proc", "-c", "true"))
    ]
    assert kept == [[f"s{number}-00000" for number in range(5)]] * 3
    listed = [
        json.loads(line)["__key__"]
        for part in range(3)
        for line in run_wds("json", *shards, f"{part}/3").out.splitlines()
    ]
    assert listed == kept[0]


def test_part_has_success_when_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than shards are no failure: an archive without samples, or nothing to do."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (1, 1))
    (tmp_path / "part_functions.py").write_text("def touch(source, target):\n    open(target, 'w').close()\n")
    for command in (
        ("cat", "shard-*.tar", "-o", "cat.tar"),
        ("sort", "shard-*.tar", "-o", "sort.tar"),
        ("proc", "-c", "true", "shard-*.tar", "-o", "proc.tar"),
        ("proc", "-c", "true", "shard-*.tar", "-o", "out/"),
        ("map", "part_functions:touch", "shard-*.tar", "-o", "out/"),
        ("validate", "shard-*.tar"),
        ("validate", "shard-*.tar", "--fix", "out/"),
        ("index", "shard-*.tar"),
        ("split", "shard-*.tar", "-o", "split"),
        ("ls", "shard-*.tar"),
        ("json", "shard-*.tar"),
        ("tsv", "-f", "cls", "shard-*.tar"),
    ):
        done = run_wds(*command, "--part", "0/3")
        assert done.status == 0, (command, done.err)
        assert "part 0/3 has none of 2 shards: nothing to do" in done.err
    assert sorted(path.name for path in tmp_path.glob("*.tar") if "shard" not in path.name) == [
        "cat.tar",
        "proc.tar",
        "sort.tar",
    ]
    assert read_samples(tmp_path / "cat.tar") == []


def test_parts_of_repaired_shards_have_numbers_among_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``proc`` and ``map``."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (1, 1, 1))
    assert run_wds("validate", "shard-*.tar", "--fix", "fixed-{shard}.tar", "--part", "1/2").status == 0
    assert sorted(path.name for path in tmp_path.glob("fixed-*")) == ["fixed-1.tar", "fixed-2.tar"]


def test_parts_number_outputs_among_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two parts never write one file, and what one has made is skipped by a later run of all."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (1, 1, 1, 1, 1))
    command = ("proc", "-c", "true", "shard-*.tar", "-o", "out-{shard}.tar")
    for number in range(3):
        assert run_wds(*command, "--part", f"{number}/3").status == 0
        assert len(list(tmp_path.glob("out-*.tar"))) == (1, 3, 5)[number]
    assert [read_samples(f"out-{number}.tar")[0]["__key__"] for number in range(5)] == text_keys((1, 1, 1, 1, 1))
    assert run_wds(*command).err.endswith("wds: 0 done, 0 failed, 5 skipped\n")


@pytest.mark.parametrize(
    "text", ["", "3", "/", "1/", "/2", "a/b", "0/0", "2/2", "3/2", "-1/2", "0/-1", "0.5/2", "0/2/4"]
)
def test_part_number_refuses_what_is_not_one_of_n(text: str) -> None:
    """The error says what is right."""
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected I/N.*such as 0/8|numbered from 0"):
        part_number(text)


def test_part_number_counts_from_zero() -> None:
    """As SLURM_ARRAY_TASK_ID of --array=0-7."""
    assert (part_number("0/8"), part_number("007/8")) == (Part(0, 8), Part(7, 8))


@pytest.mark.parametrize("command", [("cat", "--part", "0/2"), ("index", "x.tar", "--wids", "x.json", "--part", "0/2")])
def test_part_is_refused_where_it_would_lose_shards(command: tuple[str, ...]) -> None:
    """Of standard input there is only one, and a list of all shards has all."""
    done = run_wds(*command)
    assert done.status == 2
    assert "--part" in done.err


@pytest.mark.parametrize(
    "command",
    [
        ("cat", "x.tar", "-o"),
        ("sort", "x.tar", "-o"),
        ("create", "x", "-o"),
        ("show", "x.tar", "-o"),
        ("first", "x.tar", "-o"),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("output", ["{name}.png", "out-{shard:06d}.tar", "{}.html", "s3://b/{key}.png"])
def test_one_output_has_no_braces_to_fill_in(
    command: tuple[str, ...], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that very name would surprise; the error names the commands that write several."""
    monkeypatch.chdir(tmp_path)
    done = run_wds(*command, output)
    assert done.status == 2
    assert "is not filled in: this command writes one file. 'wds proc'" in done.err
    assert list(tmp_path.iterdir()) == []
