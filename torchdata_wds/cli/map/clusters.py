"""Runs a function over shards on a cluster: one row of `CLUSTERS` for each kind, which is also an option."""

import argparse
import functools
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.command import option
from torchdata_wds.cli.jobs import GRACE
from torchdata_wds.cli.map.shard_tasks import (
    Results,
    ShardFunction,
    ShardTask,
    error_text,
    existing_targets,
    is_plain_path,
    run_task,
)
from torchdata_wds.cli.terminal import printable, say, shorten
from torchdata_wds.codecs.options import import_optional
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import local_path
from torchdata_wds.workers.ray.cluster import Cluster, checked_address, import_ray
from torchdata_wds.workers.ray.losses import is_lasting

# These are installed on the cluster too, and too large to be sent there.
_NEVER_SENT = {__name__.partition(".")[0], "__main__"}

_LOCAL = "local"
_AHEAD = 1000  # tasks that Ray may have at once: more than the cores of most clusters, and few enough to wait on
_MAX_LOSSES = 3  # how many workers of one task may be lost, in a row, before it is given up
_SHOWN = 300


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each kind of cluster, of which a command takes one."""
    group = parser.add_mutually_exclusive_group()
    for name, kind in CLUSTERS.items():
        option(group, f"--{name}", "ADDRESS", kind.text, kind.address, **kind.settings)


def chosen_cluster(arguments: argparse.Namespace) -> tuple[str, str] | None:
    """Returns the kind and the address of the cluster to run on, or None."""
    found = vars(arguments)
    return next(((name, found[name]) for name in CLUSTERS if found[name] is not None), None)


def run_on_cluster(
    cluster: tuple[str, str], function: ShardFunction, tasks: Sequence[ShardTask], *, num_workers: int, folder: str
) -> Results:
    """Runs a function over shards on a cluster, given by its kind and address.

    Local shards must have the same path everywhere. The function is sent by value, with the modules of `folder` that it
    needs; everything else must be installed on the workers. The address ``local`` means a cluster of `num_workers`
    processes on this machine, which is started and ended.
    """
    kind, address = cluster
    return CLUSTERS[kind].run(functools.partial(_by_value, function, Path(folder)), tasks, address, num_workers)


def _from_anywhere(task: ShardTask) -> ShardTask:
    source = os.path.abspath(local_path(task.source)) if is_plain_path(task.source) else task.source  # noqa: PTH100 - a str
    return task._replace(source=source)


def _by_value(function: ShardFunction, folder: Path, cloudpickle: Any) -> bytes:
    """Pickles a function so that the modules of a folder are not needed where it is unpickled."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if "." in name or name in _NEVER_SENT:
                continue
            places = list(getattr(module, "__path__", [])) or [getattr(module, "__file__", None)]
            if isinstance(places[0], str) and Path(places[0]).parent == folder:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            data: bytes = cloudpickle.dumps(function)
        except Exception as error:
            raise RuntimeError(f"the function cannot be sent to the cluster: {error_text(error)}") from error
    return data


def _run_sent(data: bytes, task: ShardTask) -> str:
    """Runs in a worker of the cluster."""
    return run_task(functools.partial(pickle.loads, data), task)


# --------------------------------------------------------------------------------------------------------------- Dask


def _on_dask(send: "Send", tasks: Sequence[ShardTask], address: str, num_workers: int) -> Results:
    distributed = import_optional("distributed", extra="dask", fields="functions on a Dask cluster")
    data = send(import_optional("cloudpickle", extra="dask", fields="functions on a Dask cluster"))
    with ExitStack() as stack:
        if address == _LOCAL:
            cluster = distributed.LocalCluster(
                n_workers=num_workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
            )
            address = stack.enter_context(cluster).scheduler_address
        try:
            # checked first: distributed's own error for a wrong address comes later and is less clear
            if not address:
                raise ValueError("it is empty")
            distributed.comm.registry.get_backend(distributed.comm.parse_address(address)[0])
            client = stack.enter_context(distributed.Client(address))
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no Dask scheduler answers at {address!r}: {error}") from error
        futures = {client.submit(_run_sent, data, _from_anywhere(task), pure=False): task for task in tasks}
        try:
            for future in distributed.as_completed(futures):
                try:
                    problem: str = future.result()
                except Exception as error:  # noqa: BLE001 - the cluster's own: a worker that is killed repeatedly, say
                    problem = error_text(error)
                yield futures[future], problem
        finally:
            client.cancel([future for future in futures if not future.done()])


# ---------------------------------------------------------------------------------------------------------------- Ray


def _ray_address(text: str) -> str:
    """Checks what follows ``--ray``, which may be another argument of the command."""
    try:
        return checked_address(text) or _LOCAL
    except ValueError as error:
        hint = "for a cluster of this machine, write --ray last or as --ray=local"
        raise argparse.ArgumentTypeError(f"{error} ({hint})") from error


def _on_ray(send: "Send", tasks: Sequence[ShardTask], address: str, num_workers: int) -> Results:
    ray = import_ray()
    data = send(ray.cloudpickle)
    # Ray reports lost workers on standard output; they are reported here.
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        Cluster.join(None if address == _LOCAL else address) as cluster,
    ):
        if not cluster.is_own and ray.cluster_resources().get("CPU", 0) < 1:
            say(f"the Ray cluster at {cluster.address} has no CPUs yet: waiting for a node that has")
        # Those of a cluster started here are limited by `most`, even to more than there are cores. Ray does not repeat
        # a task by itself: one that runs out of memory it would repeat for ever.
        options = {"num_cpus": 0 if cluster.is_own else 1, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        run, sent, most = ray.remote(**options)(_run_sent), ray.put(data), num_workers if cluster.is_own else _AHEAD
        todo = deque((task, 0) for task in tasks)
        running: dict[Any, tuple[ShardTask, int]] = {}
        try:
            while todo or running:
                while todo and len(running) < most:
                    task, losses = todo.popleft()
                    running[run.remote(sent, _from_anywhere(task))] = task, losses
                (ended, *_), _ = ray.wait(list(running))
                task, losses = running.pop(ended)
                try:
                    problem: str | None = ray.get(ended)
                except ray.exceptions.RayError as error:
                    problem = _loss(ray, error, task, losses + 1)
                if problem is None:
                    todo.append((task, losses + 1))
                else:
                    yield task, problem
        finally:
            _cancel(ray, list(running))


def _loss(ray: Any, error: Exception, task: ShardTask, losses: int) -> str | None:
    """Returns why a task has failed, "" if it has ended all the same, and None if it is to be run again."""
    if is_lasting(ray, error):
        return error_text(error)
    # An output appears under its name as the last step, after which its worker may be lost too.
    if not task.overwrite and existing_targets([task.target]):
        return ""
    reason = shorten(printable(" ".join(str(error).split())), _SHOWN)
    if losses <= _MAX_LOSSES:
        say(f"shard {printable(mask_url(task.source))} is run again, because its worker was lost: {reason}")
        return None
    return f"its worker was lost {losses} times, at last with: {reason}"


def _cancel(ray: Any, running: list[Any]) -> None:
    """Interrupts tasks, and ends workers that do not react, so that none writes after this."""
    for is_forced in (False, True):
        for task in running:
            ray.cancel(task, force=is_forced)
        if running:
            _, running = ray.wait(running, num_returns=len(running), timeout=GRACE)


# --------------------------------------------------------------------------------------------------------------- table

#: Pickles the function, given the module that does.
Send = Callable[[Any], bytes]


class ClusterKind(NamedTuple):
    """A way to run tasks on a cluster, and its option."""

    text: str
    run: Callable[[Send, Sequence[ShardTask], str, int], Results]
    address: Callable[[str], str] = str
    settings: Mapping[str, Any] = {}


CLUSTERS = {
    "dask": ClusterKind(f"a Dask scheduler to run on, or '{_LOCAL}' to start a cluster here", _on_dask),
    "ray": ClusterKind(
        "a Ray cluster to run on: host:port of its head, 'auto' for the one of this machine, or nothing to start one",
        _on_ray,
        _ray_address,
        {"nargs": "?", "const": _LOCAL},
    ),
}
