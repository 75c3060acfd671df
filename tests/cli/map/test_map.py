"""``wds map``: a function over shards, where one that fails costs its own output only."""

import os
import signal
from pathlib import Path

import pytest

from tests.kits.forked_program import ForkedProgram
from tests.kits.map_kit import MODULE, check_that_one_failure_costs_one_output, names, outputs
from tests.kits.processes import is_alive, wait_until
from tests.kits.shards import text_keys
from tests.kits.tool_kit import read_samples, run_wds

# ------------------------------------------------------------------------------------------------ one shard that fails


@pytest.mark.parametrize("workers", [0, 2])
def test_map_does_the_other_shards_when_one_fails(workers: int, here: Path) -> None:
    """In this process and in others."""
    check_that_one_failure_costs_one_output(here, "--workers", str(workers))


def test_map_does_the_other_shards_when_a_worker_dies(here: Path) -> None:
    """As where the system has no more memory."""
    result = run_wds("map", f"{MODULE}:die", "shard-*.tar", "-o", "out/", "--workers", 2)
    assert result.status == 1
    assert "wds: shard shard-000002.tar failed: its worker process ended with signal SIGKILL" in result.err
    assert result.err.endswith("wds: 7 done, 1 failed, 0 skipped\n")
    assert outputs(here / "out") == names(2)


# ---------------------------------------------------------------------------------------------------------- in and out
def test_map_makes_outputs_anew_when_forced(here: Path) -> None:
    """Otherwise what exists is left as it is."""
    (here / "out").mkdir()
    old = here / "out" / "shard-000003.tar"
    old.write_text("old")
    command = ("map", f"{MODULE}:shout_all", "shard-*.tar", "-o", "out", "--workers", 0)
    assert run_wds(*command).err.endswith("wds: 7 done, 0 failed, 1 skipped\n")
    assert old.read_text() == "old"
    assert run_wds(*command, "--force").err == "wds: 8 done, 0 failed, 0 skipped\n"
    assert old.read_text() == "shard-000003.tar"


@pytest.mark.parametrize("workers", [0, 1])
def test_map_calls_the_function_for_each_sample_when_asked(workers: int, here: Path) -> None:
    """It may give none or several; what it gives is encoded."""
    command = ("map", "--per-sample", f"{MODULE}:exclaim", "shard-00000[02].tar", "-o", "out/")
    assert run_wds(*command, "--workers", workers) == (0, b"", "wds: 2 done, 0 failed, 0 skipped\n")
    assert [sample for name in outputs(here / "out") for sample in read_samples(here / "out" / name)] == [
        {
            "__key__": f"{key}{sign}",
            "txt": f"TEXT OF {key.upper()}{sign}".encode(),
            "json": f'{{"key":"{key}{sign}"}}'.encode(),
        }
        for key in [*text_keys((3,)), *(f"s2-{number:05d}" for number in range(4))]
        if key[-1] != "1"
        for sign in "!?"
    ]


def test_map_writes_to_stores(here: Path) -> None:
    """What is there already is asked of the store."""
    command = (
        "map",
        "--per-sample",
        f"{MODULE}:exclaim",
        "shard-00000[02].tar",
        "-o",
        "memory://map-tool/",
        "--workers",
        0,
    )
    assert run_wds(*command).err == "wds: 2 done, 0 failed, 0 skipped\n"
    assert run_wds(*command).err.endswith("wds: 0 done, 0 failed, 2 skipped\n")


def test_map_numbers_outputs_and_reads_lists(here: Path) -> None:
    """In the order of the inputs."""
    (here / "list.txt").write_text("shard-{000002..000003}.tar\n")
    command = ("map", f"{MODULE}:shout_all", "shard-000007.tar", "@list.txt", "-o", "out/x-{shard:02d}.tar")
    assert run_wds(*command, "--workers", 0).status == 0
    found = {path.name: path.read_text() for path in (here / "out").iterdir()}
    assert found == {"x-00.tar": "shard-000007.tar", "x-01.tar": "shard-000002.tar", "x-02.tar": "shard-000003.tar"}


def test_map_takes_commands_from_a_list_only_when_allowed(here: Path) -> None:
    """A list may be a stranger's."""
    (here / "list.txt").write_text("pipe:cat shard-000007.tar\n")
    command = ("map", f"{MODULE}:shout", "@list.txt", "-o", "{shard}.tar", "--workers", 0)
    refused = run_wds(*command)
    assert refused.status == 1
    assert "--allow-pipe" in refused.err
    assert run_wds(*command, "--allow-pipe") == (0, b"", "wds: 1 done, 0 failed, 0 skipped\n")
    assert [sample["__key__"] for sample in read_samples(here / "0.tar")] == ["s7-00000", "s7-00001"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"{MODULE}:shout", "shard-*.tar", "-o", "."], "would replace the input"),
        ([f"{MODULE}:shout", "no-*.tar", "-o", "out/"], "no shard matches"),
        ([f"{MODULE}:shout", "shard-*.tar", "-o", "https://host/x/"], "read only"),
        ([f"{MODULE}:no", "shard-*.tar", "-o", "out/"], "has no function 'no'"),
    ],
)
def test_map_refuses_before_it_begins(arguments: list[str], said: str, here: Path) -> None:
    """Nothing is made."""
    before = outputs(here)
    result = run_wds("map", *arguments)
    assert (result.status, result.out) == (1, b"")
    assert said in result.err
    assert [name for name in outputs(here) if name != "__pycache__"] == before


@pytest.mark.parametrize(
    "arguments",
    [
        [f"{MODULE}:shout"],
        [f"{MODULE}:shout", "shard-*.tar"],
        [f"{MODULE}.py", "shard-*.tar", "-o", "out/"],
        ["a/b.py:f", "shard-*.tar", "-o", "out/"],
        [f"{MODULE}:", "shard-*.tar", "-o", "out/"],
        [f"{MODULE}:shout()", "shard-*.tar", "-o", "out/"],
        [f"{MODULE}:shout", "-", "-o", "out/"],
        [f"{MODULE}:shout", "shard-*.tar", "-o", "out/", "--workers", "-1"],
    ],
)
def test_map_exits_with_2_when_arguments_are_wrong(arguments: list[str], here: Path) -> None:
    """With a word on what is right."""
    result = run_wds("map", *arguments)
    assert (result.status, result.out) == (2, b"")
    assert "error: " in result.err


def test_map_masks_secrets(here: Path) -> None:
    """A signed URL is shown without its signature, also in the traceback."""
    url = "https://localhost:1/x.tar?token=abcdef"
    (here / f"{MODULE}.py").write_text("def f(source, target):\n    raise ValueError(source)\n")
    result = run_wds("map", f"{MODULE}:f", url, "-o", "out/", "--workers", 0)
    assert result.status == 1
    assert "token=***" in result.err
    assert "abcdef" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_map_ends_its_workers_when_interrupted(number: signal.Signals, status: int, here: Path) -> None:
    """Ctrl-C and kill, which the workers do not see: no words, no process and nothing half left."""
    program = ForkedProgram("map", f"{MODULE}:wait", "shard-*.tar", "-o", "out/", "--workers", 2)
    assert wait_until(lambda: len(list(here.glob("begun-*"))) == 2)
    if number == signal.SIGINT:
        os.killpg(program.pid, number)
    else:
        os.kill(program.pid, number)
    assert program.wait() == (status, b"")
    assert not [path for path in here.glob("begun-*") if is_alive(int(path.name[6:]))]
    assert outputs(here / "out") == []
