"""A model of trainers that actors of a cluster feed: when each batch is made, lost, made again, and taken.

Each trainer has its own actors. It takes one batch for each step, from its actors strictly in turn, as the package
does, or from whichever has one ready. An actor makes at most `prefetch_factor` batches ahead: it starts batch k + n
once batch k was taken. A host that dies loses the batches on it that were not taken. After a while this is noticed,
its actors start anew on a free host, and each goes on with its first batch that was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fleet", "actors_needed", "simulate", "theory"]

Times = NDArray[np.float64]
MOST_ACTORS = 64  # of a trainer
_BLOCK = 256  # steps for which times are drawn at once


@dataclass(frozen=True)
class Fleet:
    """Trainers, their actors, and what goes wrong. All times are in seconds.

    Attributes:
        step: How long a trainer's step takes, with taking over a batch that is ready.
        trainers: How many trainers.
        actors: How many actors each trainer has.
        hosts: How many hosts the actors of all trainers are on.
        prefetch_factor: How many batches each actor makes ahead.
        in_turn: Whether batches come from the actors in turn; else the one that was ready first comes first.
        together: Whether all trainers take each step together, as the ranks of one job do.
        packed: Whether a trainer's actors are on as few hosts as possible; else they are spread over all.
        latency: From the end of making a batch until the trainer's host has it.
        fetch: How long the trainer waits in each step for a batch to be fetched, if that begins only then.
        deaths: How many hosts die in an hour.
        detection: How long a death stays unnoticed.
        restart: How long a new actor takes until it begins with its first batch.
        slow_hosts: How many hosts are slow.
        slow_factor: How many times as long a batch takes there.
        late: The share of batches that take longer by a number of seconds that is drawn from a Pareto distribution.
        late_from: The least such number.
        late_shape: The exponent of the distribution.
        late_most: The largest such number.
    """

    step: float
    trainers: int = 8
    actors: int = 8
    hosts: int = 8
    prefetch_factor: int = 2
    in_turn: bool = True
    together: bool = False
    packed: bool = False
    latency: float = 0.0
    fetch: float = 0.0
    deaths: float = 0.0
    detection: float = 3.0
    restart: float = 3.0
    slow_hosts: int = 0
    slow_factor: float = 1.5
    late: float = 0.0
    late_from: float = 0.5
    late_shape: float = 1.5
    late_most: float = 30.0

    def places(self) -> NDArray[np.int64]:
        """The host of each actor (column) of each trainer (row)."""
        numbers = np.arange(self.trainers * self.actors).reshape(self.trainers, self.actors)
        return numbers * self.hosts // numbers.size if self.packed else numbers % self.hosts


def theory(fleet: Fleet, service: float) -> float:
    """The share of time in which a trainer waits, if every batch takes the same time and nothing goes wrong."""
    return 1 - fleet.step / max(fleet.step + fleet.fetch, service / fleet.actors)


def simulate(fleet: Fleet, times: Times, *, seconds: float, replicas: int, seed: int) -> float:
    """Returns the share of the trainers' time in which they wait.

    Args:
        fleet: What is simulated.
        times: How long a batch takes in an actor, to draw from.
        seconds: How long each replica of the fleet trains.
        replicas: How many independent replicas there are. There are as many deaths in all as are expected in the time
            of all replicas, at random times on random hosts.
        seed: For everything that is drawn.
    """
    return _Run(fleet, times, max(ceil(seconds / fleet.step), 1), replicas, seed).stall()


def actors_needed(fleet: Fleet, service: float, stall_of: Callable[[Fleet], float], most: float = 0.01) -> int | None:
    """The smallest number of actors of a trainer with which it waits for at most a share of its time.

    Args:
        fleet: What is simulated, with any number of actors.
        service: How long a batch takes on average: fewer actors than follow from this are not tried.
        stall_of: Simulates a fleet.
        most: The share.

    Returns:
        The number; None if not even `MOST_ACTORS` bring the share down so far.
    """
    low = ceil(service * (1 - most) / fleet.step) - 1  # too few
    high = low + 1
    while stall_of(replace(fleet, actors=high)) > most:
        if high == MOST_ACTORS:
            return None
        low, high = high, min(high + max(1, high // 4), MOST_ACTORS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stall_of(replace(fleet, actors=middle)) <= most else (middle, high)
    return high


class _Run:
    """One simulation.

    The last axis of all arrays has the trainers of all replicas: the loop is over their steps, and in each of its
    rounds every trainer takes one batch.
    """

    def __init__(self, fleet: Fleet, times: Times, steps: int, replicas: int, seed: int) -> None:
        self._fleet = fleet
        self._times = times
        self._steps = steps
        self._replicas = replicas
        self._rng = np.random.default_rng(seed)
        self._rows = np.arange(replicas * fleet.trainers)
        self._hosts = np.tile(fleet.places().T, replicas)
        self._factors = np.where(self._hosts < fleet.slow_hosts, fleet.slow_factor, 1.0)
        self._deaths = self._draw_deaths()
        # The next death of each actor's host that it has not been through, and the first of all.
        numbers = np.ndindex(self._hosts.shape)
        self._doom = np.array([self._next_death(*place, 0.0) for place in numbers]).reshape(self._hosts.shape)
        self._first = self._doom.min()
        self._busy = np.zeros(self._hosts.shape)  # until when an actor makes batches
        self._ready = np.zeros((fleet.actors, fleet.prefetch_factor, len(self._rows)))  # when the next can be taken
        for number in range(fleet.prefetch_factor):
            self._busy += self._draw(self._busy.shape) * self._factors
            self._ready[:, number] = self._busy + fleet.latency

    def stall(self) -> float:
        """Runs it."""
        fleet = self._fleet
        warm = min(2 * fleet.actors * fleet.prefetch_factor, self._steps)
        free = begun = np.zeros(len(self._rows))  # when each trainer has ended its step
        drawn: Iterator[Times] = iter(())
        for number in range(warm + self._steps):
            if number % _BLOCK == 0:
                drawn = iter(self._draw((_BLOCK, len(self._rows))))
            if number == warm:
                begun = free
            if fleet.in_turn:
                free = self._take_from(number % fleet.actors, free, next(drawn))
            else:
                free = self._take_first(free, next(drawn))
            free += fleet.fetch
            if fleet.together:
                free = free.reshape(self._replicas, -1).max(axis=1).repeat(fleet.trainers)
            free = free + fleet.step
        return float(1 - self._steps * fleet.step * len(free) / (free - begun).sum())

    def _take_from(self, actor: int, free: Times, drawn: Times) -> Times:
        """All trainers take a batch from one of their actors, which then makes another; returns when they do."""
        ready, busy = self._ready[actor], self._busy[actor]
        taken = np.maximum(free, ready[0])
        while self._first <= taken.max() and len(lost := np.flatnonzero(self._doom[actor] <= taken)):
            for row in lost:
                self._die(actor, row)
            taken = np.maximum(free, ready[0])
        ready[:-1] = ready[1:]
        np.maximum(busy, taken, out=busy)
        busy += drawn * self._factors[actor]
        np.add(busy, self._fleet.latency, out=ready[-1])
        return taken

    def _take_first(self, free: Times, drawn: Times) -> Times:
        """The same from the actor whose batch was ready first, another one for each trainer."""
        heads, rows = self._ready[:, 0], self._rows
        taken = np.maximum(free, heads.min(axis=0))
        while self._first <= taken.max() and len(lost := np.argwhere(self._doom <= taken)):
            for actor, row in lost:
                self._die(actor, row)
            taken = np.maximum(free, heads.min(axis=0))
        chosen = heads.argmin(axis=0)
        for number in range(self._fleet.prefetch_factor - 1):
            self._ready[chosen, number, rows] = self._ready[chosen, number + 1, rows]
        busy = np.maximum(self._busy[chosen, rows], taken) + drawn * self._factors[chosen, rows]
        self._busy[chosen, rows] = busy
        self._ready[chosen, -1, rows] = busy + self._fleet.latency
        return taken

    def _die(self, actor: int, row: int) -> None:
        """An actor dies with its host; its successor makes the batches again that were not taken."""
        at, fleet = self._doom[actor, row], self._fleet
        made = self._draw((fleet.prefetch_factor,)) * self._factors[actor, row]
        made = at + fleet.detection + fleet.restart + made.cumsum()
        self._ready[actor, :, row] = made + fleet.latency
        self._busy[actor, row] = made[-1]
        self._doom[actor, row] = self._next_death(actor, row, at)
        self._first = self._doom.min()

    def _draw(self, shape: tuple[int, ...]) -> Times:
        """Draws how long batches take on a host that is not slow."""
        drawn = self._times[self._rng.integers(len(self._times), size=shape)]
        if self._fleet.late:
            late = np.flatnonzero(self._rng.random(drawn.size) < self._fleet.late)
            more = self._fleet.late_from * (1 + self._rng.pareto(self._fleet.late_shape, len(late)))
            drawn.flat[late] += np.minimum(more, self._fleet.late_most)
        return drawn

    def _draw_deaths(self) -> list[list[list[float]]]:
        """The times at which each host of each replica dies, in order."""
        fleet, seconds = self._fleet, self._steps * self._fleet.step
        deaths: list[list[list[float]]] = [[[] for _ in range(fleet.hosts)] for _ in range(self._replicas)]
        # Neither early nor late, so that all that a death costs falls into the time that counts.
        for _ in range(round(fleet.deaths * self._replicas * seconds / 3600)):
            replica, host = self._rng.integers(self._replicas), self._rng.integers(fleet.hosts)
            deaths[replica][host].append(self._rng.uniform(0.1, 0.8) * seconds)
        for of_replica in deaths:
            for of_host in of_replica:
                of_host.sort()
        return deaths

    def _next_death(self, actor: int, row: int, after: float) -> float:
        times = self._deaths[row // self._fleet.trainers][self._hosts[actor, row]]
        return next((time for time in times if time > after), np.inf)
