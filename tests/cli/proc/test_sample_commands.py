"""Commands over samples: what they leave is the new sample, and nothing of them is left over."""

import itertools
import os
import shlex
import shutil
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.processes import children, is_alive, open_files, wait_until
from torchdata_wds.cli.proc import sample_commands
from torchdata_wds.cli.proc.sample_commands import CommandResult, SampleCommand
from torchdata_wds.errors import SampleError


def samples(count: int) -> Iterator[dict[str, Any]]:
    """Samples with their numbers as key and text."""
    for number in range(count):
        yield {"__key__": str(number), "__url__": "x.tar", "txt": b"%d" % number}


def prepared(command: str = "", script: str | None = None, folder: Path | None = None, **options: Any) -> SampleCommand:
    """A command as the program's arguments make it."""
    others = {"parallel": 1, "unordered": False, "timeout": None, "errors": "abort", "log_field": None, **options}
    return SampleCommand(Namespace(shell_command=command, script=script, tmpdir=folder, **others))


def run(command: str, count: int = 1, **options: Any) -> list[CommandResult]:
    """The results for so many samples."""
    return list(prepared(command, **options).run(samples(count)))


def only(command: str, **options: Any) -> CommandResult:
    """The result for one sample."""
    (result,) = run(command, **options)
    return result


def keys_of(result: CommandResult) -> list[str]:
    """The keys of what a command has made."""
    return [sample["__key__"] for sample in result.samples or ()]


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    """None that runs or waits to be reaped: once for all tests, since looking takes longer than most of them."""
    running = children(unreaped=True)
    yield
    assert children(unreaped=True) == running


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where samples have their folders: empty afterwards, with no thread or file left."""
    path = tmp_path / "temporary"
    path.mkdir()
    before, threads = open_files(collect=False), threading.active_count()
    yield path
    assert list(path.iterdir()) == []
    assert open_files(collect=False) <= before
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile


def test_command_makes_new_samples_of_samples(folder: Path) -> None:
    """In a folder of its own, in the order of the samples, as bash does it."""
    command = "set -- $(<sample.txt); echo -n ${1}x > sample.new; rm sample.txt; pwd; ls -A"
    results = run(command, 5, folder=folder)
    assert [result.samples for result in results] == [
        [{"__key__": str(number), "__url__": "x.tar", "new": b"%dx" % number}] for number in range(5)
    ]
    places, files = zip(*[result.output.decode().split("\n", 1) for result in results], strict=True)
    assert len(set(places)) == 5
    assert {Path(place).parent for place in places} == {folder}
    assert set(files) == {"sample.__key__\nsample.new\n"}


def test_results_come_in_the_order_of_the_samples(folder: Path, tmp_path: Path) -> None:
    """Though commands run at the same time: the first waits for the third."""
    go = tmp_path / "go"
    command = f"case $(cat sample.txt) in 0) until test -e {go}; do sleep 0.01; done;; 2) touch {go};; esac"
    results = run(command, 9, folder=folder, parallel=3, timeout=300)
    assert [keys_of(result) for result in results] == [[str(number)] for number in range(9)]


def test_results_come_as_they_are_ready_when_order_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """None waits for a slow one."""
    go = tmp_path / "go"
    command = f"test $(cat sample.txt) != 0 || until test -e {go}; do sleep 0.01; done"
    results = prepared(command, folder=folder, parallel=2, unordered=True, timeout=300).run(samples(20))
    keys = [keys_of(next(results)) for _ in range(10)]
    go.touch()
    keys += [keys_of(result) for result in results]
    assert ["0"] not in keys[:10]
    assert sorted(keys) == sorted([str(number)] for number in range(20))


def test_command_reads_a_bounded_number_of_samples_ahead(folder: Path) -> None:
    """A stream without end goes through."""
    taken = []

    def endless() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            taken.append(number)
            yield {"__key__": str(number), "txt": b""}

    results = prepared("true", folder=folder, parallel=2).run(endless())
    for _ in range(5):
        assert next(results).error is None
    results.close()
    assert len(taken) <= 5 + 8


def test_command_runs_a_script(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named from the working directory, though the command has another."""
    (tmp_path / "a b.sh").write_text("tr 0 x < sample.txt > sample.new")
    monkeypatch.chdir(tmp_path)
    (result,) = prepared(script="a b.sh", folder=folder).run(samples(1))
    assert result.samples is not None
    assert result.samples[0]["new"] == b"x"
    with pytest.raises(FileNotFoundError, match=r"no\.sh"):
        prepared(script="no.sh")


def test_command_runs_in_sh_where_there_is_no_bash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pipe:` commands do."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert only("echo $0", folder=folder).output == b"/bin/sh\n"


def test_command_has_nothing_to_read(folder: Path) -> None:
    """Its standard input is at its end, so that cat hangs nobody."""
    assert only("cat; echo end", folder=folder, timeout=300).output == b"end\n"


# ---------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "exit status 3"),
        ("false | cat", "exit status 1"),
        ("no-such-program-x", "command not found"),
        ("kill -KILL $$", "signal SIGKILL"),
        ("ln -s /etc/passwd sample.x", "symbolic link"),
        ('rm -r "$PWD"', "no longer has its folder"),
    ],
)
@pytest.mark.parametrize("ignore", [False, True])
def test_result_has_the_error_when_a_command_fails(command: str, said: str, ignore: bool, folder: Path) -> None:
    """With sample and shard, and what it had said; its files are taken only where that is asked for."""
    command = f"echo -n more >> sample.txt; echo said; {command}"
    result = only(command, folder=folder, errors="ignore" if ignore else "skip")
    assert isinstance(result.error, SampleError)
    assert said in str(result.error)
    assert (result.error.key, result.error.shard) == ("0", "x.tar")
    assert result.output.startswith(b"said\n")
    takes = ignore and "failed with" in str(result.error)
    assert result.samples == ([{"__key__": "0", "__url__": "x.tar", "txt": b"0more"}] if takes else None)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_command_succeeds_when_a_later_part_had_read_enough(folder: Path) -> None:
    """SIGPIPE in an earlier part of a pipeline is no failure."""
    assert only("yes | head -n 1 > sample.txt", folder=folder).error is None


def test_result_has_an_error_when_a_sample_cannot_be_a_folder(folder: Path) -> None:
    """The command does not run for it, and the others go on."""
    stream = [{"__key__": "a", "x" * 300: b""}, {"__key__": "b", "txt": b""}]
    first, second = prepared("echo ran", folder=folder).run(stream)
    assert (first.samples, first.output) == (None, b"")
    assert "cannot have its field" in str(first.error)
    assert second.error is None


@pytest.mark.parametrize("told", [True, False])
def test_output_is_bounded_when_a_command_writes_much(
    told: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is kept, in memory alone; also where the system does not tell that a process has ended."""
    if not told:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(sample_commands, "KEPT_OUTPUT", 1000)
    monkeypatch.setattr(sample_commands.tempfile, "TemporaryFile", lambda: pytest.fail("it is written to a file"))
    result = only("yes | head -c 1000000", folder=folder)
    assert result.error is None
    note, *lines = result.output.splitlines(keepends=True)
    assert note.endswith(b" bytes before this are left out]\n")
    assert b"".join(lines) in (b"y\n" * 500, b"\n" + b"y\n" * 499 + b"y")


@pytest.mark.parametrize("told", [True, False])
def test_result_does_not_wait_for_a_process_that_has_got_away(
    told: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon holds the output open and writes to it, and to the sample's file."""
    if not told:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    pid = tmp_path / "pid"
    loop = f"echo $$ > {pid}; trap '' PIPE; while :; do echo more; echo more >> sample.txt; done"
    command = f"echo said; setsid bash -c {shlex.quote(loop)} & until test -s {pid}; do sleep 0.01; done"
    try:
        result = only(command, folder=folder, timeout=300)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert result.error is None
    assert result.output.startswith(b"said\n")
    assert result.samples is not None
    assert result.samples[0]["txt"].startswith(b"0")


def test_command_goes_on_when_a_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a process that has got away writes on: the folder is named, and no sample lost."""
    monkeypatch.setattr(sample_commands.tempfile.TemporaryDirectory, "cleanup", lambda made: made._finalizer.detach())
    results = run("true", 2, folder=tmp_path)
    assert [keys_of(result) for result in results] == [["0"], ["1"]]
    assert {record.args for record in caplog.records} == {(str(path),) for path in tmp_path.iterdir()}
    assert "cannot remove the folder " in caplog.text


@pytest.mark.parametrize("ending", ["wait", "true"])
def test_command_leaves_no_process_behind(
    ending: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it takes too long nor when it ends and has left something in the background."""
    pid = tmp_path / "pid"
    # Time stands still until the process is there, and then each look at the clock is later than all limits.
    late = itertools.count(1, 10**9)
    clock = SimpleNamespace(monotonic=lambda: next(late) if pid.is_file() and pid.read_text().strip() else 0.0)
    monkeypatch.setattr(sample_commands, "time", clock)
    timeout = 0.05 if ending == "wait" else None
    result = only(f"sleep 1000 & echo $! > {pid}; {ending}", folder=folder, timeout=timeout)
    if ending == "wait":
        assert "took longer than 0.05 s and was killed" in str(result.error)
        assert result.samples is None
    else:
        assert result.error is None
    assert wait_until(lambda: not is_alive(int(pid.read_text())))


def test_commands_are_killed_when_nobody_wants_their_results(folder: Path, tmp_path: Path) -> None:
    """As after Ctrl-C, or when the output's reader has gone: closing ends them all at once."""
    run_on = f"echo $$ > {tmp_path}/$k; sleep 1000"
    command = f"k=$(cat sample.txt); test $k = 0 || {{ {run_on}; }}; until test -s {tmp_path}/2; do sleep 0.01; done"
    results = prepared(command, folder=folder, parallel=3).run(samples(20))
    assert next(results).error is None
    pids = [tmp_path / name for name in ("1", "2")]
    assert wait_until(lambda: all(pid.is_file() and pid.read_text().strip() for pid in pids))
    results.close()
    assert not [pid for pid in pids if is_alive(int(pid.read_text()))]


def test_commands_are_killed_when_the_samples_fail(folder: Path) -> None:
    """A damaged shard is the error that is raised."""

    def failing() -> Iterator[dict[str, Any]]:
        yield from samples(2)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        list(prepared("sleep 1000", folder=folder, parallel=2).run(failing()))


def test_command_raises_when_it_cannot_be_started(folder: Path) -> None:
    """That is no fault of a sample."""
    with pytest.raises(OSError, match="the command cannot be started: Argument list too long"):
        only("x" * (1 << 22), folder=folder)
    with pytest.raises(OSError, match="the command cannot be started: embedded null byte"):
        only("a\0b", folder=folder)


def test_command_raises_when_there_is_no_folder(tmp_path: Path) -> None:
    """The place for temporary files is named."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        only("true", folder=tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------------------ options
def test_log_field_has_what_the_command_said(folder: Path) -> None:
    """Standard output and error as they came, in each new sample."""
    command = "echo out; echo error >&2; mkdir 1; mv sample.txt 1"
    (sample,) = only(command, folder=folder, log_field="log").samples or ()
    assert sample == {"__key__": "0/1", "__url__": "x.tar", "txt": b"0", "log": b"out\nerror\n"}
    assert only(f"{command}; false", folder=folder, log_field="log", errors="ignore").samples == [sample]


def test_log_field_has_the_end_of_a_long_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bounded, and says so."""
    monkeypatch.setattr(sample_commands, "KEPT_OUTPUT", 10)
    result = only("echo 0123456789abcdef", folder=folder, log_field="log")
    assert result.output == b"[7 bytes before this are left out]\n789abcdef\n"
    assert result.samples is not None
    assert result.samples[0]["log"] == result.output


def test_log_field_replaces_no_file_of_the_command(folder: Path) -> None:
    """Two things cannot have one name."""
    result = only("touch sample.log", folder=folder, log_field="log")
    assert result.samples is None
    assert "has left a file for the field 'log', where its output goes" in str(result.error)


def test_result_names_files_that_belong_to_no_sample() -> None:
    """The first few, with sample and shard; what does belong to one is taken all the same."""
    result = only("mkdir -p a/b; touch a/b/0 .hidden other; mv sample.txt sample-1.txt")
    assert result.samples == [{"__key__": "0/1", "__url__": "x.tar", "txt": b"0"}]
    assert (result.unused is not None, result.error) == (True, None)
    assert str(result.unused).startswith(
        "the command for sample '0' of shard x.tar left 3 files that belong to no sample: '.hidden', 'other', 'a/b/0'. "
    )
    many = only("touch $(seq 1000); ln -s x l", log_field="log").unused
    assert "left 1,001 files that belong to no sample: '1', '10', '100', '1000', '101', ..." in str(many)
    assert only("mkdir -p a/b; touch sample.a~", log_field="log").unused is None
