"""The simulated fleet: as in theory, as a plain simulation of one trainer, and as the script prints it."""

import heapq
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_benchmarks import BENCHMARKS, check_table, rows, run

sys.path.append(str(BENCHMARKS))  # after all others: no script hides a library
from fleet_model import Fleet, actors_needed, simulate, theory

sys.path.remove(str(BENCHMARKS))

TIMES = np.array([0.07, 0.1, 0.1, 0.3])


def stall(fleet: Fleet, times: Any = (0.1,), *, seconds: float = 10, replicas: int = 2) -> float:
    """The share of waiting."""
    return simulate(fleet, np.array(times), seconds=seconds, replicas=replicas, seed=0)


@pytest.mark.parametrize("in_turn", [True, False])
def test_simulation_is_as_in_theory_when_nothing_varies(in_turn: bool) -> None:
    """The share is 1 - actors * rate / demand, and 0 from the number of actors on that keeps up."""
    for actors, expected in ((1, 0.8), (2, 0.6), (4, 0.2), (5, 0.0), (9, 0.0)):
        for prefetch_factor in (1, 3):
            fleet = Fleet(0.02, 2, actors, in_turn=in_turn, prefetch_factor=prefetch_factor)
            assert theory(fleet, 0.1) == pytest.approx(expected)
            assert stall(fleet) == pytest.approx(expected, abs=1e-6)


def test_batch_that_is_fetched_only_when_it_is_taken_costs_its_way_each_step() -> None:
    """A latency costs nothing as soon as there are actors to spare; in a step it always costs."""
    assert stall(Fleet(0.02, actors=8, latency=0.03)) == pytest.approx(0, abs=1e-6)
    fleet = Fleet(0.02, actors=8, fetch=0.005)
    assert stall(fleet) == pytest.approx(0.2) == pytest.approx(theory(fleet, 0.1))


def wait_of_one(fleet: Fleet, steps: int, seed: int) -> float:
    """The share of waiting of one trainer, by events: actors that end a batch, and a trainer that ends a step."""
    rng = np.random.default_rng(seed)
    numbers = count()
    ready: list[list[int]] = [[] for _ in range(fleet.actors)]  # the order in which batches were ready
    is_busy = [True] * fleet.actors
    events = [(rng.choice(TIMES), next(numbers), actor) for actor in range(fleet.actors)]
    heapq.heapify(events)
    trainer, taken, waits, waited = fleet.actors, 0, True, 0.0
    since = 0.0
    while taken < steps:
        now, _, who = heapq.heappop(events)
        if who == trainer:
            waits, since = True, now
        else:
            ready[who].append(next(numbers))
            is_busy[who] = False
        if waits:
            first = min(range(fleet.actors), key=lambda actor: ready[actor][0] if ready[actor] else next(numbers))
            chosen = taken % fleet.actors if fleet.in_turn else first
            if ready[chosen]:
                del ready[chosen][0]
                taken, waits, waited = taken + 1, False, waited + now - since
                heapq.heappush(events, (now + fleet.step, next(numbers), trainer))
        for actor in range(fleet.actors):
            if not is_busy[actor] and len(ready[actor]) < fleet.prefetch_factor:
                is_busy[actor] = True
                heapq.heappush(events, (now + rng.choice(TIMES), next(numbers), actor))
    return waited / (waited + steps * fleet.step)


@pytest.mark.parametrize(("in_turn", "prefetch_factor"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_simulation_agrees_with_one_by_events_when_batches_vary(in_turn: bool, prefetch_factor: int) -> None:
    """Two programs that share no line give the same share, between what theory says and twice that."""
    fleet = Fleet(0.05, 1, 3, in_turn=in_turn, prefetch_factor=prefetch_factor)
    by_events = wait_of_one(fleet, 4_000, seed=1)
    assert stall(fleet, TIMES, seconds=25, replicas=40) == pytest.approx(by_events, abs=0.015)
    assert by_events > theory(fleet, TIMES.mean()) - 0.015


def test_death_of_a_host_costs_what_it_takes_to_notice_and_start() -> None:
    """In turn, each trainer with an actor there waits; if any batch will do, nobody does; packed, one trainer waits."""
    fleet = Fleet(0.02, trainers=4, hosts=4, deaths=60.0)  # a death in the minute that is simulated
    spread = 60 * stall(fleet, seconds=30)
    assert 5.5 < spread < 6.5
    for options, share in (
        ({"in_turn": False}, 0.0),
        ({"packed": True}, 0.25),
        ({"packed": True, "together": True}, 1),
    ):
        assert 60 * stall(Fleet(0.02, 4, hosts=4, deaths=60.0, **options), seconds=30) == pytest.approx(
            share * spread, abs=0.2
        )


def test_fewest_actors_are_found_and_none_if_no_number_is_enough() -> None:
    """Without variance they follow from theory; a host that is slower by a factor needs more actors by that factor."""
    assert actors_needed(Fleet(0.02), 0.1, stall) == 5
    assert actors_needed(Fleet(0.02, slow_hosts=1), 0.1, stall) == 8
    assert actors_needed(Fleet(0.02, fetch=0.001), 0.1, stall) is None


@pytest.mark.slow
def test_fleet_shows_each_trouble_and_what_it_needs(tmp_path: Path) -> None:
    """The measured run prints its times; all tables have their rows."""
    printed, content = run("fleet.py", tmp_path / "shards", tmp_path, "--measure")
    check_table(printed, content)
    assert "seconds of a batch, quantiles: 0." in printed
    kinds = [{row["kind"] for row in table["rows"]} for table in content["tables"]]
    assert kinds[0] == kinds[1] > {"nothing goes wrong", "all of these"}
    assert ("nothing goes wrong", "8 actors") in rows(content)
    assert len(content["tables"]) == 4
