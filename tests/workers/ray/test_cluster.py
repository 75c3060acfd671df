"""This process's connection to a Ray cluster: made once, shared, and ended without traces."""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.ray_kit import DATA, data_cluster
from torchdata_wds.environment import ray_variables, set_ray_variables
from torchdata_wds.workers.ray import cluster as module
from torchdata_wds.workers.ray.cluster import Cluster, import_ray


class StandIn:
    """What `cluster` uses of Ray, without a cluster."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connected_to = ""
        self.jobs = 0
        self.failure: Exception | None = None
        self.is_terminated = False
        self.is_client = False
        client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: self.is_client))
        self.util = SimpleNamespace(get_node_ip_address=lambda: "192.0.2.1", client=client)

    def init(self, address: str, **options: Any) -> None:
        self.asked.append(address)
        os.environ["RAY_STAND_IN"] = "1"
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        logging.getLogger("ray").setLevel(options.get("logging_level", logging.INFO))
        if self.failure is not None:
            raise self.failure
        if self.is_terminated:
            signal.raise_signal(signal.SIGTERM)
        self.connected_to = "192.0.2.1:6379" if address in ("local", "auto") else address
        self.jobs += 1

    def shutdown(self) -> None:
        self.connected_to = ""

    def is_initialized(self) -> bool:
        return bool(self.connected_to)

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address=self.connected_to, get_job_id=lambda: str(self.jobs))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    stand_in = StandIn()
    monkeypatch.setattr(module, "import_ray", lambda: stand_in)
    handler, variables, level = signal.getsignal(signal.SIGTERM), ray_variables(), logging.getLogger("ray").level
    yield stand_in
    assert module._made is None
    signal.signal(signal.SIGTERM, handler)
    set_ray_variables(variables)
    logging.getLogger("ray").setLevel(level)


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of a port that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# ------------------------------------------------------------------------------------------------------------- refusals


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'torchdata-wds\[ray\]'"):
        import_ray()


def test_package_missing_inside_ray_is_named_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("import a_package_that_ray_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_ray_needs"):
        import_ray()


@pytest.mark.parametrize("version", ["2.56.1", "1.13.0"])
def test_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A stream that is canceled while its consumer pauses would block its actor."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version))
    with pytest.raises(ImportError, match=rf"Ray {version} is too old, expected 2.57: pip install -U"):
        import_ray()


def test_new_ray_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.57.0", "3.0.0.dev0"):
        monkeypatch.setitem(sys.modules, "ray", stand_in := SimpleNamespace(__version__=version))
        assert import_ray() is stand_in


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ray://head:10001", "run the program on a node of the cluster"),
        ("http://head:8265", "expected 'host:port' or 'auto'"),
        ("head", "expected 'host:port'"),
        ("", "expected 'host:port'"),
        ("head:", "expected 'host:port'"),
        (":6379", "expected 'host:port'"),
        ("head:port", "expected 'host:port'"),
        ("head:0", "expected 'host:port'"),
        ("head:65536", "expected 'host:port'"),
        ("head:\u0664\u0664", "expected 'host:port'"),
    ],
)
def test_wrong_address_is_refused_before_ray_is_asked(ray: StandIn, address: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Cluster.join(address)
    assert not ray.asked


@pytest.mark.parametrize("address", [6379, b"head:6379", ("head", 6379)])
def test_address_of_a_wrong_type_is_refused(ray: StandIn, address: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a str such as 'head:6379', or None, not {type(address).__name__}"):
        Cluster.join(address)


def test_auto_refuses_the_ray_client_that_the_environment_names(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match="Ray Client"):
        Cluster.join("auto")


@pytest.mark.parametrize("address", [None, "auto", "head:6379"])
def test_program_that_is_connected_by_ray_client_is_refused(ray: StandIn, address: str | None) -> None:
    ray.init("head:6379")
    ray.is_client = True
    with pytest.raises(ValueError, match=r"connected by Ray Client, which cannot stream.*ray job submit"):
        Cluster.join(address)


def test_address_where_nothing_answers_is_refused_at_once(ray: StandIn, listening: str) -> None:
    """Ray itself tries for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=rf"no Ray cluster answers at {address}.*ray start --head"):
        Cluster.join(address)
    assert not ray.asked


def test_cluster_that_lets_nobody_in_is_a_connection_error(ray: StandIn, listening: str) -> None:
    ray.failure = RuntimeError("Version mismatch: 2.60 and 2.40")
    with pytest.raises(ConnectionError, match=rf"{listening} cannot be joined: Version mismatch"):
        Cluster.join(listening)
    assert "RAY_STAND_IN" not in os.environ


def test_cluster_that_demands_a_token_is_an_error_that_says_so(ray: StandIn, listening: str) -> None:
    """Ray itself only says that it failed to connect."""
    ray.failure = ConnectionError("Failed to connect to Ray cluster")
    ray.failure.__cause__ = RuntimeError("Unauthenticated: RPC error: InvalidAuthToken")
    with pytest.raises(ConnectionError, match=r"Failed to connect.*RAY_AUTH_MODE=token and copy ~/.ray/auth_token"):
        Cluster.join(listening)


def test_cluster_that_cannot_be_started_is_a_runtime_error(ray: StandIn) -> None:
    ray.failure = OSError("no space left on device")
    with pytest.raises(RuntimeError, match="cannot start a cluster on this machine: no space left"):
        Cluster.join()


def test_process_forked_from_a_connected_one_is_refused(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_forked", True)
    with pytest.raises(RuntimeError, match=r"forked from one that is connected to Ray.*spawn"):
        Cluster.join()


# --------------------------------------------------------------------------------------------------- whose connection


def test_connection_made_here_ends_with_its_last_user(ray: StandIn) -> None:
    first, second = Cluster.join(), Cluster.join()
    assert ray.asked == ["local"]
    assert first.is_own
    assert second.is_own
    assert first.address == second.address == "192.0.2.1:6379"
    first.close()
    first.close()
    assert ray.is_initialized()
    second.close()
    assert not ray.is_initialized()
    with Cluster.join():
        assert ray.asked == ["local", "local"]


def test_connection_of_the_program_is_used_and_stays(ray: StandIn) -> None:
    ray.init("192.0.2.1:6379")
    for address in (None, "auto", "192.0.2.1:6379", "127.0.0.1:6379"):
        with Cluster.join(address) as cluster:
            assert not cluster.is_own
            assert cluster.address == "192.0.2.1:6379"
    assert ray.is_initialized()


def test_connection_to_a_running_cluster_ends_and_is_not_own(ray: StandIn, listening: str) -> None:
    with Cluster.join(listening) as cluster:
        assert not cluster.is_own
        assert ray.asked == [listening]
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["192.0.2.1:6380", "192.0.2.2:6379"])
def test_another_cluster_than_the_one_in_use_is_refused(ray: StandIn, address: str) -> None:
    with (
        Cluster.join(),
        pytest.raises(ValueError, match=rf"connected to the Ray cluster at 192.0.2.1:6379.* {address}"),
    ):
        Cluster.join(address)


def test_auto_means_the_cluster_of_the_environment(
    ray: StandIn, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    with Cluster.join("auto"):
        assert ray.asked == [listening]


def test_no_address_starts_a_cluster_whatever_the_environment_says(
    ray: StandIn, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    with Cluster.join() as cluster:
        assert ray.asked == ["local"]
        assert cluster.is_own


def test_cluster_is_current_until_the_connection_is_ended_or_replaced(ray: StandIn) -> None:
    ray.init("192.0.2.1:6379")
    cluster = Cluster.join()
    assert cluster.is_current()
    ray.shutdown()
    assert not cluster.is_current()
    ray.init("192.0.2.1:6379")
    assert not cluster.is_current()


def test_connection_that_the_program_replaced_stays(ray: StandIn) -> None:
    cluster = Cluster.join()
    ray.shutdown()
    ray.init("192.0.2.1:6379")
    with Cluster.join() as other:
        assert not other.is_own
    cluster.close()
    assert ray.is_initialized()


def test_handler_of_sigterm_and_environment_are_as_before(ray: StandIn) -> None:
    handler, variables, level = signal.getsignal(signal.SIGTERM), ray_variables(), logging.getLogger("ray").level
    with Cluster.join():
        assert signal.getsignal(signal.SIGTERM) is handler
        assert ray_variables() != variables  # processes that are started now can join
        assert logging.getLogger("ray").level == logging.WARNING
    assert ray_variables() == variables
    assert logging.getLogger("ray").level == level


def test_sigterm_while_ray_connects_reaches_the_program(ray: StandIn) -> None:
    """Ray's own handler is set by then, which would raise SystemExit with status 15."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    ray.is_terminated = True
    with pytest.raises(RuntimeError, match="SIGTERM has interrupted connecting to Ray"):
        Cluster.join()
    assert received == [signal.SIGTERM]
    assert not ray.is_initialized()


# ------------------------------------------------------------------------------------------------------ with a cluster

_PROGRAM = """
import os, signal, threading
from torchdata_wds.workers.ray.cluster import Cluster

def handler(*_): pass

signal.signal(signal.SIGTERM, handler)
with Cluster.join() as cluster:
    import ray
    assert signal.getsignal(signal.SIGTERM) is handler
    assert cluster.is_own
    port = cluster.address.rpartition(":")[2]
    with Cluster.join(cluster.address), Cluster.join("auto") as third, Cluster.join(f"localhost:{port}"):
        assert third.address == cluster.address
    assert ray.get(ray.put("found")) == "found"
    if not (child := os.fork()):
        try:
            Cluster.join()
        except RuntimeError as error:
            os._exit(42 * ("forked" in str(error)))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert not ray.is_initialized()
assert "RAY_AUTH_MODE" not in os.environ
assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wds", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_cluster_started_here_leaves_no_trace(short_folder: Path) -> None:
    """Without a warning, under -X dev too, and with no output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["TMPDIR"] = str(short_folder)
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Answering:
    """An actor."""

    def answer(self) -> int:
        return 42


@pytest.mark.slow
def test_cluster_without_tokens_can_be_joined_after_one_that_was_started_here(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray demands tokens in a cluster that it starts itself, and this process would go on to demand them."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    with Cluster.join() as own:
        assert own.is_own
    with data_cluster(1) as cluster, Cluster.join(cluster.address):
        actor = ray.remote(Answering).options(resources={DATA: 1}).remote()
        assert ray.get(actor.answer.remote(), timeout=60) == 42
        ray.kill(actor)
