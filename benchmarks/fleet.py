"""Trainers that a cluster's actors feed, simulated: how long they wait, and how many actors each of them needs.

    python benchmarks/fleet.py [--measure] [--real] [--step SECONDS] [--quick] [--json FILE] [--chart FILE]

Nothing of a cluster runs: `fleet_model.py` is the model. It draws the time of a batch from times measured on one core
of one machine (64 JPEGs of 400x400 decoded, cropped to 224x224 and collated; `--measure` measures them anew), and adds
what a message costs. The rest are assumptions: the step, the network, and everything in `TROUBLES`.

Trainers are each on their own, or take each step together, as the ranks of one job do: then all wait for the slowest.
Batches come in turn, as in the package, or from whichever actor has one ready, which no seed could repeat.
`--real` compares the model with actors of a Ray cluster that is started here, whose items sleep.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from fleet_model import MOST_ACTORS, Fleet, actors_needed, simulate, theory
from harness import finish, parse
from report import Report, Row, Table, note

#: Quantiles (0, 0.1, ... 1) of the seconds that an actor takes for a batch, by ``python benchmarks/fleet.py --measure``
#: on one core of a virtual machine, with simplejpeg 1.9.0 and Pillow 13.0.0.
BATCH_TIMES = (0.1197, 0.1290, 0.1317, 0.1347, 0.1388, 0.1416, 0.1436, 0.1514, 0.1651, 0.1725, 0.1882)
BATCH_BYTES = 64 * 224 * 224 * 3
SEND = 0.0045  # seconds for a message of 10 MB in Ray 2.60, on one host, of which 0.0006 are for the message itself
NETWORK = 1.25e9  # bytes a second: 10 Gbit/s
STEP = 0.02  # 3,200 images a second
HOSTS = 8
ACTORS = (7, 8, 10, 12, 16)
FACTORS = (1, 2, 4, 8, 16)  # of prefetching
DEATHS = 8  # that are simulated to see what one costs
MOST = 0.01  # of a trainer's time

TROUBLES: dict[str, dict[str, Any]] = {
    "nothing goes wrong": {},
    "a host dies each hour": {"deaths": 1.0},
    "1 batch in 10,000 is 0.5 to 30 s late": {"late": 1e-4},
    "1 of 8 hosts takes 1.5 times as long": {"slow_hosts": 1},
}
TROUBLES["all of these"] = {name: value for trouble in TROUBLES.values() for name, value in trouble.items()}
WAYS: dict[str, dict[str, bool]] = {
    "in turn": {},
    "in turn, together": {"together": True},
    "any ready": {"in_turn": False},
    "any ready, together": {"in_turn": False, "together": True},
}


def _percent(name: str) -> str:
    return f"{{{name}:.2%}}"


WAIT_COLUMNS = {"kind": "{kind}", "contender": "{contender}", "in theory": "{theory}"} | {
    way: _percent(way) for way in WAYS
}
NEED_COLUMNS = {"kind": "{kind}", "contender": "{contender}"} | {way: f"{{{way}}}" for way in WAYS}
FACTOR_COLUMNS = {"kind": "{kind}", "contender": "{contender}"} | {way: _percent(way) for way in WAYS}
REAL_COLUMNS = {"kind": "{kind}", "contender": "{contender}"} | {
    name: _percent(name) for name in ("measured", "simulated")
}
DEATH_COLUMNS = {"kind": "{kind}", "contender": "{contender}", "seconds": "{seconds:.2f}"}


class Plan(NamedTuple):
    """What is simulated, and how much of it.

    Attributes:
        base: The fleet without troubles.
        times: Seconds of batches, to draw from.
        seconds: How long each replica trains.
        replicas: How many replicas.
        rounds: With how many seeds.
    """

    base: Fleet
    times: tuple[float, ...]
    seconds: float
    replicas: int
    rounds: int

    def stall_of(self, fleet: Fleet) -> float:
        """The share of waiting, the mean of all rounds."""
        return mean(_stall(fleet, self.times, self.seconds, self.replicas, seed) for seed in range(self.rounds))


@cache
def _stall(fleet: Fleet, times: tuple[float, ...], seconds: float, replicas: int, seed: int) -> float:
    return simulate(fleet, np.array(times), seconds=seconds, replicas=replicas, seed=seed)


def wait_rows(plan: Plan, service: float) -> Iterator[Row]:
    """How long trainers wait, by trouble and number of actors."""
    for trouble, options in TROUBLES.items():
        note(f"waiting: {trouble}")
        for actors in ACTORS:
            fleet = replace(plan.base, actors=actors, **options)
            figures = {way: plan.stall_of(replace(fleet, **how)) for way, how in WAYS.items()}
            expected = "" if options else f"{theory(fleet, service):.2%}"
            yield {"kind": trouble, "contender": f"{actors} actors", "theory": expected, **figures}


def need_rows(plan: Plan, service: float) -> Iterator[Row]:
    """How many actors a trainer needs, by trouble and prefetching."""
    for trouble, options in TROUBLES.items():
        note(f"actors needed: {trouble}")
        for factor in (2, 8):
            fleet = replace(plan.base, prefetch_factor=factor, **options)
            needed = {
                way: actors_needed(replace(fleet, **how), service, plan.stall_of, MOST) for way, how in WAYS.items()
            }
            shown = {way: number or f"over {MOST_ACTORS}" for way, number in needed.items()}
            bar = needed["in turn"] or MOST_ACTORS
            yield {"kind": trouble, "contender": f"prefetch_factor={factor}", **shown, "bar": bar}


def factor_rows(plan: Plan) -> Iterator[Row]:
    """What making more batches ahead brings."""
    trouble = list(TROUBLES)[2]
    fleet = replace(plan.base, actors=10, **TROUBLES[trouble])
    for factor in FACTORS:
        figures = {way: plan.stall_of(replace(fleet, prefetch_factor=factor, **how)) for way, how in WAYS.items()}
        yield {"kind": f"10 actors, {trouble}", "contender": f"prefetch_factor={factor}", **figures}


def death_rows(plan: Plan) -> Iterator[Row]:
    """How long a trainer waits because one host died: the mean of all trainers, whether it fed them or not."""
    hours = plan.replicas * plan.seconds / 3600
    for packed, detection in ((False, 3.0), (True, 3.0), (False, 20.0)):
        spread = "on as few hosts as possible" if packed else "spread over all hosts"
        for way, how in WAYS.items():
            fleet = replace(plan.base, actors=10, packed=packed, detection=detection, **how)
            more = plan.stall_of(replace(fleet, deaths=DEATHS / hours)) - plan.stall_of(fleet)
            kind = f"10 actors, {spread}, noticed after {detection:.0f} s"
            yield {"kind": kind, "contender": way, "seconds": more * hours * 3600 / DEATHS}


def real_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """How long one trainer waits for real actors, and in the model."""
    from fleet_times import ITEM_TIMES, measure_waiting

    step = 0.03
    for actors in (2, 3, 4):
        note(f"real: {actors} actors")
        fleet = Fleet(step, trainers=1, actors=actors, hosts=1)
        simulated = _stall(fleet, ITEM_TIMES, 600.0, 20, 0)
        measured = mean(measure_waiting(actors, step, 10 if arguments.quick else 400) for _ in range(arguments.rounds))
        yield {"kind": "1 trainer", "contender": f"{actors} actors", "measured": measured, "simulated": simulated}


def main() -> None:
    """Simulates."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--measure", action="store_true", help="measure the times of batches on this machine")
        parser.add_argument("--real", action="store_true", help="compare the model with actors on this machine")
        parser.add_argument(
            "--step", type=float, default=STEP, help="seconds of a trainer's step (default: %(default)s)"
        )

    arguments = parse(__doc__, rounds=1, add=add)
    report = Report("fleet", quick=arguments.quick)
    times: Any = BATCH_TIMES
    if arguments.measure:
        from fleet_times import measure_batches

        times = measure_batches(arguments.folder, quick=arguments.quick)
        print("seconds of a batch, quantiles:", ", ".join(f"{time:.4f}" for time in times))
    # A thousand times with these quantiles.
    drawn = np.interp(np.linspace(0, 1, 1000), np.linspace(0, 1, len(times)), times) + SEND
    base = Fleet(step=arguments.step, hosts=HOSTS, latency=BATCH_BYTES / NETWORK)
    replicas, seconds = (2, 4.0) if arguments.quick else (60, 60.0)
    plan = Plan(base, tuple(drawn.tolist()), seconds, replicas, arguments.rounds)
    service = float(drawn.mean())
    fleet = f"{base.trainers} trainers with a step of {1e3 * base.step:g} ms, batches of {1e3 * service:.0f} ms"
    rows = [*wait_rows(plan, service)]
    report.tables.append(
        Table(f"The share of time that trainers wait: {fleet}", WAIT_COLUMNS, rows, "in turn", "share")
    )
    title = f"Actors of each trainer that waits for at most {MOST:.0%} of its time"
    report.tables.append(Table(title, NEED_COLUMNS, [*need_rows(plan, service)], "bar", "actors, in turn"))
    title = "The share of waiting, by the number of batches that each actor makes ahead"
    report.tables.append(Table(title, FACTOR_COLUMNS, [*factor_rows(plan)], "in turn", "share"))
    title = "Seconds that a trainer waits because one host died (the mean of all trainers)"
    report.tables.append(Table(title, DEATH_COLUMNS, [*death_rows(plan)], "seconds", "seconds"))
    if arguments.real:
        title = "The share of time that one trainer waits for actors whose items sleep"
        report.tables.append(Table(title, REAL_COLUMNS, [*real_rows(arguments)], "measured", "share"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
