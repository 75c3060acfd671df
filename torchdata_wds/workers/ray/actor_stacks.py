"""The stacks of actors that are stuck, and so cannot be asked by Ray: a task on their node sends them a signal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torchdata_wds.workers.processes.shared_memory import MEMORY_NAME
from torchdata_wds.workers.ray.losses import ActorPlace
from torchdata_wds.workers.ray.node_memory import path_of
from torchdata_wds.workers.stats.stalls.stack_file import StackFile, collect, state_of

_TASK = 30.0  # how many seconds a task may take, which Ray may have to start a process for


class Answer(NamedTuple):
    """What is known about an actor that was asked."""

    dump: str = ""
    note: str = "does not answer; `ray stack` on its node may show its stack"


def stacks_of(ray: Any, places: Sequence[ActorPlace], options: Mapping[str, Any]) -> list[Answer]:
    """Returns the stacks of actors; `options` are those of the actors."""
    here = ray.get_runtime_context().get_node_id()
    nodes: dict[str, list[ActorPlace]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    tasks = {node: _task(ray, node, found, options) for node, found in nodes.items() if node != here}
    answers = dict(zip(nodes.get(here, ()), stacks_here(nodes.get(here, ())), strict=True))
    ready, late = ray.wait([*tasks.values()], num_returns=len(tasks), timeout=_TASK) if tasks else ([], [])
    for node, task in tasks.items():
        with suppress(ray.exceptions.RayError):
            if task in ready:
                answers.update(zip(nodes[node], ray.get(task), strict=True))
    for task in late:
        ray.cancel(task, force=True)
    return [answers.get(place, Answer()) for place in places]


def _task(ray: Any, node: str, places: Sequence[ActorPlace], options: Mapping[str, Any]) -> Any:
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    alike = {name: options[name] for name in ("runtime_env",) if name in options}
    task = ray.remote(stacks_here).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity, **alike)
    return task.remote([tuple(place) for place in places])


def stacks_here(places: Sequence[Sequence[Any]]) -> list[Answer]:
    """Returns the stacks of processes of this machine, whose `ActorPlace`s these are.

    A process gets no signal unless it has the file that an actor has made for its stacks.
    """
    files = {(process, descriptor): _opened(process, descriptor) for _, _, process, descriptor in places}
    known = {key: file for key, file in files.items() if file is not None}
    dumps = dict(zip(known, collect([(file, partial(_owner, *key)) for key, file in known.items()]), strict=True))
    for file in known.values():
        file.close()
    found = {key: Answer(dump, "" if dump else state_of(key[0])) for key, dump in dumps.items()}
    return [found.get(key, Answer()) for key in files]


def _opened(process: int, descriptor: int) -> StackFile | None:
    """Opens the file for the stacks of an actor."""
    with suppress(OSError):
        if _owner(process, descriptor):
            return StackFile(os.open(path_of(process, descriptor), os.O_RDWR), is_ready=True)
    return None


def _owner(process: int, descriptor: int) -> int:
    """Returns the process if it has an actor's file open, or 0."""
    # Containers of one node may number their processes apart, so that another process has that number here.
    with suppress(OSError):
        if str(path_of(process, descriptor).readlink()).startswith(f"/memfd:{MEMORY_NAME}"):
            return process
    return 0
