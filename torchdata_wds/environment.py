"""The environment variables that the package reads, all of them, each at the time it is needed.

| variable | effect |
|---|---|
| ``WDS_SECURE`` | ``1``: commands (``pipe:``) and pickles are refused everywhere |
| ``WDS_REWRITE``, ``GOPEN_REWRITE`` | ``regex=replacement;...``: where URLs are really listed and opened |
| ``WDS_<name>`` | what ``${name}`` in a pattern of ``list_shards`` stands for |
| ``AIS_ENDPOINT`` | the address of AIStore, as ``http://host:51080``, for ``ais:`` and the schemes of ``USE_AIS_FOR`` |
| ``USE_AIS_FOR`` | schemes that are read and written through AIStore, as ``gs:s3`` |
| ``AIS_AUTHN_TOKEN`` | the token for AIStore's gateway |
| ``WDS_VERBOSE_CACHE`` | ``1``: ``cache_shards`` logs each hit, download and eviction |
| ``AWS_ENDPOINT_URL``, ... | where a store is, which is part of the names of its copies in a cache |
| ``RANK``, ``WORLD_SIZE`` | this process's place, as torchrun sets it, until torch.distributed is initialised |

A dataset file may name others as ``$NAME`` in its paths.
"""

import os

#: The variables that the libraries of stores read to find them, by protocol; the first that is set decides.
_STORE_VARIABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("s3", "s3a"), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    **dict.fromkeys(("gs", "gcs"), ("STORAGE_EMULATOR_HOST",)),
    "hf": ("HF_ENDPOINT",),
    "oss": ("OSS_ENDPOINT",),
    **dict.fromkeys(("abfs", "abfss", "az"), ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME")),
}


def is_secure() -> bool:
    """Returns whether ``WDS_SECURE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_SECURE", "") not in ("", "0")


def reports_caching() -> bool:
    """Returns whether ``WDS_VERBOSE_CACHE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_VERBOSE_CACHE", "") not in ("", "0")


def launched_place() -> tuple[int, int]:
    """Returns how many processes a launcher such as torchrun has started, and which of them this is."""
    world, rank = (os.environ.get(name) or default for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment name no rank: set or remove both")
    return int(world), int(rank)


def rewriting_variables() -> list[tuple[str, str]]:
    """Returns the variables with rules for rewriting URLs, those that are set, with their values."""
    return [(name, text) for name in ("WDS_REWRITE", "GOPEN_REWRITE") if (text := os.environ.get(name))]


def pattern_variable(name: str) -> str | None:
    """Returns what ``${name}`` stands for in a pattern: the value of ``WDS_<name>``, or None if it is not set."""
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


def store_variables(protocol: str) -> list[tuple[str, str]]:
    """Returns the variable that tells a store's library where the store is, with its value; empty if none is set."""
    names = () if protocol in ("s3", "s3a") and _ignores_endpoints() else _STORE_VARIABLES.get(protocol, ())
    return [(name, text.rstrip("/")) for name in names if (text := os.environ.get(name))][:1]


def aws_config() -> tuple[str, str]:
    """Returns the profile that is chosen for AWS, and the path of the file that describes it, or ""."""
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    return profile, "" if _ignores_endpoints() else path


def _ignores_endpoints() -> bool:
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
