"""Shards to findings: what loaders would refuse, lose or pass over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.shard_validation import CheckFields, ShardValidation, ValidationRules
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing

__all__ = ["validate_shard"]


def validate_shard(
    url: str,
    *,
    keys: KeyRule = "first_dot",
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "error",
    on_reappearing: OnReappearing = "error",
    require_end_marker: bool = True,
    concatenated: bool = False,
    check_fields: CheckFields | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES,
) -> Iterator[Finding]:
    """Reads a shard whole and tells everything that is wrong with it or odd.

    Errors are what ``load_wds_shards`` and ``group_by_key`` with the same options refuse or lose, and an index beside
    the shard that is not its own; warnings are what they pass over. One sample is in memory.

    Args:
        url: The shard, as `open_shard` takes it.
        keys: As in ``group_by_key``.
        lowercase: As in ``group_by_key``.
        on_duplicate: As in ``group_by_key``.
        on_reappearing: As in ``group_by_key``; ``"warn"`` makes it a warning.
        require_end_marker: As in ``load_wds_shards``.
        concatenated: As in ``load_wds_shards``.
        check_fields: Tries to decode the fields of a sample, and gives an exception for each that does not decode.
        storage_options: Options by protocol.
        max_member_bytes: As in ``load_wds_shards``.

    Yields:
        Finding: In the order of the archive; what is known only of the whole shard comes last.

    Raises:
        ValueError: if an option is none of those that are valid.
        ImportError: if the shard's compression needs a package that is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> _ = path.write_bytes(bytes(512) + b"more")
        >>> [(finding.level, finding.kind, finding.offset) for finding in validate_shard(str(path))]
        [('error', 'trailing-bytes', 512)]
    """
    rules = ValidationRules(
        keys,
        lowercase,
        on_duplicate,
        on_reappearing,
        require_end_marker,
        concatenated,
        check_fields,
        storage_options,
        max_member_bytes,
    )
    validation = ShardValidation(url, rules)
    return _findings(validation)


def _findings(validation: ShardValidation) -> Iterator[Finding]:
    for item in validation:
        if isinstance(item, Finding):
            yield item
    yield from validation.field_sets.findings()
