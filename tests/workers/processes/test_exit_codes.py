"""Workers whose exit codes another part of the program collects: other threads, or the program itself."""

import multiprocessing.popen_fork
import os
import signal
from collections.abc import Iterator

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, is_alive, wait_until
from tests.kits.workers_kit import engine_of
from torchdata_wds import WdsLoader
from torchdata_wds.workers.processes import link

ITEMS = range(4000)


@pytest.fixture
def _late_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a process look alive for some calls after its end, as while another thread collects its exit code."""
    poll = multiprocessing.popen_fork.Popen.poll
    codes: dict[int, int] = {}
    calls: dict[int, int] = {}

    def late_poll(process: multiprocessing.popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
        code = codes.get(process.pid, poll(process, flag))
        if code is not None:
            codes[process.pid] = code
            calls[process.pid] = calls.get(process.pid, 0) + 1
            process.returncode = code if calls[process.pid] > 9 else None
        return process.returncode

    monkeypatch.setattr(multiprocessing.popen_fork.Popen, "poll", late_poll)


@pytest.fixture
def _no_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the system drop the exit code of every child, as a program with a SIGCHLD handler does."""
    monkeypatch.setattr(link, "_SETTLING", 0.1)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def loader() -> WdsLoader[int]:
    return WdsLoader(IterableWrapper(ITEMS).sharding_filter(), 2, seed=1, multiprocessing_context="fork")


@pytest.mark.parametrize(
    "codes", [pytest.param("_late_codes", id="late"), pytest.param("_no_codes", id="lost", marks=pytest.mark.slow)]
)
def test_workers_are_closed_when_exit_codes_are_collected_elsewhere(codes: str, request: pytest.FixtureRequest) -> None:
    """After an epoch and in one."""
    request.getfixturevalue(codes)
    with loader() as whole, loader() as broken:
        assert list(whole) == [*ITEMS]
        next(iter(broken))
    assert not children()


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        pytest.param("_late_codes", "was killed by SIGKILL", id="late"),
        pytest.param("_no_codes", "its exit code is unknown", id="lost", marks=pytest.mark.slow),
    ],
)
def test_dead_worker_is_explained_as_well_as_it_is_known(
    codes: str, message: str, request: pytest.FixtureRequest
) -> None:
    """The epoch goes on from the state, with other workers."""
    request.getfixturevalue(codes)
    with loader() as broken:
        items = iter(broken)
        found = [next(items)]
        killed = engine_of(broken).graph.runs[0]._links[1]._process.pid
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(killed))
        with pytest.raises(RuntimeError, match=rf"worker 1 of 2 \(pid {killed}\) .*{message}"):
            for item in items:
                found.append(item)
        broken.load_state_dict(broken.state_dict())
        assert [*found, *broken] == [*ITEMS]
    assert not children()
