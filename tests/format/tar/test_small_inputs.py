"""A small input costs little, whatever it is: hundreds of random ones, whole, mutated and hostile."""

import subprocess
import sys
from pathlib import Path

import pytest

_CPU_SECONDS, _MEGABYTES = 10, 500
_EACH = 100


# Between them these have every kind of hostile shard and field.
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 200, 900])
def test_small_inputs_take_little_time_and_memory_and_raise_known_errors(first: int, tmp_path: Path) -> None:
    """Up to 1 MB of shards and fields, with limits that a careful reader of strangers' shards sets.

    The processor time of each is measured, not the time that passes: what else the machine does decides nothing.
    """
    command = [sys.executable, "-m", "tests.kits.small_inputs", str(tmp_path), str(first), str(first + _EACH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    lines = [line.split(" ", 4) for line in done.stdout.splitlines()]
    told = [line for line in lines if line[1] != "begun"]
    assert len(told) == _EACH, (done.returncode, lines[-1:], done.stderr[-2000:])
    bad = [
        line
        for line in told
        if float(line[2]) > _CPU_SECONDS or float(line[3]) > _MEGABYTES or line[4].startswith("FAULT")
    ]
    assert not bad, bad
    assert {line[4] for line in told} >= {"read", "DecodingError", "ShardFormatError"}
