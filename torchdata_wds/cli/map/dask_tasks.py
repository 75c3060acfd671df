"""A function over shards on a Dask cluster."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchdata_wds.cli.map.shard_tasks import ShardFunction, ShardTask, absolute, error_text, run_task
from torchdata_wds.codecs.options import import_optional

LOCAL = "local"

# They are installed where the work is done, and too large to be sent there.
_NEVER_SENT = {__name__.partition(".")[0], "__main__"}


def run_on_dask(
    function: ShardFunction, tasks: Sequence[ShardTask], address: str, *, num_workers: int, folder: str
) -> Generator[tuple[ShardTask, str], None, None]:
    """Runs a function over shards on a Dask cluster.

    Local shards must be reachable under the same path everywhere. The function is sent by value with those modules of
    a folder that it needs, so that the workers do not need that folder; everything else must be installed there.

    The address is the scheduler's, such as ``tcp://host:8786``, or ``local`` for a cluster of `num_workers` processes
    on this machine. Tasks come with "" or what failed, as they are ready.
    """
    distributed = import_optional("distributed", extra="dask", fields="functions on a Dask cluster")
    data = _by_value(function, Path(folder))
    with _connected(distributed, address, num_workers) as client:
        futures = {client.submit(_run_sent, data, absolute(task), pure=False): task for task in tasks}
        try:
            for future in distributed.as_completed(futures):
                try:
                    problem: str = future.result()
                except Exception as error:  # noqa: BLE001 - the cluster's own: a worker that is killed repeatedly, say
                    problem = error_text(error)
                yield futures[future], problem
        finally:
            client.cancel([future for future in futures if not future.done()])


def _run_sent(data: bytes, task: ShardTask) -> str:
    """Runs in a worker of the cluster."""
    return run_task(functools.partial(pickle.loads, data), task)


@contextlib.contextmanager
def _connected(distributed: Any, address: str, num_workers: int) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if address == LOCAL:
            cluster = distributed.LocalCluster(
                n_workers=num_workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
            )
            address = stack.enter_context(cluster).scheduler_address
        try:
            # a client that cannot be made complains later, in words of its own
            if not address:
                raise ValueError("it is empty")
            distributed.comm.registry.get_backend(distributed.comm.parse_address(address)[0])
            client = distributed.Client(address)
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no Dask scheduler answers at {address!r}: {error}") from error
        yield stack.enter_context(client)


def _by_value(function: ShardFunction, folder: Path) -> bytes:
    """Pickles a function so that the modules of a folder are not needed where it is unpickled."""
    cloudpickle = import_optional("cloudpickle", extra="dask", fields="functions on a Dask cluster")
    with contextlib.ExitStack() as stack:
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
