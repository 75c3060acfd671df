"""Runs inside a worker process: the loop that answers orders, and the transport of exceptions to the main process."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]  # mypy does not know it
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe

from torchdata_wds.consumers import divide
from torchdata_wds.garbage import leave_garbage
from torchdata_wds.handlers import said, with_notes
from torchdata_wds.pipes.notes import note_source_failure
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.resume_facts import Fact
from torchdata_wds.pipes.samples.collate import stack_in
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.process_place import Place
from torchdata_wds.workers.interrupts import ignore_interrupts
from torchdata_wds.workers.processes.messages import Sender
from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool
from torchdata_wds.workers.resume.stream import Point, Stream, WorkerFunctions
from torchdata_wds.workers.stats.sampling.snapshot import SnapshotMemory
from torchdata_wds.workers.stats.sampling.tally import Tally
from torchdata_wds.workers.stats.stalls.stack_file import StackFile


class NoticeBoard(ctypes.Structure):
    """Values in shared memory through which the main process tells its workers what is current."""

    # The number of the current order (work on any other is dropped), and whether the workers should end.
    _fields_ = (("turn", ctypes.c_uint64), ("closing", ctypes.c_bool))


class Failure:
    """An exception on its way to the main process, in place of an item; `where` names the process."""

    __slots__ = ("pickled", "summary", "text")
    dumps: ClassVar[Callable[[Any], bytes]] = pickle.dumps  # what pickles exceptions in this process

    def __init__(self, error: BaseException, where: str) -> None:
        self.text = f'\n"""\nIn {where}:\n{"".join(traceback.format_exception(error))}"""'
        self.summary = f"{type(error).__qualname__} in {where}: {with_notes(error)}"
        self.pickled = _pickled(error)

    def reraise(self) -> NoReturn:
        """Raises the exception, or a RuntimeError that quotes it if it cannot be rebuilt here."""
        error = _rebuilt(self.pickled)
        raise error or RuntimeError(self.summary) from RemoteTraceback(self.text)


def _pickled(error: BaseException) -> bytes | None:
    # An exception whose constructor does not take its args can be pickled, but not unpickled, or only to another text:
    # pickle calls Exit(*args), so that Exit(7) with the text "code 7" becomes "code code 7". Its parts stay.
    found = None
    for form in (error, (type(error), error.args, vars(error))):
        try:
            data = Failure.dumps(form)
        except Exception:  # noqa: BLE001  # any attribute may fail to pickle
            continue
        if (copy := _rebuilt(data)) is not None:
            if str(copy) == str(error):
                return data
            found = found or data
    return found


def _rebuilt(data: bytes | None) -> BaseException | None:
    try:
        error = None if data is None else pickle.loads(data)
        if isinstance(error, tuple):
            kind, arguments, attributes = error
            error = kind.__new__(kind, *arguments)
            error.args = arguments
            vars(error).update(attributes)
    except Exception:  # noqa: BLE001  # runs the exception's own code
        return None
    return error if isinstance(error, BaseException) else None


#: How often, in seconds, a worker checks whether it should end; it notices the death of its parent at once.
CHECK_INTERVAL = 0.5
_SWITCHES = 0.0001  # seconds after which a thread that asks for the interpreter gets it: see `sampler.SWITCHES`
GRACE = 1.5  # how long, in seconds, a closing worker may take to finish its current item


class Order(NamedTuple):
    """A request of the main process to a worker: the stream of one pass over the graph."""

    turn: int  # its number, on the notice board while the order is current
    seeds: Seeds  # the seed shared by all workers, and the one from which this set of workers derives its own
    point: Point | None = None  # where the stream resumes; None to begin it
    epoch: int = 0  # its number, from 0
    #: The worker's first order, which it may never have taken up. Where ``wds_epoch`` goes on from epoch to epoch, the
    #: stream begins there all the same: the others have begun it with those seeds.
    first: Order | None = None
    trace: str | None = None  # the folder of the running trace


class Imports:
    """Imports torchdata where it is unpickled, if it is imported here: the pipes' own imports of it would warn."""

    def __reduce__(self) -> tuple[Any, ...]:
        name = "torchdata_wds.workers.service"
        return (importlib.import_module, (name,)) if name in sys.modules else (str, ())


class WorkerGraph:
    """The part of a graph that a set of workers runs."""

    def __init__(self, datapipe: DataPipe, functions: WorkerFunctions) -> None:
        self.functions = functions
        self.datapipe: Any = datapipe
        self._stream: Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        # torch's wrapper uses dill, if installed, for what pickle cannot handle (lambdas).
        packed = _IterDataPipeSerializationWrapper(self.datapipe)  # type: ignore[no-untyped-call]
        first = {"imports": Imports()}
        return {**first, **vars(self), "datapipe": packed, "_stream": None, "said": frozenset(said)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        said.update(state.pop("said"))
        del state["imports"]
        vars(self).update(state, datapipe=state["datapipe"]._datapipe)

    def prepare(self, order: Order, worker: int, workers: int) -> None:
        """Seeds what augmentations draw from, and sets what ``get_worker_info`` returns, for lack of a public way."""
        random.seed(mix(order.seeds[1], worker, "random"))
        np.random.seed(mix(order.seeds[1], worker, "numpy") >> 32)
        seed = mix(order.seeds[1], worker, "torch")
        torch.manual_seed(seed)
        info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=self.datapipe)
        torch_worker._worker_info = info

    def items(self, order: Order, worker: int, workers: int) -> Generator[Any, None, None]:
        """Yields the items of one worker; an exception ends the stream, as a `Failure` in place of an item."""
        try:
            if self._stream is None:
                divide(self.datapipe, Place(workers, worker), SHARDING_PRIORITIES.MULTIPROCESSING)
                functions = self.functions
                self.datapipe = functions.initialized(self.datapipe, workers, worker)
                self._stream = Stream(
                    self.datapipe,
                    reset=lambda datapipe, seeds, _: functions.reset_for(datapipe, workers, worker, seeds),
                )
                if (first := order.first) is not None:
                    with closing(self._stream.items(first.seeds, worker, first.point, first.epoch)) as begun:
                        next(begun, None)
            yield from self._stream.items(order.seeds, worker, order.point, order.epoch)
        except Exception as error:  # noqa: BLE001  # raised again in the main process
            note_source_failure(error)
            yield Failure(error, _where())

    def end(self) -> Any:
        """Returns the last pipe of the graph that runs."""
        return self.datapipe if self._stream is None else self._stream.datapipe

    def facts(self) -> list[Fact]:
        """Returns what the graph has reported since the last call."""
        return [] if self._stream is None else self._stream.facts()


def run_worker(
    stacks: StackFile,
    graph: WorkerGraph,
    worker: int,
    workers: int,
    connection: Connection,
    credits: Any,
    limits: Limits,
    board: NoticeBoard,
    answered: Any,
    memory: SnapshotMemory,
) -> None:
    """Answers the orders of the main process until it hangs up; sets `answered` to the number of the last order.

    Its threads' stacks are written to `stacks` on request, and what it has done to `memory`.
    """
    stacks.register()
    leave_garbage()
    ignore_interrupts()
    # The program's own handler, inherited by a fork, would prevent the worker from being terminated.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_guard, args=(board,), name="wds-guard", daemon=True).start()
    torch.set_num_threads(1)  # as in torch's own workers, which share the cores
    segments = SegmentPool(limits)
    stack_in(segments.lend)
    sys.setswitchinterval(_SWITCHES)
    tally = Tally(memory.write)
    sender = Sender(connection, credits, segments, graph.facts, tally)
    # These mean that the main process has hung up.
    with suppress(KeyboardInterrupt, EOFError, ConnectionError):
        while not board.closing:
            order: Order = connection.recv()
            answered.value = order.turn
            graph.prepare(order, worker, workers)
            tally.trace(order.trace, worker, workers)
            tally.begin(graph.end)
            with closing(graph.items(order, worker, workers)) as items:
                _answer(order, items, sender, board, tally)
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        _end_at_once()


def _end_at_once() -> NoReturn:
    """Ends a spawned process as a forked one ends: its interpreter would take torch apart for up to a second."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    multiprocessing.util._flush_std_streams()  # type: ignore[attr-defined]
    os._exit(0)


def _answer(order: Order, items: Iterator[Any], sender: Sender, board: NoticeBoard, tally: Tally) -> None:
    """Sends the items of an order while it is current, and then their end, for which a thread may still wait."""
    sender.begin(order.turn)
    while True:
        sender.wait_for_room()
        if board.turn != order.turn:
            break
        try:
            item = next(items)
        except StopIteration:
            break
        try:
            sender.add(item)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  # pickling may raise anything
            sender.add(unsent(item, error))
            break
    tally.end()  # before the main process knows that the stream has ended
    sender.finish()


def unsent(item: Any, error: Exception) -> Failure:
    """Returns what takes the place of an item that cannot be pickled."""
    explained = RuntimeError(
        f"{_where()} could not send an item of type {type(item).__qualname__} to the main process: "
        f"{type(error).__name__}: {error}. Yield bytes, arrays, tensors or plain Python objects, or move the "
        "stage that makes it after .join_workers()"
    )
    explained.__cause__ = error
    return Failure(explained, _where())


def _where() -> str:
    worker = get_worker_info()
    return f"worker {worker.id if worker else 0} (pid {os.getpid()})"


def _guard(board: NoticeBoard) -> None:
    """Ends this process if its parent has died, or if it should close and does not."""
    # The main thread cannot, while it waits for a source or for room in a connection that is no longer read.
    parent = multiprocessing.parent_process()
    assert parent is not None
    starter, is_orphan = os.getppid(), False
    while not (is_orphan or board.closing):
        # The parent's id is checked too, because a process forked later may hold the sentinel's other end open.
        is_orphan = bool(wait([parent.sentinel], CHECK_INTERVAL)) or os.getppid() != starter
    storage = sys.modules.get("torchdata_wds.storage")  # a process that never loaded it runs no commands
    if storage is not None:
        storage.kill_commands()  # the main thread may be waiting for one
    if not is_orphan:
        time.sleep(GRACE)
    os._exit(1 if is_orphan else 0)
