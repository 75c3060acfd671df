"""Runs of loaders in the ranks of model replicas: two that share a place read the same, the others the rest."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.utils.data
from torch.distributed.device_mesh import init_device_mesh

from tests.kits.ranks import ranks_of, run_ranks
from tests.kits.resume_kit import GRAPHS, SMALL, indexed_shards_in, keys_of, left_of
from tests.kits.shards import text_keys
from tests.kits.torchdata import DataLoader2, StatefulDataLoader, WorkersReadingService
from torchdata_wds import StatefulPipeline, WdsLoader
from torchdata_wds.consumers import Ranks

SCRIPT = """
import sys
from tests.kits import replicas

if __name__ == "__main__":
    replicas.run_script(*sys.argv[1:])
"""

#: Graphs for `SMALL` shards with indexes, and every kind of division that follows the ranks.
NAMES = ("plain", "split", "padded", "in_epochs", "resampled")

SEED = 3


class Run(NamedTuple):
    """What a rank gets from one graph."""

    epochs: list[list[Any]]  # the first two
    state: Any  # after two items of the second
    rest: list[Any]  # what a new loader yields that resumes there
    refusal: str  # why it does not resume from the state of a rank with another place


def as_it_is(item: Any) -> Any:
    return item


def loader_of(kind: str, graph: Any, ranks: Ranks, workers: int, context: str, seed: int | None = SEED) -> Any:
    """A loader of this kind, with the option ranks=."""
    context_option = {"multiprocessing_context": context} if workers else {}
    if kind == "WdsLoader":
        return WdsLoader(graph, workers, seed=seed, ranks=ranks, **context_option)
    if kind == "WorkersReadingService":
        service = WorkersReadingService(workers, seed=seed, ranks=ranks, **context_option)
        return DataLoader2(graph, reading_service=service)
    pipeline = StatefulPipeline(graph, seed=seed, ranks=ranks)
    options = {**context_option, "persistent_workers": True} if workers else {}
    return StatefulDataLoader(pipeline, batch_size=None, num_workers=workers, collate_fn=as_it_is, **options)


def own_state(state: Any) -> Any:
    """The part of a loader's state that is ours."""
    if "reading_service_state" in state:
        return state["reading_service_state"]
    if "_snapshot" in state:
        state = state["_snapshot"]["_worker_snapshots"]["worker_0"]
    return state.get("dataset_state", state)


def sent(state: Any) -> Any:
    """The state as it reaches another process: through JSON, except for DataLoader2's own pickles."""
    return state if "reading_service_state" in state else json.loads(json.dumps(state))


def run_script(folder: str, *arguments: str) -> None:
    """Runs the ranks of `replicas_in`."""
    kind, ranks_by, urls, names, workers, context, world = map(json.loads, arguments)
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    # So long StatefulDataLoader waits for each worker of an iterator that the garbage collector finds; they may not be
    # told that they shall end.
    vars(torch.utils.data._utils)["MP_STATUS_CHECK_INTERVAL"] = 0.5

    def run(rank: int) -> dict[str, Run]:
        ranks = ranks_from(ranks_by)
        return {name: one_run(kind, GRAPHS[name], urls, rank, ranks, workers, context) for name in names}

    run_ranks(run, folder, world)


def ranks_from(ranks_by: str) -> Ranks:
    """The option ranks= of this process: every second rank has the same place."""
    if ranks_by == "mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    if ranks_by == "group":
        own, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        return own
    return "auto"


def one_run(kind: str, graph: Any, urls: list[str], rank: int, ranks: Ranks, workers: int, context: str) -> Run:
    """Two epochs of one loader, and another that resumes in the middle of the second."""

    def new() -> Any:
        return loader_of(kind, graph(urls), ranks, workers, context)

    loader = new()
    first = list(loader)
    again = iter(loader)
    begun = [next(again) for _ in range(2)]
    state = loader.state_dict()
    epochs = [first, begun + list(again)]
    shut_down(loader)
    loader = new()
    loader.load_state_dict(sent(state))
    rest = list(loader)
    shut_down(loader)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    loader = new()
    loader.load_state_dict(sent(states[(rank + len(states) // 2) % len(states)]))
    try:
        refusal = f"none, but {next(iter(loader))}"
    except ValueError as error:
        refusal = str(error).splitlines()[-1]  # without the traceback of a worker
    shut_down(loader)
    return Run(epochs, own_state(state), rest, refusal)


def shut_down(loader: Any) -> None:
    """Ends a loader's workers; StatefulDataLoader ends its own."""
    getattr(loader, "shutdown", int)()


def replicas_in(
    folder: Path, kind: str, ranks_by: str, workers: int, context: str = "fork", names: Sequence[str] = NAMES
) -> list[dict[str, Run]]:
    """What each gloo rank gets from loaders of a kind: 2 x 2 ranks, or just two that divide the work themselves."""
    world = 2 if ranks_by == "auto" else 4
    arguments = (kind, ranks_by, indexed_shards_in(folder), names, workers, context, world)
    return ranks_of(SCRIPT, folder, *map(json.dumps, arguments), world=world)


def check_replicas(found: list[dict[str, Run]], workers: int) -> None:
    """Ranks that share a place have equal items and states; the two places divide each epoch exactly."""
    if len(found) == 4:
        assert found[0] == found[1]
        assert found[2] == found[3]
    keys = text_keys(SMALL)
    one_place, other_place = found[0], found[-1]
    for name in one_place:
        one, other = one_place[name], other_place[name]
        assert one.state != other.state
        assert [[one.rest], [other.rest]] == [left_of(run.epochs, 1, 2, 0) for run in (one, other)]
        assert "rank: 1 then, 0 now" in one.refusal
        assert "rank: 0 then, 1 now" in other.refusal
        assert one.epochs[0] != one.epochs[1]
        for epochs in zip(one.epochs, other.epochs, strict=True):
            mine, yours = map(keys_of, epochs)
            if name == "plain":
                assert sorted(mine + yours) == sorted(keys)
                continue
            assert len(mine) == len(yours)
            assert len(epochs[0]) == len(epochs[1])  # batches
            assert mine != yours
            if name == "split":  # each consumer leaves at most one sample
                assert len(mine) > len(keys) / 2 - max(workers, 1)
                assert len({*mine, *yours}) == len(mine + yours)
            elif name == "padded":
                real = [key for batches in epochs for batch in batches for key, is_pad, _ in batch if not is_pad]
                assert sorted(real) == sorted(keys)
            else:
                assert len(mine) == {"in_epochs": 13, "resampled": 12}[name]
