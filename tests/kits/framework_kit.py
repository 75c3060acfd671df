"""The manual's examples for training frameworks as scripts, and the shards they read."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.kits.shards import jpeg_bytes, sample_members, write_tar
from tests.kits.workers_kit import ROOT
from torchdata_wds import index_shard

#: The samples of each shard: neither the shards nor the samples can be divided evenly.
SIZES = (30, 9, 41, 3, 25, 17, 12)


def example(framework: str) -> str:
    """The code in the manual's section on a framework, for the shards that `make_shards` writes."""
    page = (ROOT / "torchdata_wds/docs/frameworks.md").read_text()
    start, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    section = next(section for section in sections if section.startswith(f"{framework}\n"))
    blocks = re.findall(r"^```python\n(.*?)^```$", start + section, re.MULTILINE | re.DOTALL)
    return "\n\n".join(blocks).replace("000007", f"{len(SIZES) - 1:06d}")


def make_shards(folder: Path) -> None:
    """Writes shards of the names in the manual, with indexes; the labels are 0, 1, 2 and so on, over all shards."""
    label = 0
    for number, size in enumerate(SIZES):
        members = []
        for _ in range(size):
            members += sample_members(f"{label:06d}", jpg=jpeg_bytes(0), cls=str(label).encode())
            label += 1
        path = write_tar(folder / f"train-{number:06d}.tar", members)
        index_shard(path)


def check_epochs(runs: list[list[list[tuple[int, bool]]]], workers: int, epochs: int = 2) -> None:
    """Fails unless the ranks' first epochs have each label once, apart from those that are marked as repeated."""
    assert len(runs[0]) == len(runs[1])
    workers = max(workers, 1)
    samples = -(-sum(SIZES) // (len(runs) * workers))  # of each worker
    steps = workers * -(-samples // 8)
    for epoch in range(epochs):
        batches = [run[epoch * steps : (epoch + 1) * steps] for run in runs]
        items = [item for rank in batches for batch in rank for item in batch]
        assert sorted(label for label, is_pad in items if not is_pad) == list(range(sum(SIZES)))
    assert runs[0][:steps] != runs[0][steps : 2 * steps]


class RankServer:
    """Runs scripts as the ranks of a launcher, forked from one process that has imported what they import."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, "-m", "tests.kits.rank_server", "torchdata_wds", "torch._dynamo", *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, cwd=ROOT, start_new_session=True, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the ranks, their workers and the server
        self._process.communicate()

    def launch(
        self, script: str, folder: Path, *arguments: str, world: int = 2, seconds: int = 180
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a script in a folder as the ranks of a launcher, or alone; returns the result of each rank."""
        path = folder / "script.py"
        path.write_text(script)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "NODE_RANK": "0"}
        environments = [{**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        if world == 1:
            environments = [{}]
        files = [[str(folder / f"{name}-{rank}.txt") for name in ("stdout", "stderr")] for rank in range(world)]
        request = {"script": str(path), "arguments": arguments, "folder": str(folder)}
        codes = self._ask({**request, "environments": environments, "files": files}, seconds)
        return [
            subprocess.CompletedProcess([str(path), *arguments], code, *(Path(file).read_text() for file in pair))
            for code, pair in zip(codes, files, strict=True)
        ]

    def _ask(self, request: dict[str, Any], seconds: int) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], seconds)[0], f"the ranks did not end within {seconds} s"
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes


#: A model that notes the labels it sees, without those of repeated samples, and that may kill its process.
RECORDING_MODEL = """
import json, os, signal, sys

class Model(torch.nn.Module):
    def __init__(self, file=os.devnull, kill_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kill_at = torch.nn.Linear(3 * 12 * 16, 1), kill_at
        self.seen, self.steps = open(file, "w"), 0

    def note(self, labels, pad):
        if self.steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        print(json.dumps(labels[~pad].tolist()), file=self.seen, flush=True)

    def scores(self, images):
        return self.layer(images.flatten(1)).squeeze(1) / 1000
"""


def run_killed(server: RankServer, script: str, folder: Path, *arguments: str) -> None:
    """Runs a script as two ranks: whole, killed by SIGKILL, and resumed, as its first argument says."""
    weights = {}  # the script prints them last
    for phase in ("whole", "killed", "resumed"):
        ranks = server.launch(script, folder, phase, *arguments)
        for rank in ranks:
            assert rank.returncode == (-signal.SIGKILL if phase == "killed" else 0), rank.stderr
        weights[phase] = [rank.stdout.splitlines()[-1:] for rank in ranks]
    assert weights["resumed"] == weights["whole"]
    assert weights["whole"][0] == weights["whole"][1] != []


def check_joined(folder: Path, saved: int, killed: int) -> None:
    """Two epochs had each sample once; the killed run continued after the batches that were saved."""

    def seen(phase: str) -> list[list[Any]]:
        files = [folder / f"{phase}-{rank}.jsonl" for rank in range(2)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    whole = seen("whole")
    for first, second, unbroken in zip(seen("killed"), seen("resumed"), whole, strict=True):
        assert len(first) == killed
        assert first[:saved] + second == unbroken
    half = len(whole[0]) // 2
    for epoch in (slice(half), slice(half, None)):
        labels = [label for batches in whole for batch in batches[epoch] for label in batch]
        assert Counter(labels) == Counter(range(sum(SIZES)))
