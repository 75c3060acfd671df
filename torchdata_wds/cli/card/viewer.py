"""What keeps the viewer of the Hugging Face hub, and ``load_dataset``, from reading shards, by their first samples."""

import json
from collections.abc import Iterator
from contextlib import suppress

from torchdata_wds.cli.card.field_kinds import Kind, is_compressed, kind_of
from torchdata_wds.cli.card.hub import declared_features
from torchdata_wds.cli.card.set_facts import FIRST, SetFacts, ShardFacts, sizes_of
from torchdata_wds.errors import WdsError
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.ranges import ShardRanges

_LARGEST = 1 << 20  # bytes of a field that is looked into
_EXPECTED: dict[Kind, str] = {"integer": "a whole number", "text": "UTF-8 text", "json": "JSON"}


def viewer_problem(facts: SetFacts) -> str | None:
    """Says why the hub's viewer cannot read these shards; None if nothing speaks against it."""
    for shard in facts.shards:
        if not shard.path.partition("?")[0].endswith(".tar"):
            return f"the hub takes only files named *.tar for WebDataset, not {mask_url(shard.path)}"
    is_inferred = declared_features(facts) is None
    for shards in facts.by_split().values():
        first = next((shard for shard in shards if shard.samples), None)
        problem = None if first is None else (is_inferred and _other_fields(first)) or _wrong_content(first)
        if problem:
            return problem
    return None


def _other_fields(shard: ShardFacts) -> str | None:
    """Looks for a sample with other fields than the first."""
    fields = [frozenset(sizes_of(sample)) for sample in shard.first]
    odd = next((number for number, found in enumerate(fields, 1) if found != fields[0]), None)
    if odd is None:
        return None
    some = sorted(frozenset.union(*fields) - frozenset.intersection(*fields))
    return (
        f"the hub's viewer and load_dataset infer types from the first {FIRST} samples of a split, which need equal "
        f"fields. Sample {odd} of {mask_url(shard.path)} has other fields than the first: not all have "
        f"{', '.join(some)}. Put samples with equal fields first, or leave those fields out ('wds cat -f')"
    )


def _wrong_content(shard: ShardFacts) -> str | None:
    """Looks for text that is not UTF-8, numbers that are none, and damaged json in the first samples."""
    # a server that cannot send parts of a file is no problem of the shards
    with suppress(WdsError), ShardRanges() as ranges:
        for number, field, offset, size in _places(shard):
            if (what := _fault(field, ranges.read(shard.url, offset, offset + size))) is not None:
                where = f"sample {number} of {mask_url(shard.path)}: its field {field}"
                return f"the hub's viewer and load_dataset cannot read {where} is not {what}"
    return None


def _places(shard: ShardFacts) -> Iterator[tuple[int, str, int, int]]:
    """Yields number, field, offset and size of what the builder decodes in the first samples."""
    for number, sample in enumerate(shard.first, 1):
        for name, offset, size in sample.members:
            _, field = split_name(name) or ("", "")
            is_read = kind_of(field) in _EXPECTED and not is_compressed(field)
            if is_read and offset is not None and size is not None and size <= _LARGEST:
                yield number, field, offset, size


def _fault(field: str, data: bytes) -> str | None:
    """Says what a field should be and is not; None if it is."""
    kind = kind_of(field)
    try:
        if kind == "integer":
            int(data)
        elif kind == "text":
            data.decode()
        else:
            json.loads(data)
    except (ValueError, RecursionError):
        return _EXPECTED[kind]
    return None
