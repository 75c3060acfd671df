"""A Ray cluster on this machine, whose nodes are killed and added, and what a loss leaves in it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kits.processes import is_alive, wait_until

#: What only data nodes have: an actor that asks for some of it never runs on the head.
DATA = "data"

#: A dead node is noticed after about a second, not ten; and no memory monitor, as the machine is shared with others.
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "memory_monitor_refresh_ms": 0,
}


class Actor(NamedTuple):
    """An actor that lives, or is about to."""

    state: str
    pid: int
    node: str
    name: str


class DataCluster:
    """A head without CPUs and data nodes, each with its own processes and object store on this machine."""

    def __init__(self, nodes: int = 2, *, cpus: int = 2, system_config: dict[str, Any] | None = None) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self.pids: set[int] = set()  # of all processes that ever were in the cluster
        self._cluster = Cluster()
        config = QUICK_TO_NOTICE | (system_config or {})
        self._add(num_cpus=0, _system_config=config)
        self.nodes = [self.add_node() for _ in range(nodes)]

    def _add(self, **options: Any) -> Any:
        return self._cluster.add_node(include_dashboard=False, object_store_memory=100 * 2**20, **options)

    @property
    def address(self) -> str:
        """What ``ray.init`` connects to."""
        return str(self._cluster.address)

    def add_node(self) -> Any:
        """Adds a data node, and waits until it has joined."""
        node = self._add(num_cpus=self._cpus, resources={DATA: self._cpus})
        if hasattr(self, "nodes"):
            self.nodes.append(node)
        return node

    def kill_node(self, node: Any) -> None:
        """Kills a node as a power failure does: its raylet and all its workers at once."""
        for pid in [_raylet(node), *self.workers(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forget(node)

    def kill_raylet(self, node: Any) -> None:
        """Kills the raylet of a node only: its workers notice that, and end themselves."""
        os.kill(_raylet(node), signal.SIGKILL)
        self._forget(node)

    def _forget(self, node: Any) -> None:
        self.note_processes()
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def workers(self, node: Any) -> list[int]:
        """Pids of the workers that the raylet of a node has started, and of its agents."""
        return sorted(_descendants(_raylet(node)))

    def note_processes(self) -> set[int]:
        """Pids of all processes of the cluster, noted for `left_processes`."""
        found = {_raylet(node) for node in self._cluster.list_all_nodes()}
        for pid in list(found):
            found |= _descendants(pid)
        self.pids |= found
        return found

    def actors(self, *, states: tuple[str, ...] = ("ALIVE",)) -> list[Actor]:
        """The actors of all jobs that are in one of some states."""
        table = self._cluster.global_state.actor_table(None)
        found = [
            Actor(row["State"], row["Pid"], row["Address"]["NodeID"], row["ActorClassName"]) for row in table.values()
        ]
        return [actor for actor in found if actor.state in states]

    def stored(self) -> dict[str, int]:
        """How many bytes the objects in the store of each living node have; copies of those of other nodes do not count."""
        state = self._cluster.global_state
        total, free = state.total_resources_per_node(), state.available_resources_per_node()
        name = "object_store_memory"
        return {node: round(total[node].get(name, 0) - free[node].get(name, 0)) for node in free if node in total}

    def is_empty(self) -> bool:
        """Whether no actor is left or about to start, no object is in a store, and this process refers to none."""
        from ray._private.worker import global_worker

        left = self.actors(states=("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING"))
        return not left and not any(self.stored().values()) and not global_worker.core_worker.get_all_reference_counts()

    def close(self) -> None:
        """Ends all nodes."""
        self.note_processes()
        self._cluster.shutdown()

    def left_processes(self) -> list[int]:
        """Pids of processes that were in the cluster and still run."""
        return [pid for pid in self.pids if is_alive(pid)]


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | _descendants(int(child))
    return found


@contextmanager
def data_cluster(nodes: int = 2, **options: Any) -> Iterator[DataCluster]:
    """A cluster apart from all others on this machine, to which this process is connected."""
    import ray

    # Sockets lie in that folder, and their paths may have 107 characters only: pytest's own are too long.
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        cluster = DataCluster(nodes, **options)
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            yield cluster
        finally:
            cluster.note_processes()
            ray.shutdown()
            cluster.close()
            assert wait_until(lambda: not cluster.left_processes(), 30)
            shutil.rmtree(folder, ignore_errors=True)
