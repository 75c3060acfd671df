"""Dataset files as they are read: YAML or JSON from disk or network, as plain values."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torchdata_wds.errors import SpecError, WdsError
from torchdata_wds.storage import mask_url, open_shard

_MAX_BYTES = 64 << 20
_MAX_MERGED = 10_000
_IS_JSON = re.compile(r"\.json(\.(gz|bz2|xz|zstd?))?([?#].*)?\Z", re.IGNORECASE | re.DOTALL)


def read_spec(url: str, *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Reads a dataset file: JSON where its name ends in ``.json``, else JSON or YAML."""
    shown = mask_url(url)
    try:
        with open_shard(url, storage_options=storage_options) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except WdsError as error:
        raise type(error)(f"dataset file {shown} cannot be read: {error}", shard=shown) from error
    if len(data) > _MAX_BYTES:
        raise SpecError(
            f"dataset file {shown} is larger than {_MAX_BYTES:,} bytes: is it a shard? Write shard lists with braces"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"dataset file {shown} is not UTF-8 text: {error}") from error
    return parse_spec(text, shown, json_only=_IS_JSON.search(url) is not None)


def parse_spec(text: str, shown: str = "<text>", *, json_only: bool = False) -> Any:
    """Parses a dataset file's text, JSON or (unless `json_only`) YAML; `shown` is its name in messages."""
    try:
        if json_only:
            return _parse_json(text, shown)
        if text.lstrip().startswith("{"):  # JSON needs no further package; what it does not take may be YAML yet
            try:
                return _parse_json(text, shown)
            except json.JSONDecodeError:
                pass
        return _parse_yaml(text, shown)
    except json.JSONDecodeError as error:
        raise SpecError(f"dataset file {shown} is not JSON: {error}") from error
    except RecursionError:
        raise SpecError(f"dataset file {shown} is nested too deeply to be one") from None


def _parse_json(text: str, shown: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise _twice(shown, next(name for name in names if names.count(name) > 1))
        return found

    return json.loads(text, object_pairs_hook=unique)


def _twice(shown: str, key: object, where: str = "") -> SpecError:
    return SpecError(f"dataset file {shown} has the key {key!r:.80} twice in one mapping{where}: only one would count")


def _parse_yaml(text: str, shown: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as cause:
        raise ModuleNotFoundError(
            f"dataset file {shown} is YAML, which needs the yaml package, which is not installed: "
            "pip install 'torchdata_wds[spec]', or write the file as JSON",
            name="yaml",
        ) from cause
    try:
        # A SafeLoader, which makes plain values only.
        return yaml.load(text, _loader(yaml, shown))
    except yaml.YAMLError as error:
        hint = "\nIn a [list], a pattern with braces needs quotes." if "{" in text else ""
        raise SpecError(f"dataset file {shown} is not YAML: {error}{hint}") from error
    except (ValueError, TypeError, AttributeError) as error:  # what its scalars raise: dates that are none, "0x_"
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"dataset file {shown} holds a value that is not YAML: {error}") from error


def _loader(yaml: Any, shown: str) -> Any:
    """PyYAML's SafeLoader, which alone takes the last of two equal keys, and until 6.0.3 merges aliases without end."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if (key.tag, key.value) in seen:
                    raise _twice(shown, key.value, f", line {key.start_mark.line + 1}")
                seen.add((key.tag, key.value))
            return node

        def flatten_mapping(self, node: Any) -> None:
            merged = 0
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    continue
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(source, yaml.MappingNode):
                        self.flatten_mapping(source)
                        merged += len(source.value)
                    if merged > _MAX_MERGED:
                        raise SpecError(f"dataset file {shown} merges more than {_MAX_MERGED:,} keys into a mapping")
            super().flatten_mapping(node)

    return Loader
