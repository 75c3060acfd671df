"""``wds map`` on a cluster: the results are those of local processes, and what is lost is run again."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.map_kit import MODULE, check_that_one_failure_costs_one_output, names, outputs
from tests.kits.processes import children, is_alive, wait_until
from tests.kits.ray_kit import data_cluster
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.map import clusters


# ------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{MODULE}:shout", "shard-*.tar", "-o", "out/", "--ray", "--dask", "local"), "not allowed with"),
        (("--ray", f"{MODULE}:shout", "shard-*.tar", "-o", "out/"), "write --ray last or as --ray=local"),
        ((f"{MODULE}:shout", "--ray", "shard-*.tar", "-o", "out/"), "write --ray last or as --ray=local"),
        ((f"{MODULE}:shout", "shard-*.tar", "-o", "out/", "--ray", "ray://head:10001"), "Ray Client"),
        ((f"{MODULE}:shout", "shard-*.tar", "-o", "out/", "--ray", "head"), "expected 'host:port'"),
    ],
)
def test_map_exits_with_2_when_clusters_are_wrong(arguments: tuple[str, ...], said: str, here: Path) -> None:
    result = run_wds("map", *arguments)
    assert result.status == 2
    assert said in result.err
    assert outputs(here / "out") == [""]


@pytest.mark.parametrize(
    ("package", "arguments", "advice"),
    [
        ("distributed", ("--dask", "local"), "pip install 'torchdata_wds[dask]'"),
        ("ray", ("--ray",), "pip install 'torchdata-wds[ray]'"),
    ],
)
def test_map_says_so_when_a_package_is_not_installed(
    package: str, arguments: tuple[str, ...], advice: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And which extra brings it."""
    monkeypatch.setitem(sys.modules, package, None)
    result = run_wds("map", f"{MODULE}:shout", "shard-*.tar", "-o", "out/", *arguments)
    assert result.status == 1
    assert advice in result.err
    assert outputs(here / "out") == []


# ------------------------------------------------------------------------------------------------------ lost workers
class RayError(Exception):
    """The base of a stand-in's errors."""


class LastingError(RayError):
    """One that every worker would meet."""


class StandIn:
    """What the command uses of Ray, in this process: workers are lost as often as `losses` says, by shard."""

    def __init__(self) -> None:
        self.losses: dict[str, int] = {}
        self.is_lost_after_work = False
        self.runs: list[str] = []
        self.most = 0
        self.options: dict[str, Any] = {}
        self.exceptions = SimpleNamespace(
            RayError=RayError,
            RayTaskError=LastingError,
            RuntimeEnvSetupError=LastingError,
            ActorUnschedulableError=LastingError,
            TaskUnschedulableError=LastingError,
        )
        self.cloudpickle = pytest.importorskip("cloudpickle")

    def remote(self, **options: Any) -> Any:
        self.options = options

        def start(function: Any) -> SimpleNamespace:
            def run(data: bytes, task: Any) -> Any:
                name = Path(task.source).name
                self.runs.append(name)
                losses = self.losses.get(name, 0)
                if losses > 0:
                    self.losses[name] -= 1
                    if self.is_lost_after_work:
                        function(data, task)
                    return SimpleNamespace(error=RayError(f"the node  of\n{name} has died"))
                if losses < 0:
                    return SimpleNamespace(error=LastingError(f"no module for {name}"))
                return SimpleNamespace(error=None, value=function(data, task))

            return SimpleNamespace(remote=lambda *arguments: _Reference(run(*arguments)))

        return start

    def put(self, data: bytes) -> bytes:
        return data

    def wait(self, running: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(running))
        return running[-1:], running[:-1]

    def get(self, reference: "_Reference") -> Any:
        if reference.result.error is not None:
            raise reference.result.error
        return reference.result.value

    def cluster_resources(self) -> dict[str, float]:
        return {"memory": 1.0}

    def cancel(self, *_: Any, **__: Any) -> None:
        raise AssertionError("all tasks have ended")


class _Reference:
    def __init__(self, result: SimpleNamespace) -> None:
        self.result = result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In place of Ray, and of a cluster that another program uses too."""
    stand_in = StandIn()
    monkeypatch.setattr(clusters, "import_ray", lambda: stand_in)
    joined = SimpleNamespace(is_own=False, address="head:6379")
    monkeypatch.setattr(clusters.Cluster, "join", lambda address: contextlib.nullcontext(joined))
    return stand_in


def run_on_stand_in(*arguments: str) -> Any:
    return run_wds("map", f"{MODULE}:shout_all", "shard-*.tar", "-o", "out/", "--ray", "head:6379", *arguments)


def test_map_runs_the_shards_of_a_lost_worker_again(ray: StandIn, here: Path) -> None:
    """Ray would do so too, but for ever if it was for memory."""
    ray.losses = {"shard-000002.tar": 3, "shard-000005.tar": 1}
    result = run_on_stand_in()
    assert result.status == 0
    assert outputs(here / "out") == names()
    assert len(ray.runs) == 8 + 3 + 1
    assert ray.options["max_retries"] == 0
    assert "shard-000005.tar is run again, because its worker was lost: the node of shard-" in result.err
    assert "wds: the Ray cluster at head:6379 has no CPUs yet: waiting for a node that has" in result.err.splitlines()


def test_map_gives_up_a_shard_that_loses_every_worker(ray: StandIn, here: Path) -> None:
    """A shard that needs too much memory would never end."""
    ray.losses = {"shard-000002.tar": 1000}
    result = run_on_stand_in()
    assert result.status == 1
    assert outputs(here / "out") == names(2)
    assert ray.runs.count("shard-000002.tar") == 4
    assert "shard-000002.tar failed: its worker was lost 4 times, at last with: the node of" in result.err
    assert result.err.endswith("wds: 7 done, 1 failed, 0 skipped\n")


def test_map_does_not_repeat_what_fails_everywhere(ray: StandIn, here: Path) -> None:
    ray.losses = {"shard-000002.tar": -1}
    result = run_on_stand_in()
    assert result.status == 1
    assert outputs(here / "out") == names(2)
    assert ray.runs.count("shard-000002.tar") == 1
    assert "LastingError: no module for shard-000002.tar" in result.err


@pytest.mark.parametrize(("arguments", "runs"), [((), 1), (("--force",), 2)])
def test_map_takes_an_output_whose_worker_was_lost_afterwards(
    ray: StandIn, here: Path, arguments: tuple[str, ...], runs: int
) -> None:
    """It is whole, as outputs appear when they are; a second run would find its place taken."""
    ray.losses, ray.is_lost_after_work = {"shard-000002.tar": 1}, True
    result = run_on_stand_in(*arguments)
    assert result.status == 0
    assert outputs(here / "out") == names()
    assert ray.runs.count("shard-000002.tar") == runs


def test_map_does_not_give_a_cluster_all_shards_at_once(
    ray: StandIn, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for one of a million tasks takes long."""
    monkeypatch.setattr(clusters, "_AHEAD", 3)
    assert run_on_stand_in().status == 0
    assert ray.most == 3


# ---------------------------------------------------------------------------------------------------------------- Dask
@contextlib.contextmanager
def dask_cluster() -> Iterator[str]:
    """The address of a cluster of two processes on this machine, which begin in another folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what another package does is not ours
        import dask
        import distributed

        # of a shard that kills workers the first is enough here
        with (
            dask.config.set({"distributed.scheduler.allowed-failures": 0}),
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
            ) as cluster,
        ):
            yield cluster.scheduler_address


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_map_does_the_other_shards_when_one_fails_on_a_dask_cluster(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers know nothing of the working directory and its modules; one that dies costs its shard only."""
    monkeypatch.chdir("/")
    with dask_cluster() as address:
        monkeypatch.chdir(here)
        check_that_one_failure_costs_one_output(here, "--dask", address)
        (here / "repaired").unlink()
        died = run_wds("map", f"{MODULE}:die", "shard-000002.tar", "-o", "died/", "--dask", address)
        assert died.status == 1
        assert "shard-000002.tar failed: " in died.err
        assert "KilledWorker" in died.err
        assert outputs(here / "died") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_map_makes_a_cluster_for_itself(here: Path) -> None:
    """For --dask local; nothing of it is left."""
    before = children()
    result = run_wds("map", f"{MODULE}:shout_all", "shard-*.tar", "-o", "out/", "--dask", "local", "--workers", 1)
    assert result.status == 0
    assert result.err.endswith("wds: 8 done, 0 failed, 0 skipped\n")
    assert outputs(here / "out") == names()
    assert children() <= before


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_map_says_so_when_no_dask_scheduler_answers(here: Path) -> None:
    """Nothing is made."""
    result = run_wds("map", f"{MODULE}:shout", "shard-*.tar", "-o", "out/", "--dask", "nonsense://host:1")
    assert result.status == 1
    assert "no Dask scheduler answers at 'nonsense://host:1'" in result.err
    assert outputs(here / "out") == []


# ----------------------------------------------------------------------------------------------------------------- Ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_map_does_the_other_shards_when_one_fails_on_a_ray_cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a node dies: what ran there runs again on another, and leaves nothing half done."""
    monkeypatch.chdir("/")
    with data_cluster() as cluster:
        monkeypatch.chdir(here)
        check_that_one_failure_costs_one_output(here, "--ray", cluster.address)

        def kill() -> None:
            assert wait_until(lambda: len(list(here.glob("begun-*"))) == 4)
            cluster.kill_node(cluster.nodes[0])
            (here / "killed").touch()

        killer = threading.Thread(target=kill)
        killer.start()
        result = run_wds("map", f"{MODULE}:linger", "shard-*.tar", "-o", "lost/", "--ray", cluster.address)
        killer.join()
        assert result.status == 0
        assert result.err.count(" is run again, because its worker was lost: ") == 2
        assert outputs(here / "lost") == names()
        assert {path.read_text() for path in (here / "lost").iterdir()} == {str(here / name) for name in names()}


@pytest.mark.slow
def test_map_ends_the_ray_cluster_that_it_started(here: Path) -> None:
    """Ctrl-C: no words, no process and nothing half left."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # paths of sockets must be short
        program = subprocess.Popen(
            [sys.executable, "-m", "torchdata_wds", "map", f"{MODULE}:wait", ".", "-o", "out/", "--ray", "--workers=2"],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert wait_until(lambda: len(list(here.glob("begun-*"))) == 2)
        os.killpg(program.pid, signal.SIGINT)
        assert program.communicate(timeout=60)[0] == b""
        assert program.returncode == 130
        assert wait_until(lambda: not processes_with(folder), 30)
    assert not [path for path in here.glob("begun-*") if is_alive(int(path.name[6:]))]
    assert outputs(here / "out") == []


def processes_with(text: str) -> list[str]:
    """The processes with a text in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
