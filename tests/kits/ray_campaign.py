"""Losses at random moments of an epoch that runs on a cluster, and what has to hold after each.

``python -m tests.kits.ray_campaign SEED COUNT [GRAPH ...]`` runs COUNT losses for each graph.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tests.kits.loss_graphs import GRAPHS, SEED, digests, rest_of, shards_in, undisturbed
from tests.kits.processes import wait_until
from tests.kits.ray_kit import DATA, DataCluster, data_cluster
from torchdata_wds import RayPool, WdsLoader

logger = logging.getLogger(__name__)

WORKERS = 2

#: What is lost. After "both nodes" one joins; after the others, the cluster is made whole once the epoch is over.
LOSSES = ("node", "both nodes", "raylet", "actor", "both actors")

#: When. Seconds are counted from the beginning of the epoch; "item" is one of its items; "state" is while a state is
#: being taken; "between" is after the epoch's end, and before the next.
MOMENTS = ("item", "first", "last", "seconds", "state", "between")


class Event(NamedTuple):
    """A loss, and when it happens."""

    loss: str
    moment: str
    place: float  # the share of the epoch that is over, or how many seconds after its beginning

    def __str__(self) -> str:
        return f"{self.loss} lost at {self.moment} {self.place:.2f}"


def events(seed: int, count: int) -> list[Event]:
    """Losses at random moments; among 20, each loss and each moment come up."""
    rng = random.Random(seed)
    losses = [LOSSES[0]] * (count - len(LOSSES)) + [*LOSSES]
    moments = ["item"] * (count - len(MOMENTS)) + [*MOMENTS]
    rng.shuffle(losses)
    rng.shuffle(moments)
    return [
        Event(loss, moment, rng.uniform(0, 1.5) if moment == "seconds" else rng.random())
        for loss, moment in zip(losses[:count], moments[:count], strict=True)
    ]


class Campaign:
    """Runs a graph on a cluster epoch after epoch, and loses something in each."""

    def __init__(self, cluster: DataCluster, graph: Callable[[list[str]], Any], urls: list[str]) -> None:
        self._cluster = cluster
        self._graph = graph
        self._urls = urls
        self.pool = RayPool(actor_options={"resources": {DATA: 1}})
        self.loader = WdsLoader(graph(urls), WORKERS, seed=SEED, pool=self.pool)

    def run(self, event: Event, expected: list[Any]) -> None:
        """Runs an epoch with a loss in it, and checks its items, and those after a state taken in it."""
        before = self.pool.restarts
        cut = max(0, min(len(expected) - 1, int(event.place * len(expected))))
        cut = {"first": 0, "last": len(expected) - 1}.get(event.moment, cut)
        items = iter(self.loader)
        with self._losing(event) as lose:
            if event.moment == "between":
                assert digests(items) == expected, event
                lose()
                return
            found = [] if event.moment == "first" else digests(islice(items, cut))
            if event.moment != "seconds":
                lose()
            state = self.loader.state_dict()
            found += digests(islice(items, min(3, len(expected) - cut - 1)))
            assert found == expected[: len(found)], event
            later = self.loader.state_dict()
            rest = digests(items)
            assert found + rest == expected, event
        if event.moment in ("item", "first") and cut < len(expected) - 12:  # the last ones may have arrived already
            assert self.pool.restarts > before, event
        assert rest_of(self._graph, self._urls, WORKERS, state) == expected[cut:], event
        assert rest_of(self._graph, self._urls, WORKERS, later) == rest, event

    @contextmanager
    def _losing(self, event: Event) -> Iterator[Callable[[], None]]:
        """Gives what brings the loss about, or does it by itself after some seconds; then makes the cluster whole."""
        joining = threading.Thread(target=self._cluster.add_node)
        begun = threading.Event()

        def lose() -> None:
            self._lose(event.loss)
            if event.loss == "both nodes":
                joining.start()
            begun.set()

        def lose_now() -> None:
            thread = threading.Thread(target=lose)
            thread.start()
            if event.moment != "state":
                thread.join()
            threads.append(thread)

        threads: list[threading.Thread] = []
        timer = threading.Timer(event.place, lose)
        if event.moment == "seconds":
            timer.start()
            threads.append(timer)
        try:
            yield lose_now
        finally:
            for thread in threads:
                thread.join()
            if joining.ident is not None:
                joining.join()
            while len(self._cluster.nodes) < 2:
                self._cluster.add_node()

    def _lose(self, loss: str) -> None:
        cluster = self._cluster
        if loss.endswith(("actor", "actors")):
            for actor in cluster.actors()[: 1 if loss == "actor" else None]:
                with suppress(ProcessLookupError):
                    os.kill(actor.pid, signal.SIGKILL)
        elif loss == "both nodes":
            for node in list(cluster.nodes):
                cluster.kill_node(node)
        else:
            used = {actor.node for actor in cluster.actors()}
            node = next((node for node in cluster.nodes if node.node_id in used), cluster.nodes[0])
            (cluster.kill_raylet if loss == "raylet" else cluster.kill_node)(node)

    def close(self) -> None:
        """Ends the loader, and checks that nothing of it is left in the cluster."""
        self.loader.shutdown()
        assert wait_until(self._cluster.is_empty, 30), self._cluster.left()


def main(seed: int, count: int, *names: str) -> None:
    """Runs a campaign by hand, and stops at the first loss after which something does not hold."""
    logging.basicConfig(format="%(asctime)s %(message).250s")
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, data_cluster() as cluster:
        urls = shards_in(Path(folder))
        for number, name in enumerate(names or GRAPHS):
            campaign = Campaign(cluster, GRAPHS[name], urls)
            expected = undisturbed(GRAPHS[name], urls, WORKERS, count)
            for event, items in zip(events(seed + number, count), expected, strict=True):
                campaign.run(event, items)
                logger.info("%s: %s; %d restarts so far", name, event, campaign.pool.restarts)
            campaign.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
