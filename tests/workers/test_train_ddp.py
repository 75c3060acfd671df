"""The example of distributed training: equal steps, each sample once, and nothing changed by a kill and a resume."""

import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits import train_ddp
from tests.kits.processes import is_alive, wait_until
from tests.kits.shards import sample_members, write_tar
from tests.kits.workers_kit import ROOT
from torchdata_wds import index_shard

#: Shards of uneven size; their samples do not divide by two ranks of two workers.
SIZES = (17, 2, 21, 5, 8)
WORKERS = 2
STEPS = 10  # of each rank in an epoch: 14 samples for each worker, in batches of 3
SECONDS = 1200  # a guard against hanging

#: The example, which stops when it comes to save a state, tells the pids of its workers and waits to be killed. One of
#: the ranks has saved that state, the other has not.
STOPPING = """
import json, multiprocessing, os, sys, time
from pathlib import Path
from tests.kits import train_ddp

last, stopped = int(sys.argv[1]), Path(sys.argv[2])
save_state = train_ddp.save_state

def save_or_stop(folder, rank, state):
    if state["step"] < last or rank:
        save_state(folder, rank, state)
    if state["step"] == last:
        workers = [child.pid for child in multiprocessing.active_children()]
        stopped.with_suffix(".partial").write_text(json.dumps(workers))
        stopped.with_suffix(".partial").rename(stopped)
        time.sleep(600)

train_ddp.save_state = save_or_stop
train_ddp.main(sys.argv[3:])
"""

GOING_ON = "import sys; from tests.kits import train_ddp; train_ddp.main(sys.argv[1:])"


def png_bytes(number: int) -> bytes:
    """An image whose crops and flips all differ."""
    out = io.BytesIO()
    Image.frombytes("RGB", (12, 10), random.Random(number).randbytes(12 * 10 * 3)).save(out, "PNG")
    return out.getvalue()


def write_shards(folder: Path, sizes: Iterable[int]) -> list[str]:
    """One shard per size, and the keys of all samples."""
    folder.mkdir(exist_ok=True)
    keys: list[str] = []
    for shard, size in enumerate(sizes):
        members: list[tuple[str, bytes]] = []
        for number in range(size):
            keys.append(f"{shard}-{number:03d}")
            members += sample_members(keys[-1], png=png_bytes(len(keys)), cls=str(len(keys) % 10).encode())
        write_tar(folder / f"train-{shard}.tar", members)
    return keys


@contextmanager
def two_ranks(folder: Path, *commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts a command for each rank, as torchrun does; leaves none of them running."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    processes = []
    try:
        for rank, command in enumerate(commands):
            with (folder / f"stderr-{rank}").open("ab") as log:
                environment = {**os.environ, **shared, "RANK": str(rank)}
                processes.append(subprocess.Popen([sys.executable, *command], env=environment, cwd=folder, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(folder: Path, *command: str) -> None:
    """Runs both ranks to their end."""
    with two_ranks(folder, [*command], [*command]) as ranks:
        codes = [rank.wait(timeout=SECONDS) for rank in ranks]
    assert codes == [0, 0], stderr_of(folder)


def stop_and_kill(folder: Path, step: int, *arguments: str) -> None:
    """Kills both ranks when they have come to a step; their workers must find out by themselves."""
    files = [folder / f"stopped-{step}-{rank}" for rank in range(2)]
    commands = [["-c", STOPPING, str(step), str(file), *arguments] for file in files]
    with two_ranks(folder, *commands) as ranks:
        wait_until(
            lambda: all(file.exists() for file in files) or any(rank.poll() is not None for rank in ranks), SECONDS
        )
        assert all(file.exists() for file in files), stderr_of(folder)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        assert [rank.wait(timeout=SECONDS) for rank in ranks] == [-signal.SIGKILL] * 2
        workers = [pid for file in files for pid in json.loads(file.read_text())]
        assert len(workers) == 2 * WORKERS
        assert wait_until(lambda: not any(map(is_alive, workers)))


def stderr_of(folder: Path) -> str:
    return "\n".join((folder / f"stderr-{rank}").read_text() for rank in range(2))


def notes_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote down, one entry for each step: the last that there is."""
    lines = map(json.loads, (folder / "states" / f"keys-{rank}.jsonl").read_text().splitlines())
    steps = {note["step"]: note for note in lines}
    return [steps[step] for step in sorted(steps)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "states" / "model.pt", weights_only=True)


def arguments_of(folder: Path, **options: Any) -> list[str]:
    pairs = {
        "shards": folder / "train-{0..4}.tar",
        "state-dir": "states",
        "batch-size": 3,
        "timeout": SECONDS,
        **options,
    }
    return [text for name, value in pairs.items() for text in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where the shards are, without indexes, and their keys."""
    folder = tmp_path_factory.mktemp("shards")
    return folder, write_shards(folder, SIZES)


@pytest.fixture(scope="module")
def unbroken(shards: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has been that nobody killed: the script itself."""
    folder = tmp_path_factory.mktemp("unbroken")
    finish(folder, str(ROOT / "tests" / "kits" / "train_ddp.py"), *arguments_of(shards[0]))
    return folder


@pytest.mark.slow
def test_training_takes_equal_steps_and_each_sample_once_per_epoch(
    unbroken: Path, shards: tuple[Path, list[str]]
) -> None:
    """Both ranks have the same number of batches of the same sizes; each epoch has each key once, in another order."""
    ranks = [notes_of(unbroken, rank) for rank in range(2)]
    assert [note["step"] for note in ranks[0]] == list(range(1, 3 * STEPS + 1))
    shapes = [[(note["epoch"], note["step"], note["size"]) for note in notes] for notes in ranks]
    assert shapes[0] == shapes[1]
    orders = [[[note["keys"] for note in notes if note["epoch"] == epoch] for notes in ranks] for epoch in range(3)]
    for order in orders:
        assert sorted(key for notes in order for keys in notes for key in keys) == shards[1]
    assert len(set(map(str, orders))) == 3


@pytest.mark.slow
def test_training_ends_with_the_same_weights_when_killed_and_resumed(
    unbroken: Path, shards: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Killed twice in the second epoch, it has the keys and weights of an unbroken run.

    Both kills come between the savings of two ranks. The first resume begins at the last batch of the first epoch, the
    second in the middle of the second, where the turn is another worker's.
    """
    options = [*arguments_of(shards[0]), "--resume", "--save-every"]
    stop_and_kill(tmp_path, 15, *options, "5")
    stop_and_kill(tmp_path, 18, *options, "3")
    finish(tmp_path, "-c", GOING_ON, *options, "3")
    assert stderr_of(tmp_path).count("the items before it are skipped") == 4
    for rank in range(2):
        resumed = [f"rank {rank} goes on behind step {step}" for step in (0, 10, 15)]
        assert re.findall(rf"rank {rank} goes on behind step \d+", stderr_of(tmp_path)) == resumed
        assert notes_of(tmp_path, rank) == notes_of(unbroken, rank)
    expected, found = weights_of(unbroken), weights_of(tmp_path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_batches_are_equal_and_complete_for_every_number_of_samples(tmp_path: Path) -> None:
    """Four consumers have batches of the same sizes and together each sample once, be there one sample or thirteen."""
    for total in range(1, 14):
        keys = write_shards(tmp_path, (total // 3, total - total // 3))
        for number in range(2):
            index_shard(tmp_path / f"train-{number}.tar")
        args = train_ddp.parse(arguments_of(tmp_path, **{"shards": tmp_path / "train-{0..1}.tar", "batch-size": 2}))
        consumers = []
        for place in range(4):
            pipe = train_ddp.make_pipe(args)
            apply_sharding(pipe, 4, place, SHARDING_PRIORITIES.DISTRIBUTED)
            torch.manual_seed(total)  # the shards' order is the same for all, as the service has it
            consumers.append(list(pipe))
        assert len({str([len(batch["key"]) for batch in batches]) for batches in consumers}) == 1
        rows = [
            row
            for batches in consumers
            for batch in batches
            for row in zip(batch["key"], batch["pad"].tolist(), strict=True)
        ]
        assert sorted(key for key, pad in rows if not pad) == keys
        assert Counter(pad for _, pad in rows)[True] == -total % 4


def test_loss_is_the_mean_over_all_real_samples_when_ranks_have_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the ranks' losses, which is what DDP makes, is that of the real samples; without any it is 0."""
    ranks = [(torch.tensor([1.0, 2.0, 6.0]), [True] * 3), (torch.tensor([5.0, 7.0, 9.0]), [True, False, False])]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.fill_(4))
    parts = [train_ddp.mean_loss(losses, torch.tensor(is_real)) for losses, is_real in ranks]
    assert torch.stack(parts).mean().item() == (1 + 2 + 6 + 5) / 4
    monkeypatch.setattr(dist, "all_reduce", lambda count: count)
    assert train_ddp.mean_loss(ranks[0][0], torch.zeros(3, dtype=torch.bool)).item() == 0


def test_states_are_chosen_by_what_all_ranks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps two states, goes on from the newest that all have, and drops newer ones of its own."""
    for step in (1, 2, 3):
        train_ddp.save_state(tmp_path, 1, {"step": step})
    names = [f"step-{step:09d}-rank-1.pt" for step in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]

    def gather(found: list[Any], own: set[int]) -> None:
        found[:] = other, own

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    other = {1, 2}
    assert train_ddp.newest_state(tmp_path, 1) == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == names[1:2]
    other = {1}
    assert train_ddp.newest_state(tmp_path, 1) is None


def test_states_of_another_run_are_left_alone_unless_asked_to_resume(tmp_path: Path) -> None:
    """A folder that has states is refused without --resume."""
    train_ddp.save_state(tmp_path, 0, {"step": 1})
    with pytest.raises(FileExistsError, match="pass --resume"):
        train_ddp.prepare_folder(train_ddp.parse(arguments_of(tmp_path, **{"state-dir": tmp_path})))


def test_arguments_are_asked_for_when_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Without shards or a folder the script says what it needs."""
    with pytest.raises(SystemExit):
        train_ddp.parse([])
    assert "--shards, --state-dir" in capsys.readouterr().err
