"""``croissant.json``: the shards, their fields and their types in the words of MLCommons Croissant 1.0.

Each field of each split is a record set with two fields, the key and the content. One record set of all fields would
be more natural, but mlcroissant joins no more than two sources.
"""

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchdata_wds.cli.card.answers import Answers
from torchdata_wds.cli.card.field_kinds import Kind, is_compressed, kind_of, media_type
from torchdata_wds.cli.card.set_facts import SetFacts, ShardFacts
from torchdata_wds.cli.terminal import counted

_NO_ID = re.compile(r"[^A-Za-z0-9._/-]")
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "excludes": "cr:excludes",
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
# Croissant has no type for bytes; readers give the content of sc:Text undecoded.
_DATA_TYPES: dict[Kind, str] = {
    "image": "sc:ImageObject",
    "audio": "sc:AudioObject",
    "video": "sc:VideoObject",
    "integer": "sc:Integer",
}


def croissant_json(facts: SetFacts, answers: Answers, name: str) -> str:
    """Returns the text of ``croissant.json``; all digests must be known."""
    head = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": answers.description,
        "license": answers.license,
        "url": answers.url,
    }
    known = {key: value for key, value in head.items() if value is not None}
    ids = identifiers([shard.path for shard in facts.shards])
    fields = list(_split_fields(facts, ids))
    distribution = [*(_archive(shard, ids[shard.path]) for shard in facts.shards), *map(_file_set, fields)]
    record_sets = [_record_set(field) for field in fields]
    return json.dumps({**known, "distribution": distribution, "recordSet": record_sets}, indent=2) + "\n"


def identifiers(names: Sequence[str]) -> dict[str, str]:
    """Returns an ``@id`` for each name: itself, without letters that it may not have, such as blanks.

    Example:
        >>> identifiers(["a/x.tar", "a b", "a_b"])
        {'a/x.tar': 'a/x.tar', 'a b': 'a_b', 'a_b': 'a_b-2'}
    """
    ids: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for name in names:
        plain = _NO_ID.sub("_", name)
        taken[plain] += 1
        ids[name] = plain if taken[plain] == 1 else f"{plain}-{taken[plain]}"
    return ids


class _SplitField(NamedTuple):
    """One field of one split, and the shards that have it."""

    split: str
    field: str
    id: str
    shards: list[ShardFacts]
    archives: list[str]  # their identifiers


def _split_fields(facts: SetFacts, ids: Mapping[str, str]) -> Iterator[_SplitField]:
    fields = identifiers(sorted(facts.fields))
    for split, shards in facts.by_split().items():
        for field, field_id in fields.items():
            having = [shard for shard in shards if field in shard.fields]
            if having:
                yield _SplitField(split, field, f"{split}/{field_id}", having, [ids[shard.path] for shard in having])


def _archive(shard: ShardFacts, identifier: str) -> dict[str, Any]:
    size = {} if shard.bytes is None else {"contentSize": f"{shard.bytes} B"}
    return {
        "@type": "cr:FileObject",
        "@id": identifier,
        "name": shard.path,
        "description": counted(shard.samples, "sample"),
        "contentUrl": shard.path,
        **size,
        "encodingFormat": "application/x-tar",
        "sha256": shard.sha256,
    }


def _file_set(part: _SplitField) -> dict[str, Any]:
    """Describes the members that are one field; those of fields with a longer name, as a.seg.png, are left out."""
    others = {other for shard in part.shards for other in shard.fields if other.endswith(f".{part.field}")}
    longer = [f"*.{glob.escape(other)}" for other in sorted(others)]
    return {
        "@type": "cr:FileSet",
        "@id": f"{part.id}/files",
        "name": f"{part.split}/{part.field}/files",
        "containedIn": [{"@id": archive} for archive in part.archives],
        "encodingFormat": media_type(part.field),
        "includes": f"*.{glob.escape(part.field)}",
        **({"excludes": longer} if longer else {}),
    }


def _record_set(part: _SplitField) -> dict[str, Any]:
    files = {"fileSet": {"@id": f"{part.id}/files"}}
    count, kind = sum(shard.fields[part.field].samples for shard in part.shards), kind_of(part.field)
    regex = rf"^((?:.*/)?[^/.]+)\.{re.escape(part.field)}$"
    key = {"extract": {"fileProperty": "fullpath"}, "transform": {"regex": regex}}
    content = {"extract": {"fileProperty": "content"}}
    data_type = "sc:Text" if is_compressed(part.field) else _DATA_TYPES.get(kind, "sc:Text")
    return {
        "@type": "cr:RecordSet",
        "@id": part.id,
        "name": f"{part.split}/{part.field}",
        "description": f"The field {part.field} of {counted(count, 'sample')} of the split {part.split}.",
        "key": {"@id": f"{part.id}/key"},
        "field": [
            _field(f"{part.id}/key", "The key of the sample.", "sc:Text", {**files, **key}),
            _field(f"{part.id}/content", f"The content of the field ({kind}).", data_type, {**files, **content}),
        ],
    }


def _field(identifier: str, description: str, data_type: str, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": identifier,
        "name": identifier,
        "description": description,
        "dataType": data_type,
        "source": source,
    }
