"""The memory and processor time of this process and of the workers that it has started."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

_INTERVAL = 0.1  # seconds between two looks at the memory
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """What a run needed; None where the system does not tell."""

    processors: float | None  # how many were busy on average, in all processes
    others: float | None  # how many other programs of the machine kept busy
    main_memory: int | None  # the most bytes that were resident in this process
    worker_memory: int | None  # the same of the worker that had the most
    memory: int | None  # bytes of all processes at the end; those that they share, such as libraries, count once


class ProcessUse:
    """Watches this process and its new children inside the context."""

    def __init__(self) -> None:
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._most: dict[int, int] = {}
        self._cpu = self._machine = 0.0
        self._since = time.perf_counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wds-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def restart(self) -> None:
        """Counts processor time from now on."""
        self._since, self._cpu, self._machine = time.perf_counter(), self._cpu_now() or 0.0, _cpu_of_all() or 0.0

    def use(self) -> Use:
        """Returns what was used; to be called while the workers run."""
        seconds, cpu, machine = time.perf_counter() - self._since, self._cpu_now(), _cpu_of_all()
        processors = None if cpu is None else (cpu - self._cpu) / seconds
        busy = None if machine is None else (machine - self._machine) / seconds
        self._look()
        own = os.getpid()
        workers = [most for pid, most in self._most.items() if pid != own]
        shares = [_share(pid) for pid in self._pids()]
        return Use(
            processors,
            None if busy is None or processors is None else max(busy - processors, 0.0),
            self._most.get(own),
            max(workers, default=None),
            sum(share for share in shares if share) if all(shares) else None,
        )

    def _pids(self) -> list[int]:
        children = [child.pid for child in multiprocessing.active_children()]
        return [os.getpid(), *(pid for pid in children if pid and pid not in self._others)]

    def _cpu_now(self) -> float | None:
        workers = [_cpu_of(pid) for pid in self._pids()[1:]]
        known = [seconds for seconds in workers if seconds is not None]
        return time.process_time() + sum(known) if len(known) == len(workers) else None

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        for pid in self._pids():
            if resident := _resident(pid):
                self._most[pid] = max(resident, self._most.get(pid, 0))


def _resident(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return None


def _share(pid: int) -> int | None:
    """Returns a process's resident bytes, each divided by the number of processes that share it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return None


def _cpu_of(pid: int) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        # the name, in parentheses, may contain blanks: user and system time are fields 14 and 15
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return None


def _cpu_of_all() -> float | None:
    """Returns the seconds that all processors of the machine have worked."""
    with suppress(OSError, ValueError, IndexError):
        # user, nice, system, idle, waiting for disks, interrupts (twice), stolen by other machines
        times = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
        return (sum(times) - times[3] - times[4]) / _TICKS
    return None
