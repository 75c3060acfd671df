"""``croissant.json``: the shards, their fields and their types in the words of MLCommons Croissant 1.0.

Each field of each split is a record set with two fields, the key and the content. One record set of all fields would
be more natural, but mlcroissant joins no more than two sources.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from torchdata_wds.cli.card.field_kinds import Kind, kind_of, media_type
from torchdata_wds.cli.card.readme import Answers
from torchdata_wds.cli.card.set_facts import SetFacts, ShardFacts
from torchdata_wds.cli.terminal import counted

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
    splits = facts.by_split()
    members = {
        (split, field): _names(shards, field) for split, shards in splits.items() for field in _fields_of(shards)
    }
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
    archives = [_archive(shard) for shard in facts.shards]
    file_sets = [_file_set(split, field, shards) for (split, field), shards in members.items()]
    record_sets = [_record_set(split, field, shards) for (split, field), shards in members.items()]
    return json.dumps({**known, "distribution": [*archives, *file_sets], "recordSet": record_sets}, indent=2) + "\n"


def _fields_of(shards: Sequence[ShardFacts]) -> list[str]:
    return sorted({field for shard in shards for field in shard.fields})


def _names(shards: Sequence[ShardFacts], field: str) -> list[ShardFacts]:
    return [shard for shard in shards if field in shard.fields]


def _archive(shard: ShardFacts) -> dict[str, Any]:
    size = {} if shard.bytes is None else {"contentSize": f"{shard.bytes} B"}
    return {
        "@type": "cr:FileObject",
        "@id": shard.path,
        "name": shard.path,
        "description": counted(shard.samples, "sample"),
        "contentUrl": shard.path,
        **size,
        "encodingFormat": "application/x-tar",
        "sha256": shard.sha256,
    }


def _file_set(split: str, field: str, shards: Sequence[ShardFacts]) -> dict[str, Any]:
    """Describes the members that are one field; those of fields with a longer name, as a.seg.png, are left out."""
    longer = sorted({f"*.{other}" for shard in shards for other in shard.fields if other.endswith(f".{field}")})
    return {
        "@type": "cr:FileSet",
        "@id": f"{split}/{field}/files",
        "name": f"{split}/{field}/files",
        "containedIn": [{"@id": shard.path} for shard in shards],
        "encodingFormat": media_type(field),
        "includes": f"*.{field}",
        **({"excludes": longer} if longer else {}),
    }


def _record_set(split: str, field: str, shards: Sequence[ShardFacts]) -> dict[str, Any]:
    name = f"{split}/{field}"
    files = {"fileSet": {"@id": f"{name}/files"}}
    count = sum(shard.fields[field].samples for shard in shards)
    key = {"extract": {"fileProperty": "fullpath"}, "transform": {"regex": rf"^((?:.*/)?[^/.]+)\.{re.escape(field)}$"}}
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": f"The field {field} of {counted(count, 'sample')} of the split {split}.",
        "key": {"@id": f"{name}/key"},
        "field": [
            _field(f"{name}/key", "The key of the sample.", "sc:Text", {**files, **key}),
            _field(
                f"{name}/content",
                f"The content of the field, {kind_of(field)}.",
                _DATA_TYPES.get(kind_of(field), "sc:Text"),
                {**files, "extract": {"fileProperty": "content"}},
            ),
        ],
    }


def _field(name: str, description: str, data_type: str, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": name,
        "name": name,
        "description": description,
        "dataType": data_type,
        "source": source,
    }
