"""The environment variables that the package reads, all of them, each at the time it is needed.

| variable | effect |
|---|---|
| ``WDS_SECURE`` | ``1``: commands (``pipe:``) and pickles are refused everywhere |
| ``WDS_REWRITE``, ``GOPEN_REWRITE`` | ``regex=replacement;...``: where URLs are looked for and opened instead |
| ``WDS_<name>`` | what ``${name}`` in a pattern of ``list_shards`` stands for |
| ``AIS_ENDPOINT`` | the address of AIStore, as ``http://host:51080``, for ``ais:`` and the schemes of ``USE_AIS_FOR`` |
| ``USE_AIS_FOR`` | schemes that are read and written through AIStore, as ``gs:s3`` |
| ``AIS_AUTHN_TOKEN`` | the token that AIStore's gateway is shown |
| ``WDS_VERBOSE_CACHE`` | ``1``: ``cache_shards`` tells of each hit, download and eviction |
| ``AWS_ENDPOINT_URL``, ... | (see `store_variables`) where a store is, which the names of copies in a cache tell |
| ``RANK``, ``WORLD_SIZE`` | the place of this process, as torchrun sets it, until torch.distributed is initialised |

A dataset file may name others as ``$NAME`` in its paths, which `load_dataset` puts in.
"""

from __future__ import annotations

import os

__all__ = [
    "ais_endpoint",
    "ais_schemes",
    "ais_token",
    "aws_config",
    "pattern_variable",
    "rewriting_variables",
    "is_secure",
    "launched_place",
    "reports_caching",
    "store_variables",
]


#: What the libraries of stores read to find them, by protocol; the first that is set decides.
_PLACES_OF_STORES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("s3", "s3a"), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    **dict.fromkeys(("gs", "gcs"), ("STORAGE_EMULATOR_HOST",)),
    "hf": ("HF_ENDPOINT",),
    "oss": ("OSS_ENDPOINT",),
    **dict.fromkeys(("abfs", "abfss", "az"), ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME")),
}


def is_secure() -> bool:
    """Tells whether ``WDS_SECURE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_SECURE", "") not in ("", "0")


def reports_caching() -> bool:
    """Tells whether ``WDS_VERBOSE_CACHE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_VERBOSE_CACHE", "") not in ("", "0")


def launched_place() -> tuple[int, int]:
    """The number of processes that a launcher such as torchrun has started, and which of them this is.

    Raises:
        ValueError: if the variables are no such numbers.
    """
    world, rank = (os.environ.get(name) or default for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment name no rank: set or remove both")
    return int(world), int(rank)


def rewriting_variables() -> list[tuple[str, str]]:
    """The variables with rules that send URLs elsewhere, those that are set, with their values."""
    return [(name, text) for name in ("WDS_REWRITE", "GOPEN_REWRITE") if (text := os.environ.get(name))]


def pattern_variable(name: str) -> str | None:
    """What ``${name}`` stands for in a pattern: the value of ``WDS_<name>``, or None where it is not set."""
    return os.environ.get(f"WDS_{name}")


def ais_endpoint() -> str:
    """The address of AIStore, without a slash at its end; "" where ``AIS_ENDPOINT`` is not set."""
    return os.environ.get("AIS_ENDPOINT", "").strip().rstrip("/")


def ais_schemes() -> tuple[str, ...]:
    """The schemes that go through AIStore besides its own, by ``USE_AIS_FOR``, in small letters."""
    return tuple(name for name in os.environ.get("USE_AIS_FOR", "").lower().replace(",", ":").split(":") if name)


def ais_token() -> str:
    """The token for AIStore; "" where ``AIS_AUTHN_TOKEN`` is not set."""
    return os.environ.get("AIS_AUTHN_TOKEN", "").strip()


def store_variables(protocol: str) -> list[tuple[str, str]]:
    """The variable that tells the library of a store where the store is, with its value; empty where none is set."""
    names = () if protocol in ("s3", "s3a") and _ignores_endpoints() else _PLACES_OF_STORES.get(protocol, ())
    return [(name, text.rstrip("/")) for name in names if (text := os.environ.get(name))][:1]


def aws_config() -> tuple[str, str]:
    """The profile that is chosen for AWS, and the path of the file that describes it, or ""."""
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    return profile, "" if _ignores_endpoints() else path


def _ignores_endpoints() -> bool:
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
