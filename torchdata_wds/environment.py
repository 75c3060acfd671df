"""All environment variables that the package reads, each when it is needed.

| variable | effect |
|---|---|
| ``WDS_SECURE`` | ``1``: commands (``pipe:``) and pickles are refused everywhere |
| ``WDS_REWRITE``, ``GOPEN_REWRITE`` | ``regex=replacement;...``: rules that rewrite URLs to list or open |
| ``WDS_<name>`` | the value of ``${name}`` in patterns of ``list_shards`` |
| ``AIS_ENDPOINT`` | the address of AIStore, as ``http://host:51080``, for ``ais:`` and the schemes of ``USE_AIS_FOR`` |
| ``USE_AIS_FOR`` | schemes that are read and written through AIStore, as ``gs:s3`` |
| ``AIS_AUTHN_TOKEN`` | the token for AIStore's gateway |
| ``WDS_VERBOSE_CACHE`` | ``1``: ``cache_shards`` logs each hit, download and eviction |
| ``AWS_ENDPOINT_URL``, ... | the address of a store, which decides the names of its copies in a cache |
| ``XDG_CACHE_HOME`` | the user's cache folder, ``~/.cache`` by default: indexes that were made here are kept in it |
| ``HTTP_PROXY``, ... | the proxy for web servers |
| ``RAY_ADDRESS`` | the Ray cluster that the address ``auto`` means |
| ``RANK``, ``WORLD_SIZE`` | this process's place, as torchrun sets it, until torch.distributed is initialised |

Paths in a dataset file may use other variables, as ``$NAME``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

#: The variables with the address of a store, by protocol, as its library reads them; the first that is set decides.
_STORE_VARIABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("s3", "s3a"), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    **dict.fromkeys(("gs", "gcs"), ("STORAGE_EMULATOR_HOST",)),
    "hf": ("HF_ENDPOINT",),
    "oss": ("OSS_ENDPOINT",),
    **dict.fromkeys(("abfs", "abfss", "az"), ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME")),
}

_PROXY_VARIABLES = (
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD",
)  # fmt: skip


def usable_cpus() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_secure() -> bool:
    """Returns whether ``WDS_SECURE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_SECURE", "") not in ("", "0")


def reports_caching() -> bool:
    """Returns whether ``WDS_VERBOSE_CACHE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_VERBOSE_CACHE", "") not in ("", "0")


def launched_place() -> tuple[int, int]:
    """Returns the number of processes that a launcher such as torchrun has started, and the number of this one."""
    world, rank = (os.environ.get(name) or default for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment are not valid: set or unset both")
    return int(world), int(rank)


def cache_home() -> str | None:
    """Returns the user's cache folder, an absolute path; None if there is none, as for a user without a home."""
    found = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - a str
    return found if os.path.isabs(found) else None  # noqa: PTH117 - a str


def rewriting_variables() -> list[tuple[str, str]]:
    """Returns names and values of the variables with rewriting rules that are set."""
    return [(name, text) for name in ("WDS_REWRITE", "GOPEN_REWRITE") if (text := os.environ.get(name))]


def pattern_variable(name: str) -> str | None:
    """Returns the value of ``${name}`` in a pattern: that of ``WDS_<name>``, or None if it is not set."""
    return os.environ.get(f"WDS_{name}")


def ais_endpoint() -> str:
    """Returns the address of AIStore, without a slash at its end; "" if ``AIS_ENDPOINT`` is not set."""
    return os.environ.get("AIS_ENDPOINT", "").strip().rstrip("/")


def ais_schemes() -> tuple[str, ...]:
    """Returns the schemes that go through AIStore besides its own, by ``USE_AIS_FOR``, in lower case."""
    return tuple(name for name in os.environ.get("USE_AIS_FOR", "").lower().replace(",", ":").split(":") if name)


def ais_token() -> str:
    """Returns the token for AIStore; "" if ``AIS_AUTHN_TOKEN`` is not set."""
    return os.environ.get("AIS_AUTHN_TOKEN", "").strip()


def proxy_variables() -> tuple[str | None, ...]:
    """Returns the values of the variables that decide which proxy is used; the standard library interprets them."""
    return tuple(map(os.environ.get, _PROXY_VARIABLES))


def store_variables(protocol: str) -> list[tuple[str, str]]:
    """Returns the variable that sets the address of a store, with its value; empty if none is set."""
    names = () if protocol in ("s3", "s3a") and _ignores_endpoints() else _STORE_VARIABLES.get(protocol, ())
    return [(name, text.rstrip("/")) for name in names if (text := os.environ.get(name))][:1]


def aws_config() -> tuple[str, str]:
    """Returns the AWS profile, and the path of the configuration file, or "" if that is to be ignored."""
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    return profile, "" if _ignores_endpoints() else path


def _ignores_endpoints() -> bool:
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"


def ray_address() -> str:
    """Returns the address of the Ray cluster that ``RAY_ADDRESS`` names; "" if it is not set."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_variables() -> dict[str, str]:
    """Returns the variables of Ray, which sets some itself."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def set_ray_variables(wanted: dict[str, str]) -> None:
    """Sets the variables of Ray, and removes its others."""
    for name in ray_variables().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


@contextmanager
def few_ray_attempts() -> Iterator[None]:
    """Lets Ray give up on a cluster that does not answer after about a minute, instead of a quarter of an hour."""
    name = "RAY_gcs_server_port_wait_time_s"  # in fact the number of attempts, each of which takes 40 seconds
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
