"""This process's connection to a Ray cluster: made, shared by its users, and ended by the last of them."""

import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torchdata_wds.environment import few_ray_attempts, ray_address, ray_variables, set_ray_variables

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_OLDEST = (2, 57)  # before it, a stream that is canceled while its consumer pauses never ends, and blocks its actor
_LOOPBACK = ("127.", "::1")
_HOW = (
    "start a cluster with 'ray start --head' and pass its address (port 6379 unless you chose another), or 'auto' for "
    "the one that runs on this machine; without an address, a cluster of this machine is started, and ended with its "
    "last user"
)
_TOKEN = (
    "it lets only programs in that have its token: set RAY_AUTH_MODE=token and copy ~/.ray/auth_token of the machine "
    "where its head was started to the same place here, or put the token into RAY_AUTH_TOKEN"
)
_NO_CLIENT = (
    "which cannot stream from actors: run the program on a node of the cluster (for example with 'ray job submit') "
    "and pass 'auto'"
)

_lock = threading.RLock()
_made: "_Connection | None" = None  # the connection that this module has made, while it has users
_is_forked = False  # whether this process was forked from one that was connected


def import_ray() -> Any:
    """Imports ``ray``; the ImportError for a missing or old one names the extra that installs it."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as cause:
        if cause.name != "ray":
            raise
        raise ImportError(
            "Ray clusters need the ray package, which is not installed: pip install 'torchdata-wds[ray]'", name="ray"
        ) from cause
    version = str(ray.__version__)
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST:
        expected = ".".join(map(str, _OLDEST))
        raise ImportError(
            f"Ray {version} is too old, expected {expected}: pip install -U 'torchdata-wds[ray]'", name="ray"
        )
    return ray


class Cluster:
    """A connection of this process to a Ray cluster; the context manager closes it.

    A process has one connection, which all its users share. The one that the program made with ``ray.init`` is used as
    it is and never ended. One that is made here ends when its last user closes it, and with it the cluster if it was
    started here.

    Attributes:
        address: Where the cluster's head answers, as ``host:port``.
        is_own: Whether the cluster was started here, and ends with its last user.

    Example:
        >>> with Cluster.join() as cluster:  # doctest: +SKIP
        ...     print(cluster.address, cluster.is_own)
        192.0.2.7:52365 True
    """

    def __init__(self, ray: Any, address: str, connection: "_Connection | None") -> None:
        self.address = address
        self.is_own = connection is not None and connection.is_own
        self._connection = connection
        self._ray = ray
        self._session = _session(ray)

    @classmethod
    def join(cls, address: str | None = None) -> "Cluster":
        """Uses this process's connection, or makes one.

        Args:
            address: ``"host:port"`` of the cluster's head; ``"auto"`` for the cluster that ``RAY_ADDRESS`` names, or
                else for one that runs on this machine. None uses whatever this process is connected to, and otherwise
                starts a cluster of this machine alone, even if ``RAY_ADDRESS`` is set or another cluster runs here.
                A cluster may demand a token, as those do that ``ray start --head`` starts for a user who has
                ``~/.ray/auth_token`` (Ray makes that file at the first start of a local cluster): then every node and
                program needs ``RAY_AUTH_MODE=token`` and the same token.

        Raises:
            ImportError: Ray is not installed.
            TypeError: The address is not a text.
            ValueError: It is not ``host:port``, or this process is connected to another cluster, or by Ray Client.
            ConnectionError: No cluster answers there, or it does not let this process in.
            RuntimeError: This process was forked from one that is connected, or Ray cannot start a cluster.
        """
        wanted = checked_address(address)
        ray = import_ray()
        with _lock:
            if _is_forked:
                raise RuntimeError(
                    "this process was forked from one that is connected to Ray, whose connection cannot be shared: "
                    "start it by spawn, or make the loader in each process and connect to Ray only after the fork"
                )
            if not ray.is_initialized():
                return cls._new(ray, wanted)
            if ray.util.client.ray.is_connected():
                raise ValueError(f"this process is connected by Ray Client, {_NO_CLIENT}")
            found = str(ray.get_runtime_context().gcs_address)
            if wanted not in (None, "auto") and not _is_same(str(wanted), found):
                raise ValueError(
                    f"this process is connected to the Ray cluster at {found}, and cannot use the one at {wanted} "
                    "too: pass no address to use that connection, or end it first with ray.shutdown()"
                )
            connection = _made if _made is not None and _made.is_current() else None
            if connection is not None:
                connection.users += 1
            return cls(ray, found, connection)

    @classmethod
    def _new(cls, ray: Any, wanted: str | None) -> "Cluster":
        global _made
        _made = connection = _Connection(ray, wanted)
        return cls(ray, _session(ray)[0], connection)

    def is_current(self) -> bool:
        """Returns whether this process still has the same connection, which a program can end or replace."""
        return bool(self._ray.is_initialized()) and _session(self._ray) == self._session

    def close(self) -> None:
        """Ends the use of the connection, and the connection itself if it was made here for this last user."""
        global _made
        with _lock:
            connection, self._connection = self._connection, None
            if connection is None or connection.process != os.getpid():
                return
            connection.users -= 1
            if not connection.users:
                if _made is connection:
                    _made = None
                connection.end()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Connection:
    """A connection made here, with the number of its users and what Ray changed in this process."""

    def __init__(self, ray: Any, address: str | None) -> None:
        self.is_own = address is None
        self.users = 1
        self.process = os.getpid()
        self._ray = ray
        self._variables = ray_variables()
        self._level = logging.getLogger("ray").level
        if address is not None:
            _check_reachable(address)
        with _own_sigterm(), nullcontext() if address is None else few_ray_attempts():
            # the only warning at a start says that others need a token, which is what one expects
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
            try:
                ray.init(address=address or "local", **options)
            except BaseException as error:
                ray.shutdown()  # of a start that was interrupted, processes may run already
                self._restore()
                if not isinstance(error, Exception):
                    raise
                if address is None:
                    raise RuntimeError(f"Ray cannot start a cluster on this machine: {error}") from error
                hint = _TOKEN if _lacks_token(error) else _HOW
                raise ConnectionError(f"the Ray cluster at {address} cannot be joined: {error}; {hint}") from error
        logging.getLogger("ray").setLevel(logging.WARNING)
        self._session = _session(ray)

    def is_current(self) -> bool:
        """Returns whether it is still this process's connection: a program can end it, and make its own."""
        return bool(self._ray.is_initialized()) and _session(self._ray) == self._session

    def end(self) -> None:
        """Ends the connection, and a cluster that was started here."""
        if self.is_current():
            self._ray.shutdown()
        self._restore()

    def _restore(self) -> None:
        """Restores the environment and the level of Ray's log; its excepthook and a few idle threads remain."""
        set_ray_variables(self._variables)
        logging.getLogger("ray").setLevel(self._level)
        _forget_token()


def _forget_token() -> None:
    """Lets this process be called without a token again, unless its environment says otherwise.

    A cluster that Ray starts here demands its token, and so does this process, which Ray notes apart from the
    environment. The head of a later cluster without tokens could not call this process, and would end each actor at
    once.
    """
    with suppress(ImportError, AttributeError):  # Ray has no public function for that
        private = importlib.import_module("ray._raylet")
        private.Config.initialize("")
        private.AuthenticationTokenLoader.instance().reset_cache()


def _session(ray: Any) -> tuple[str, str]:
    """Returns what no other connection of this process has: the head's address and the number of its job there."""
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which belongs to the program: schedulers announce the end of a job by it.

    Ray's ends the program by ``sys.exit``, so that its processes end. They do too when the program is killed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray leaves it alone there
        return
    handler = signal.getsignal(signal.SIGTERM)
    arrived = None
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        arrived = error
    finally:
        if handler is not None:  # one that was not set from Python cannot be set again
            signal.signal(signal.SIGTERM, handler)
    if arrived is not None:
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("SIGTERM has interrupted connecting to Ray") from arrived


def _note_fork() -> None:
    """Runs in a forked child."""
    global _is_forked, _lock, _made
    _lock, _made = threading.RLock(), None
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # absent while it is being imported
    _is_forked = _is_forked or (is_initialized is not None and bool(is_initialized()))


os.register_at_fork(after_in_child=_note_fork)


def _lacks_token(error: BaseException | None) -> bool:
    """Returns whether a cluster refused this process for want of a token, which only a cause may say."""
    while error is not None:
        if "InvalidAuthToken" in str(error) or "no authentication token" in str(error):
            return True
        error = error.__cause__
    return False


# ----------------------------------------------------------------------------------------------------------- addresses


def checked_address(address: str | None) -> str | None:
    """Returns an address as None, "auto" or host:port; raises TypeError or ValueError."""
    if address is None or address == "local":  # what Ray calls it
        return None
    if not isinstance(address, str):
        raise TypeError(f"address must be a str such as 'head:6379', or None, not {type(address).__name__}")
    if address == "auto" and not (address := ray_address()):
        return "auto"
    if address.startswith("ray://"):
        raise ValueError(
            f"{address!r} is an address of Ray Client, {_NO_CLIENT}, or the head's host:port such as 'head:6379'"
        )
    if address == "auto":
        return address
    _split(address)
    return address


def _split(address: str) -> tuple[str, int]:
    """Splits host:port."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not the address of a Ray cluster: expected 'host:port' or 'auto'; {_HOW}")
    return host, int(port)


def _check_reachable(address: str) -> None:
    """Raises ConnectionError if nothing listens at an address: Ray itself would try for minutes."""
    if address == "auto":
        return
    try:
        with socket.create_connection(_split(address), timeout=_CONNECT_SECONDS):
            pass
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address} ({error}): {_HOW}") from error


def _is_same(wanted: str, found: str) -> bool:
    """Returns whether two addresses mean the same cluster; a loopback address means this machine's."""
    if wanted == found:
        return True
    (host, port), (found_host, found_port) = _split(wanted), _split(found)
    if port != found_port:
        return False
    hosts, found_hosts = _numbers(host), _numbers(found_host)
    if any(number.startswith(_LOOPBACK) for number in hosts):
        hosts |= {str(import_ray().util.get_node_ip_address())}
    return not hosts.isdisjoint(found_hosts)


def _numbers(host: str) -> set[str]:
    """Returns the numeric addresses of a host; the host itself if it has none."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
