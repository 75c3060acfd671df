"""For tests of ``wds map``: shards, a module with functions, and what one failure costs."""

import os
from pathlib import Path

from tests.kits.shards import text_keys
from tests.kits.tool_kit import read_samples, run_wds

__all__ = ["FUNCTIONS", "MODULE", "SIBLING", "SIZES", "check_that_one_failure_costs_one_output", "names", "outputs"]

SIZES = (3, 1, 4, 1, 5, 2, 6, 2)
MODULE = "map_tool_functions"

SIBLING = """
def shouted(text):
    return text.upper()
"""

FUNCTIONS = """
import os, signal, time
from pathlib import Path

from map_tool_sibling import shouted
from torchdata_wds import TarWriter, WebDataset


def shout(source, target):
    with TarWriter(target) as writer:
        for sample in WebDataset(source, decoder=[]):
            writer.write({"__key__": sample["__key__"], "txt": shouted(sample["txt"])})
            if sample["__key__"].startswith("s5") and not Path(HERE, "repaired").exists():
                raise ValueError("no sample of this shard may be shouted")


def die(source, target):
    if "000002" in source and not Path(HERE, "repaired").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    shout_all(source, target)


def shout_all(source, target):
    Path(target).write_text(source)


def wait(source, target):
    Path(target).write_text("half")
    Path(HERE, f"begun-{os.getpid()}").touch()
    time.sleep(1000)


def linger(source, target):
    Path(target).write_text("half")
    Path(HERE, f"begun-{Path(source).stem}").touch()
    while not Path(HERE, "killed").exists():
        time.sleep(0.05)
    shout_all(source, target)


def exclaim(sample):
    if sample["cls"] != b"1":
        for sign in "!?":
            key = f"{sample['__key__']}{sign}"
            yield {"__key__": key, "txt": shouted(sample["txt"].decode()) + sign, "json": {"key": key}}

"""


def outputs(folder: Path) -> list[str]:
    """Everything in a folder; "" for the one that is not there."""
    return sorted(os.listdir(folder)) if folder.exists() else [""]  # noqa: PTH208 - names


def names(*left_out: int, suffix: str = ".tar") -> list[str]:
    """The base names of all shards but some."""
    return [f"shard-{number:06d}{suffix}" for number in range(8) if number not in left_out]


def check_that_one_failure_costs_one_output(here: Path, *arguments: str) -> None:
    """Eight shards: seven outputs and a named error; the second run does only what is missing."""
    command = ("map", f"{MODULE}:shout", "shard-*.tar", "-o", "out/{name}.x.tar", *arguments)
    first = run_wds(*command)
    assert (first.status, first.out) == (1, b"")
    assert outputs(here / "out") == names(5, suffix=".x.tar")
    said = first.err.splitlines()
    assert said[-1] == "wds: 7 done, 1 failed, 0 skipped"
    assert [line for line in said if line.endswith("ValueError: no sample of this shard may be shouted")]
    (failed,) = (line for line in said if "failed: " in line)
    assert "shard-000005.tar failed: " in failed
    before = {path: path.stat() for path in (here / "out").iterdir()}

    (here / "repaired").touch()
    second = run_wds(*command)
    assert (second.status, second.out) == (0, b"")
    assert second.err.splitlines()[-2:] == [
        "wds: skipped: 7 outputs exist already (--force replaces them)",
        "wds: 1 done, 0 failed, 7 skipped",
    ]
    assert outputs(here / "out") == names(suffix=".x.tar")
    assert {path: path.stat() for path in before} == before
    samples = [sample for name in names(suffix=".x.tar") for sample in read_samples(here / "out" / name)]
    assert samples == [{"__key__": key, "txt": f"TEXT OF {key.upper()}".encode()} for key in text_keys(SIZES)]
