"""What ``energon prepare`` of Megatron Energon 7 writes: ``.nv-meta``, and an index of offsets beside each shard."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.card.card_files import CardFile
from torchdata_wds.cli.card.energon_index import EnergonIndex
from torchdata_wds.cli.card.front_matter import yaml_lines
from torchdata_wds.cli.card.set_facts import SetFacts
from torchdata_wds.cli.command import UsageError
from torchdata_wds.format.index.foreign import energon_name

META, DEFINITION = ".nv-meta", "dataset.yaml"
_PARTS = ("train", "val", "test")
_PART_OF = {"validation": "val"}  # energon's word for a split
_MODULE = "megatron.energon"
_CRUDE = "CrudeWebdataset"
_BETWEEN = re.compile(r",(?=\w+=)")


class SampleType(NamedTuple):
    """A sample class of energon, and the field of the shards that each of its own is taken from."""

    name: str
    fields: dict[str, str]


def parse_sample_type(text: str) -> SampleType:
    """Parses ``--energon-sample``: ``CaptioningSample:image=jpg,png,caption=json[text]``."""
    name, _, rest = text.partition(":")
    pairs = [item.partition("=") for item in _BETWEEN.split(rest)]
    if not name.isidentifier() or not all(field.isidentifier() and source for field, _, source in pairs):
        expected = "expected TYPE:FIELD=NAME,..., such as CaptioningSample:image=jpg,caption=txt"
        raise argparse.ArgumentTypeError(f"{expected}, not {text!r:.80}")
    return SampleType(name, {field: source for field, _, source in pairs})


def energon_files(
    facts: SetFacts, folder: Path, index: EnergonIndex, sample_type: SampleType | None, ratio: Sequence[float] | None
) -> list[CardFile]:
    """Returns the files that make energon read the shards of a folder."""
    counts = {shard.path: shard.samples for shard in facts.shards}
    contents = {
        DEFINITION: _yaml(_definition(facts, sample_type)),
        "split.yaml": _yaml({"split_parts": _split_parts(facts, ratio), "exclude": []}),
        ".info.json": json.dumps({"shard_counts": counts}, indent=2).encode(),
        "index.uuid": str(index.finish()).encode(),
    }
    meta = folder / META
    if sample_type is None and (meta / DEFINITION).exists():
        del contents[DEFINITION]  # its owner may have edited it
    files = [CardFile(f"{META}/{name}", meta / name, content) for name, content in contents.items()]
    files.append(CardFile(f"{META}/index.sqlite", meta / "index.sqlite", index.path, equals=index.equals))
    names = ((energon_name(path), offsets) for path, offsets in index.offsets.items())
    return [*files, *(CardFile(name, folder / name, offsets) for name, offsets in names)]


def _split_parts(facts: SetFacts, ratio: Sequence[float] | None) -> dict[str, list[str]]:
    """Returns the shards of each split: those of the card, or by ratio in their order, as energon divides them."""
    if ratio is None:
        splits = facts.by_split().items()
        return {_PART_OF.get(split, split): [shard.path for shard in shards] for split, shards in splits}
    paths = [shard.path for shard in facts.shards]
    parts = {}
    start, total = 0, 0.0
    for name, share in zip(_PARTS, ratio, strict=True):
        total += share / sum(ratio)
        stop = int(len(paths) * total)
        parts[name] = paths[start:stop]
        start = stop
    return parts


def _definition(facts: SetFacts, sample_type: SampleType | None) -> dict[str, Any]:
    if sample_type is None:
        return {"__module__": _MODULE, "__class__": _CRUDE}
    for field, source in sample_type.fields.items():
        for name in source.split(","):
            if name.partition("[")[0] not in facts.fields:
                there = ", ".join(sorted(facts.fields))
                raise UsageError(f"--energon-sample: no sample has a field {name!r} for {field}; there are {there}")
    return {"sample_type": {"__module__": _MODULE, "__class__": sample_type.name}, "field_map": sample_type.fields}


def _yaml(value: Mapping[str, Any]) -> bytes:
    return "".join(f"{line}\n" for line in yaml_lines(value)).encode()
