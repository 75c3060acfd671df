"""``wds proc``: every sample goes through the command, and none is lost without a word."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.kits.forked_program import ForkedProgram
from tests.kits.processes import is_alive, wait_until
from tests.kits.shards import sample_members, text_keys, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds
from torchdata_wds.cli.proc import pass_on
from torchdata_wds.format.index.sidecars import index_url

PROGRAM = (sys.executable, "-m", "torchdata_wds", "proc")


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder for samples' folders, which is empty in the end."""
    path = tmp_path / "temporary"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Two shards of text samples."""
    return write_text_shards(tmp_path, (3, 4))


def keys_in(path: Path | bytes) -> list[str]:
    """The keys of an archive in order."""
    return [sample["__key__"] for sample in read_samples(path)]


def test_proc_writes_what_commands_leave(shards: list[str], tmp_path: Path, temporary: Path) -> None:
    """Of all shards, in order, several at a time: fields vanish, appear and change."""
    output = tmp_path / "out.tar"
    command = "rm sample.json; echo -n $(cat sample.cls) twice >> sample.cls; cp sample.__key__ sample.key"
    assert run_wds("proc", "-p", 3, "-c", command, "--tmpdir", temporary, *shards, "-o", output) == (0, b"", "")
    assert read_samples(output) == [
        {"__key__": key, "cls": b"%d%d twice" % (number, number), "key": key.encode(), "txt": f"text of {key}".encode()}
        for key in text_keys((3, 4))
        for number in [int(key[-1])]
    ]


def test_proc_keeps_standard_output_clean_when_commands_talk(shards: list[str]) -> None:
    """The archive goes there alone; what commands say goes to standard error, each in one piece."""
    stdin = Path(shards[1]).read_bytes()
    result = run_wds("proc", "-p", 4, "-c", "echo out; echo error >&2; echo '\xff'; env printf '\\377\\n'", stdin=stdin)
    assert (result.status, result.err) == (0, "out\nerror\n\xff\n\\xff\n" * 4)
    assert read_samples(result.out) == read_samples(shards[1])


def test_proc_goes_on_when_nobody_reads_what_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``2>&1 | head``: the samples are none the less wanted."""
    broken = mock.Mock(flush=mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stderr", broken)
    pass_on(b"said\n")
    broken.write.assert_called_once_with("said\n")


def test_proc_runs_a_script(shards: list[str], tmp_path: Path) -> None:
    """With the options for input and output that all commands have."""
    (tmp_path / "x.sh").write_text("mv sample.txt sample.text\n")
    arguments = ("--slice", "2:6:2", "--rekey", "#", "--unordered", "--compress", "gz")
    result = run_wds("proc", "-s", tmp_path / "x.sh", *shards, *arguments)
    assert result.status == 0
    assert result.out.startswith(b"\x1f\x8b")
    (tmp_path / "x.tar.gz").write_bytes(result.out)
    samples = read_samples(tmp_path / "x.tar.gz")
    assert sorted(sample["text"] for sample in samples) == [b"text of s0-00002", b"text of s1-00001"]
    assert [sample["__key__"] for sample in samples] == ["000000000", "000000001"]


@pytest.mark.parametrize("left", ["a/b/x.txt", "sample-1.__key__"])
def test_proc_never_loses_a_file_silently(left: str, shards: list[str], tmp_path: Path) -> None:
    """By default nothing is written; else all samples are, and the exit status is 1."""
    command = f"mkdir -p a/b; test $(cat sample.cls) != 1 || echo data > {left}"
    strict = run_wds("proc", "-c", command, shards[0], "-o", tmp_path / "abort.tar")
    assert strict.status == 1
    assert (
        f"the command for sample 's0-00001' of shard {shards[0]} left 1 file that belongs to no sample: " in strict.err
    )
    assert repr(left) in strict.err
    assert not (tmp_path / "abort.tar").exists()
    for policy in ("skip", "ignore"):
        output = tmp_path / f"{policy}.tar"
        done = run_wds("proc", "-c", command, "--errors", policy, *shards, "-o", output)
        assert done.status == 1
        assert keys_in(output) == text_keys((3, 4))
        assert done.err.count(repr(left)) == 2
        assert done.err.endswith("wds: lost: files that 2 commands left (see above)\n")


def test_proc_writes_an_output_for_each_shard_when_its_name_says_so(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, or by name or number; keys and order are those of each shard, and indexes go along."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (2, 0, 3))
    shards = "shard-{000000..000002}.tar"
    for output, names in {
        "out/": [f"out/shard-00000{number}.tar" for number in range(3)],
        "{name}-x.tar.gz": [f"shard-00000{number}-x.tar.gz" for number in range(3)],
        "y/{shard:02d}.tar": [f"y/{number:02d}.tar" for number in range(3)],
    }.items():
        command = ("proc", "-p", 2, "-c", "rm sample.json", "--tmpdir", temporary, shards, "-o", output, "--index")
        assert run_wds(*command) == (0, b"", "wds: 3 done, 0 failed, 0 skipped\n")
        assert [keys_in(Path(name)) for name in names] == [
            [f"s{number}-{place:05d}" for place in range(count)] for number, count in enumerate((2, 0, 3))
        ]
        assert all(Path(index_url(name)).exists() for name in names)
    assert not list(tmp_path.rglob(".wds-map*"))


def test_proc_goes_on_where_it_was_when_outputs_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``wds map`` does: what is there is whole and stays; a shard that fails is named and not written."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (2, 2, 2))
    command = ("proc", "-c", "echo ran >> ../ran; test ! -e ../stop -o $(cat sample.__key__) != s1-00001")
    command += ("--tmpdir", ".", "shard-*.tar", "-o", "out-{name}.tar")
    (tmp_path / "stop").touch()
    (tmp_path / "out-shard-000002.tar").write_text("mine")
    first = run_wds(*command)
    assert first.status == 1
    assert "skipped: 1 output exists already" in first.err
    assert (
        "wds: shard shard-000001.tar failed: the command for sample 's1-00001' of shard shard-000001.tar" in first.err
    )
    assert first.err.endswith("wds: 1 done, 1 failed, 1 skipped\n")
    assert not (tmp_path / "out-shard-000001.tar").exists()
    (tmp_path / "stop").unlink()
    (tmp_path / "ran").unlink()
    second = run_wds(*command)
    assert (second.status, (tmp_path / "ran").read_text().count("ran")) == (0, 2)
    assert second.err.endswith("wds: 1 done, 0 failed, 2 skipped\n")
    assert (tmp_path / "out-shard-000002.tar").read_text() == "mine"
    assert run_wds(*command, "--force").status == 0
    assert keys_in(tmp_path / "out-shard-000002.tar") == ["s2-00000", "s2-00001"]


def test_proc_reports_losses_of_all_shards_once(shards: list[str], tmp_path: Path) -> None:
    """With an output for each too: the counts are those of all, and the exit status is 1."""
    command = "touch other; test $(cat sample.cls) != 1"
    done = run_wds("proc", "-c", command, "--errors", "skip", *shards, "-o", f"{tmp_path}/out/")
    assert done.status == 1
    assert done.err.splitlines()[-3:] == [
        "wds: 2 done, 0 failed, 0 skipped",
        "wds: lost: files that 5 commands left (see above)",
        "wds: lost: 2 shards or samples were skipped (see above)",
    ]
    assert keys_in(tmp_path / "out" / "shard-000000.tar") == ["s0-00000", "s0-00002"]


@pytest.mark.parametrize(
    ("output", "said"),
    [("out-{key}.tar", "unknown place {key}: there are {name}"), ("{name}.tar", "would replace the input")],
)
def test_proc_refuses_outputs_that_it_cannot_name(
    output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is run."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (1,))
    done = run_wds("proc", "-c", "touch ../ran", "--tmpdir", ".", "shard-000000.tar", "shard-000000.tar", "-o", output)
    assert done.status == 1
    assert said in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]


@pytest.mark.parametrize("more", [("--slice", "0:2"), ("--rekey", "x")])
def test_proc_refuses_options_that_do_not_fit_several_outputs(
    more: tuple[str, str], shards: list[str], tmp_path: Path
) -> None:
    """As a whole, and not once a shard."""
    done = run_wds("proc", "-c", "true", *shards, "-o", f"{tmp_path}/out/", *more)
    assert done.status == 2
    assert done.err.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_proc_tells_how_many_samples_were_left_out(shards: list[str]) -> None:
    """A command that leaves nothing is a filter: nothing is lost."""
    result = run_wds("proc", "-c", "test $(cat sample.cls) != 1 || rm sample.*", *shards)
    assert keys_in(result.out) == [key for key in text_keys((3, 4)) if key[-1] != "1"]
    assert (result.status, result.err) == (0, "wds: left out 2 samples for which the command left no files\n")


def failing(policy: str, shards: list[str], output: Path, *more: object) -> Result:
    """A command that fails for the second sample of each shard."""
    command = "echo new > sample.new; rm sample.json; test $(cat sample.cls) != 1"
    return run_wds("proc", "-c", command, *policy.split(), *shards, "-o", output, *more)


@pytest.mark.parametrize("policy", ["", "--errors abort -p 3"])
def test_proc_writes_nothing_when_a_command_fails(
    policy: str, shards: list[str], tmp_path: Path, temporary: Path
) -> None:
    """The default: the error names sample and shard, and there is no output."""
    output = tmp_path / "out.tar"
    result = failing(policy, shards, output, "--tmpdir", temporary)
    error = f"the command for sample 's0-00001' of shard {shards[0]} failed with exit status 1"
    assert result == (1, b"", f"wds proc: error: {error}\n")
    assert not output.exists()


def test_proc_leaves_a_sample_out_when_its_command_fails_and_skip_is_asked_for(
    shards: list[str], tmp_path: Path
) -> None:
    """Each is told, with a count and exit status 1."""
    output = tmp_path / "out.tar"
    result = failing("--errors skip", shards, output)
    assert keys_in(output) == [key for key in text_keys((3, 4)) if key[-1] != "1"]
    assert result.status == 1
    told = result.err.splitlines()
    assert [line.partition(" failed")[0] for line in told[:2]] == [
        f"wds: skipped: the command for sample 's{number}-00001' of shard {shard}"
        for number, shard in enumerate(shards)
    ]
    assert told[2:] == ["wds: lost: 2 shards or samples were skipped (see above)"]


def test_proc_takes_what_is_there_when_a_command_fails_and_ignore_is_asked_for(
    shards: list[str], tmp_path: Path
) -> None:
    """Nothing is lost: exit status 0, and the failures are told."""
    output = tmp_path / "out.tar"
    result = failing("--errors ignore", shards, output, "--log-field", "log")
    samples = read_samples(output)
    assert [sample["__key__"] for sample in samples] == text_keys((3, 4))
    assert {frozenset(sample) for sample in samples} == {frozenset(("__key__", "cls", "txt", "new", "log"))}
    assert result.status == 0
    assert result.err.count("wds: ignored: the command for sample ") == 2
    assert result.err.endswith("wds: ignored: 2 commands failed (see above)\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo a.b > sample.__key__", "key 'a.b' cannot be written"),
        ("echo ../a > sample.__key__", "which leads out of the folder"),
        ("echo same > sample.__key__", "--rekey"),
        ("touch sample.UPPER", "it is read as 'upper', in lower case"),
        ("ln -s /etc/passwd sample.x", "symbolic link"),
        ("mkdir a.b; cp sample.* a.b; rm a.b/sample.__key__", "key 's0-00000/a.b' cannot be written"),
    ],
)
def test_proc_refuses_what_cannot_be_read_back(command: str, said: str, shards: list[str], tmp_path: Path) -> None:
    """It is lost under every policy, and so it is always told, and the exit status is 1."""
    for policy in ("abort", "skip", "ignore") if "a.b" in command else ("ignore",):
        output = tmp_path / f"{policy}.tar"
        result = run_wds("proc", "-c", command, "--errors", policy, shards[0], "-o", output, "--slice", ":2")
        assert result.status == 1
        assert said in result.err
        assert output.exists() is (policy != "abort")


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_proc_goes_on_behind_a_damaged_shard_when_asked(policy: str, tmp_path: Path, shards: list[str]) -> None:
    """What was whole of it is done; the loss is told."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shards[0]).read_bytes()[:4000])
    result = run_wds("proc", "-c", "true", "--errors", policy, cut, shards[1])
    assert keys_in(result.out) == ["s0-00000", *text_keys((0, 4))]
    assert result.status == 1
    assert "is cut off" in result.err
    assert run_wds("proc", "-c", "true", cut, shards[1]).status == 1


def test_proc_kills_what_takes_too_long(shards: list[str], temporary: Path) -> None:
    """It is a failure like any other."""
    arguments = ("--timeout", "0.2", "--errors", "skip", "--tmpdir", temporary, "--slice", "0:2")
    result = run_wds("proc", "-p", 2, "-c", "sleep 1000 & wait", *arguments, *shards)
    assert result.status == 1
    assert read_samples(result.out) == []
    assert result.err.count("took longer than 0.2 s and was killed with everything it had started") == 2


def test_proc_keeps_case_when_asked(tmp_path: Path) -> None:
    """Fields in upper case are files in upper case."""
    path = write_tar(tmp_path / "x.tar", sample_members("a", JPG=b"1"))
    result = run_wds("proc", "-c", "cp sample.JPG sample.Other", "--keep-case", path)
    assert read_samples(result.out) == [{"__key__": "a", "JPG": b"1", "Other": b"1"}]


def test_proc_treats_keys_and_fields_as_data(tmp_path: Path, temporary: Path) -> None:
    """Nothing in a name is run or leads out of the folder."""
    odd = "$(touch x); 'a' \"b\" -rf/..."[:-4]
    path = write_tar(tmp_path / "x.tar", [(f"{odd}/1.$(touch y) `id`;", b"data")])
    result = run_wds("proc", "-c", "cat sample.__key__; ls", "--tmpdir", temporary, path)
    assert read_samples(result.out) == [{"__key__": f"{odd}/1", "$(touch y) `id`;": b"data"}]
    assert result.err.startswith(f"{odd}/1")
    assert not list(tmp_path.rglob("[xy]"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["x.tar"],
        ["-c", "true", "-s", "x.sh", "x.tar"],
        ["-c", " ", "x.tar"],
        ["-c", "true", "-p", "0", "x.tar"],
        ["-c", "true", "--timeout", "0", "x.tar"],
        ["-c", "true", "--timeout", "soon", "x.tar"],
        ["-c", "true", "--timeout", "nan", "x.tar"],
        ["-c", "true", "--errors", "stop", "x.tar"],
        ["-c", "true", "--log-field", "a/b", "x.tar"],
        ["-c", "true", "--log-field", "", "x.tar"],
        ["-c", "true", "--log-field", "__log__", "x.tar"],
        ["-c", "true", "--rekey", "same", "x.tar"],
    ],
)
def test_proc_exits_with_2_when_arguments_are_wrong(arguments: list[str]) -> None:
    """Nothing is read or written."""
    result = run_wds("proc", *arguments)
    assert (result.status, result.out) == (2, b"")
    assert "error: " in result.err


def test_proc_is_refused_under_secure(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is opened."""
    monkeypatch.setenv("WDS_SECURE", "1")
    for command in (("-c", "true"), ("-s", os.devnull)):
        result = run_wds("proc", *command, *shards, "-o", tmp_path / "out.tar")
        assert result == (1, b"", "wds proc: error: a command would run for each sample, which WDS_SECURE=1 forbids\n")
    assert not (tmp_path / "out.tar").exists()


def test_proc_replaces_no_file_unless_forced(shards: list[str]) -> None:
    """Its own input neither."""
    before = Path(shards[0]).read_bytes()
    result = run_wds("proc", "-c", "true", shards[1], "-o", shards[0])
    assert result.status == 1
    assert "--force" in result.err
    assert Path(shards[0]).read_bytes() == before
    assert run_wds("proc", "-c", "true", shards[1], "-o", shards[0], "--force").status == 0
    assert keys_in(Path(shards[0])) == text_keys((0, 4))


# ------------------------------------------------------------------------------------------------ the whole program
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_proc_kills_its_commands_when_interrupted(
    number: signal.Signals, status: int, shards: list[str], tmp_path: Path, temporary: Path
) -> None:
    """Ctrl-C and kill: no words, no process, folder or output left."""
    command = f"cp sample.txt {tmp_path}/txt; echo $$ > {tmp_path}/pid; sleep 1000; true"
    program = ForkedProgram("proc", "-c", command, "--tmpdir", temporary, *shards, "-o", tmp_path / "out.tar")
    pid = tmp_path / "pid"
    assert wait_until(lambda: pid.is_file() and pid.read_text().strip() != "")
    os.kill(program.pid, number)
    assert program.wait() == (status, b"")
    assert not is_alive(int(pid.read_text()))
    assert (tmp_path / "txt").read_text() == "text of s0-00000"
    assert not (tmp_path / "out.tar").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_proc_goes_on_behind_the_last_whole_output_when_it_was_ended(
    number: signal.Signals, shards: list[str], tmp_path: Path, temporary: Path
) -> None:
    """Of the shard that it was at there is nothing under its name, and the next run makes that one only."""
    at, out = tmp_path / "at", tmp_path / "out"
    command = f"case $(cat sample.__key__) in s1-00002) test -e {at} || {{ touch {at}; sleep 1000; }};; esac"
    options = ("-c", command, "--tmpdir", str(temporary), *shards, "-o", f"{out}/")
    program = ForkedProgram("proc", *options)
    assert wait_until(at.exists)
    os.kill(program.pid, number)
    assert program.wait()[0] == (130 if number == signal.SIGINT else -number)
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["shard-000000.tar"]
    assert number == signal.SIGKILL or len(list(out.iterdir())) == 1
    for left in temporary.iterdir():
        shutil.rmtree(left)  # of what was killed
    done = run_wds("proc", *options)
    assert (done.status, done.err.splitlines()[-1]) == (0, "wds: 1 done, 0 failed, 1 skipped")
    assert [keys_in(out / f"shard-00000{number}.tar") for number in range(2)] == [text_keys((3, 0)), text_keys((0, 4))]


@pytest.mark.slow
def test_proc_ends_quietly_when_nobody_reads_on(tmp_path: Path, temporary: Path) -> None:
    """A closed pipe: what runs is killed, and there is nothing to complain about."""
    (shard,) = write_text_shards(tmp_path, (2000,))
    pids = tmp_path / "pids"
    command = f"head -c 100000 /dev/zero > sample.zero; echo $$ >> {pids}"
    process = subprocess.Popen(
        [*PROGRAM, "-p", "2", "-c", command, "--tmpdir", str(temporary), shard],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(200_000)) == 200_000
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(300) == 0
    assert len(pids.read_text().split()) < 2000
    assert not [pid for pid in pids.read_text().split() if is_alive(int(pid))]
