"""What holds for all tests."""

import gc
import multiprocessing
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.kits.readers import DEFAULT_READERS, READERS, reading_with
from tests.kits.torchdata import skip_own_forms
from torchdata_wds import handlers


def pytest_configure() -> None:
    """Takes Ctrl-C as usual, which a shell ignores for tests in the background, and forks by default on Linux."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # From Python 3.14 on that is not the default on Linux. Forked workers have the functions, log files and environment
    # of a test, and start at once; tests of other ways to start workers name them.
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Keeps garbage collection fast, which tests of open files run again and again: it skips what exists already."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _own_sigterm() -> Iterator[None]:
    """Takes back the handler that Ray sets where a test connects by itself: forks of later tests have it too."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skips a test that uses a form of torchdata where torchdata is not installed."""
    try:
        return (yield)
    except AttributeError as error:
        skip_own_forms(error)
        raise


@pytest.fixture(scope="session", autouse=True)
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets whatever asks for a temporary file or keeps an index, examples too, have it where pytest tidies up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    """Lets each test see the warnings that a process logs once, or seldom."""
    handlers.said.clear()
    handlers._warned.clear()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in DEFAULT_READERS else pytest.mark.slow) for name in READERS],
)
def each_reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests with every way in which an archive is read; the rest of the suite has large windows."""
    with reading_with(READERS[request.param]):
        yield
