"""Ranks of one job on one cluster: each has its own actors, and lost nodes change nothing that they train on."""

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.processes import wait_until
from tests.kits.ray_kit import DATA, DataCluster, data_cluster
from tests.kits.workers_kit import ROOT, uneven_pipe
from tests.workers import test_train_ddp as training
from torchdata_wds import RayPool, WdsLoader

pytestmark = pytest.mark.slow

#: Two ranks of two workers fit on one node of two CPUs.
#: The nodes find the modules of the tests as the ranks do.
OPTIONS = {
    "num_cpus": 0.5,
    "resources": {DATA: 0.5},
    "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}},
}

#: The example of distributed training with its workers in actors. After some steps it waits to be told to go on, and
#: notes how many actors were replaced so far. A batch takes so long that it is sent alone, so that some of the epoch
#: are not made yet when the training waits in the middle of it.
ON_RAY = """
import json, sys, time
from functools import partial
from pathlib import Path
from tests.kits import train_ddp
from torchdata_wds import RayPool, WdsLoader

pool = RayPool(sys.argv[1], actor_options=json.loads(sys.argv[2]))
stops = json.loads(sys.argv[3])
make_pipe, note_keys = train_ddp.make_pipe, train_ddp.note_keys

def slowly(batch):
    time.sleep(0.05)
    return batch

def note_and_wait(path, epoch, step, batch):
    note_keys(path, epoch, step, batch)
    path.with_name(f"restarts-{path.stem}").write_text(str(pool.restarts))
    if step in stops:
        Path(f"{path.stem}-at-{step}").touch()
        while not Path(f"go-{step}").exists():
            time.sleep(0.02)

train_ddp.WdsLoader = partial(WdsLoader, pool=pool, prefetch_factor=1)
train_ddp.make_pipe = lambda args: make_pipe(args).map(slowly)
train_ddp.note_keys = note_and_wait
train_ddp.main(sys.argv[4:])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DataCluster]:
    """A head and two data nodes."""
    with data_cluster() as cluster:
        yield cluster


def wait_for_step(folder: Path, step: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Waits until both ranks have come to a step at which they wait."""
    files = [folder / f"keys-{rank}-at-{step}" for rank in range(2)]
    wait_until(
        lambda: all(file.exists() for file in files) or any(rank.poll() is not None for rank in ranks), training.SECONDS
    )
    assert all(file.exists() for file in files), training.stderr_of(folder)


def restarts_of(folder: Path) -> list[int]:
    """How many actors each rank has replaced."""
    return [int((folder / "states" / f"restarts-keys-{rank}").read_text()) for rank in range(2)]


def test_training_on_a_cluster_ends_with_the_weights_of_local_workers(cluster: DataCluster, tmp_path: Path) -> None:
    """A node dies in mid-epoch, both ranks are killed and resumed, and another node dies; local workers knew no fault.

    The ranks have two actors each, which end with them.
    """
    shards, local, on_ray = (tmp_path / name for name in ("shards", "local", "on_ray"))
    training.write_shards(shards, training.SIZES)
    local.mkdir()
    on_ray.mkdir()
    options = training.arguments_of(shards)
    training.finish(local, str(ROOT / "tests" / "kits" / "train_ddp.py"), *options)
    options += ["--resume", "--save-every", "5"]

    def command(*stops: int) -> list[str]:
        return ["-c", ON_RAY, cluster.address, json.dumps(OPTIONS), json.dumps(stops), *options]

    with training.two_ranks(on_ray, command(13, 19), command(13, 19)) as ranks:
        wait_for_step(on_ray, 13, ranks)
        actors = cluster.actors()
        assert len({actor.pid for actor in actors}) == len(actors) == 2 * training.WORKERS
        nodes = Counter(actor.node for actor in actors)
        assert len(nodes) == 2
        lost = nodes[cluster.nodes[0].node_id]
        cluster.kill_node(cluster.nodes[0])
        (on_ray / "go-13").touch()
        wait_for_step(on_ray, 19, ranks)
        # An actor is not missed as long as messages of it are there.
        assert 0 < sum(restarts_of(on_ray)) <= lost
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not cluster.actors())
    cluster.add_node()
    with training.two_ranks(on_ray, command(24), command(24)) as ranks:
        wait_for_step(on_ray, 24, ranks)
        cluster.kill_node(cluster.nodes[0])
        (on_ray / "go-24").touch()
        codes = [rank.wait(timeout=training.SECONDS) for rank in ranks]
    cluster.add_node()
    told = training.stderr_of(on_ray)
    assert codes == [0, 0], told
    assert sum(restarts_of(on_ray)) > 0
    assert re.findall(r"goes on behind step (\d+)", told) == ["0", "15", "0", "15"]
    for rank in range(2):
        assert training.notes_of(on_ray, rank) == training.notes_of(local, rank)
    expected, found = training.weights_of(local), training.weights_of(on_ray)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert wait_until(lambda: not cluster.actors())


def test_ranks_given_as_numbers_share_the_items_on_a_cluster_as_locally(cluster: DataCluster) -> None:
    """Both ranks' loaders in one process have actors of their own, and the items and states of local workers."""

    def loader_of(rank: int, pool: RayPool | None) -> WdsLoader[Any]:
        return WdsLoader(uneven_pipe(), 2, seed=5, ranks=(rank, 2), pool=pool)

    expected: list[list[Any]] = []
    for rank in range(2):
        with loader_of(rank, None) as local:
            expected.append([list(local) for _ in range(2)])
    pools = [RayPool(actor_options=OPTIONS) for _ in range(2)]
    with loader_of(0, pools[0]) as first, loader_of(1, pools[1]) as second:
        loaders = [first, second]
        iterators = [iter(loader) for loader in loaders]
        found = [[next(items), next(items), next(items)] for items in iterators]
        states = [loader.state_dict() for loader in loaders]
        assert len({actor.pid for actor in cluster.actors()}) == 4
        assert [[*begun, *items] for begun, items in zip(found, iterators, strict=True)] == [e[0] for e in expected]
        assert [list(loader) for loader in loaders] == [epochs[1] for epochs in expected]
    for rank, state in enumerate(states):
        with loader_of(rank, None) as resumed:
            resumed.load_state_dict(state)
            assert list(resumed) == expected[rank][0][3:]
    assert wait_until(lambda: not cluster.actors())
