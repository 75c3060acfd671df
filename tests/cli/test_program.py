"""The program as it is installed: the examples in its help, pipelines, and readers of its output that go away."""

import itertools
import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.kits.shards import text_keys, text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import read_samples, run_line, run_wds, write_example_folder
from torchdata_wds.cli.main import COMMANDS


def lines_of(name: str) -> list[str]:
    """The lines of a command's example."""
    return COMMANDS[name].example.splitlines()


def shell(line: str, folder: Path, *, timeout: float = 600) -> subprocess.CompletedProcess[bytes]:
    """Runs a line in bash, with the installed program on its path."""
    scripts = sysconfig.get_path("scripts")
    assert Path(scripts, "wds").exists(), "the tests need the program: pip install -e '.[test]'"
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_in_the_help_are_of_the_command_and_parse(name: str) -> None:
    """Each line calls the program; comments and prompts would not run."""
    assert all(line.startswith("wds ") for line in lines_of(name))
    assert all(shlex.split(line) for line in lines_of(name))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"bench", "demo"}))
def test_examples_in_the_help_run_in_this_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in a folder of shards; those that do not need a shell."""
    write_example_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    done = [(line, run_line(with_names(line))) for line in lines_of(name)]
    assert any(result is not None for _, result in done)
    for line, result in done:
        assert (result is None) is needs_shell(line)
        assert result is None or result.status == expected_status(line), result.err


def needs_shell(line: str) -> bool:
    """Whether an example is not run in this process: it starts workers, redirects, or pipes into another program."""
    words = shlex.split(line)
    others = [after for sign, after in itertools.pairwise(words) if sign == "|" and after != "wds"]
    return line.startswith(("wds bench", "wds demo")) or ">" in words or bool(others)


def with_names(line: str) -> str:
    """An example as a shell calls the program, with names of files for a glob that is not quoted."""
    return re.sub(r"(?<= )[\w-]+\*\.tar(?= |$)", lambda glob: " ".join(sorted(map(str, Path().glob(glob[0])))), line)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for name in sorted(COMMANDS) for line in filter(needs_shell, lines_of(name))])
def test_example_in_the_help_runs_as_installed_when_it_needs_a_shell(line: str, tmp_path: Path) -> None:
    """As a reader would try it; the others run in this process."""
    write_example_folder(tmp_path)
    done = shell(line, tmp_path)
    assert done.returncode == expected_status(line), done.stderr.decode()
    assert b"Traceback" not in done.stderr


def expected_status(line: str) -> int:
    """What an example ends with: 1 where it is about a damaged shard."""
    return int("damaged" in line)


def test_pipelines_keep_every_sample(tmp_path: Path) -> None:
    """Concatenating, sorting and splitting, each from the standard output of the one before."""
    urls = write_text_shards(tmp_path / "in", (7, 0, 12, 5))
    joined = run_wds("cat", f"{tmp_path}/in/shard-{{000000..000003}}.tar", "-o", "-")
    ordered = run_wds("sort", "-k", "cls", "--type", "int", "-", "-o", "-", stdin=joined.out)
    done = run_wds("split", "-n", "10", "-o", tmp_path / "out", stdin=ordered.out)
    assert (joined.status, ordered.status, done.status) == (0, 0, 0)
    shards = sorted(tmp_path.glob("out-*.tar"))
    assert [path.name for path in shards] == [f"out-00000{number}.tar" for number in range(3)]
    expected = sorted((sample for url in urls for sample in read_samples(url)), key=lambda sample: int(sample["cls"]))
    assert [sample for path in shards for sample in read_samples(path)] == expected


@pytest.mark.slow
def test_pipelines_keep_every_sample_when_run_by_a_shell(tmp_path: Path) -> None:
    """The whole of it, with ten shards and a thousand samples."""
    for number in range(10):
        write_tar(tmp_path / f"x-{number:02d}.tar", text_samples(f"s{number}-", 100))
    line = "wds cat 'x-{00..09}.tar' -o - | wds sort -k cls --type int - -o - | wds split -n 100 -o out"
    done = shell(line, tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    found = [read_samples(path) for path in sorted(tmp_path.glob("out-*.tar"))]
    assert [len(samples) for samples in found] == [100] * 10
    assert [{int(sample["cls"]) for sample in samples} for samples in found] == [{label} for label in range(10)]
    keys = sorted(sample["__key__"] for samples in found for sample in samples)
    assert keys == sorted(f"s{number}-{place:05d}" for number in range(10) for place in range(100))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "wds cat {urls} | head -c 1000 | wc -c",
        "wds tsv -f 'cls txt' {urls} | head -n 2 | wc -c",
        "wds cat {urls} | wds split -n 2 --max-shards 1 -o part",
        "wds cat {urls} -o closed.tar <&- 2>&-",
    ],
    ids=["cat", "tsv", "split", "closed"],
)
def test_output_that_nobody_reads_on_ends_the_program_quietly(line: str, tmp_path: Path) -> None:
    """With success, and without a word about the pipe."""
    # more than a pipe holds
    urls = write_text_shards(tmp_path / "in", (800, 800))
    done = shell(line.format(urls=" ".join(urls)), tmp_path)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b"roken" not in done.stderr
    if "closed" in line:
        assert len(read_samples(tmp_path / "closed.tar")) == 1600
    if "split" in line:
        assert [sample["__key__"] for sample in read_samples(tmp_path / "part-000000.tar")] == text_keys((2,))
