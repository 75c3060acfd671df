"""A Ray cluster on this machine, whose nodes are killed and added, and what a loss leaves in it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kits.processes import is_alive, wait_until

#: What only data nodes have: an actor that asks for some of it never runs on the head.
DATA = "data"

#: A dead node is noticed after about a second, not 14; and no memory monitor, as the machine is shared with others.
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
        self._noted: set[tuple[int, str]] = set()  # pids of all processes seen in the cluster, and when they began
        self._cluster = Cluster()
        self._lock = threading.Lock()  # a node may be added by a thread
        config = QUICK_TO_NOTICE | (system_config or {})
        self._add(num_cpus=0, _system_config=config)
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()

    def _add(self, **options: Any) -> Any:
        with self._lock:
            # Ray handles SIGTERM then, which only the main thread can set up; another node ends once the head has.
            self._cluster._shutdown_at_exit = threading.current_thread() is threading.main_thread()
            return self._cluster.add_node(include_dashboard=False, object_store_memory=100 * 2**20, **options)

    @property
    def address(self) -> str:
        """What ``ray.init`` connects to."""
        return str(self._cluster.address)

    def add_node(self) -> Any:
        """Adds a data node, and waits until it has joined."""
        node = self._add(num_cpus=self._cpus, resources={DATA: self._cpus})
        self.nodes.append(node)
        return node

    def kill_node(self, node: Any) -> None:
        """Kills a node as a power failure does: its raylet and all its workers at once."""
        self.note_processes()
        raylet = _raylet(node)
        os.kill(raylet, signal.SIGSTOP)  # so that it starts no others
        for pid in [*_descendants(raylet), raylet]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forget(node)

    def kill_raylet(self, node: Any) -> None:
        """Kills the raylet of a node only: its workers notice that, and end themselves."""
        self.note_processes()
        os.kill(_raylet(node), signal.SIGKILL)
        self._forget(node)

    def _forget(self, node: Any) -> None:
        self.nodes.remove(node)
        with self._lock:
            self._cluster.remove_node(node, allow_graceful=False)

    def note_processes(self) -> None:
        """Notes all processes of the cluster, for `left_processes`."""
        for node in self._cluster.list_all_nodes():
            for process in node.live_processes():
                for pid in {process[1].pid, *_descendants(process[1].pid)}:
                    with suppress(OSError):
                        self._noted.add((pid, _beginning(pid)))

    def actors(self, *, states: tuple[str, ...] = ("ALIVE",)) -> list[Actor]:
        """The actors of all jobs that are in one of some states."""
        table = self._cluster.global_state.actor_table(None)
        found = [
            Actor(row["State"], row["Pid"], row["Address"]["NodeID"], row["ActorClassName"]) for row in table.values()
        ]
        return [actor for actor in found if actor.state in states]

    def stored(self) -> dict[str, int]:
        """How many bytes the objects in the store of each living node have, without copies of those of other nodes."""
        state = self._cluster.global_state
        total, free = state.total_resources_per_node(), state.available_resources_per_node()
        name = "object_store_memory"
        return {node: round(total[node].get(name, 0) - free[node].get(name, 0)) for node in free if node in total}

    def left(self) -> list[Any]:
        """What is left of jobs: actors, also those about to start; bytes in stores; references of this process."""
        from ray._private.worker import global_worker

        actors = self.actors(states=("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING"))
        stored = [(node, size) for node, size in self.stored().items() if size]
        return [*actors, *stored, *global_worker.core_worker.get_all_reference_counts().items()]

    def is_empty(self) -> bool:
        """Whether nothing of this process's job is left in the cluster, which has no other."""
        return not self.left()

    def close(self) -> None:
        """Ends all nodes."""
        self.note_processes()
        self._cluster.shutdown()
        assert wait_until(lambda: not self.left_processes(), 30), self.left_processes()

    def left_processes(self) -> list[int]:
        """Pids of processes that were in the cluster and still run."""
        return [pid for pid, beginning in self._noted if is_alive(pid) and _beginning(pid) == beginning]


def _beginning(pid: int) -> str:
    """When a process began, since its pid may belong to another one later."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


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
    handler = signal.getsignal(signal.SIGTERM)
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
            signal.signal(signal.SIGTERM, handler)
            shutil.rmtree(folder, ignore_errors=True)
