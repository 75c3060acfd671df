"""What constructors refuse, before any data is read, and what stages refuse to take."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import SampleError, ShardListError, ShardSlice

NO_COUNTS = (0, -1, True, 2.5, "3")
NO_SAMPLES = (("jpg", 1), "text", None, b"", [1])
LAYOUTS = "'auto', 'members', 'dash', 'base64', 'obelics'"

#: Functional form, its arguments, and what the constructor raises.
OPTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any], Any, str]] = [
    *(("wds_map", (fn,), {}, TypeError, "wds_map takes a function") for fn in (None, "int", 3)),
    *(("wds_compose", (fn,), {}, TypeError, "wds_compose takes a function") for fn in (None, "pairs", 3)),
    ("wds_decode", ("rbg8",), {}, ValueError, "rbg8"),
    ("wds_decode", ("rgb8", "pil"), {}, ValueError, "pil"),
    ("wds_decode", (3,), {}, TypeError, "3"),
    ("wds_decode", (None,), {}, TypeError, "None"),
    ("wds_decode", (), {"errors": "sloppy"}, ValueError, "sloppy"),
    ("wds_decode", (), {"only": 3}, TypeError, "only"),
    ("wds_decode", (), {"exif_transpose": "yes"}, TypeError, "exif_transpose"),
    ("wds_decode", (), {"handler": "warn"}, TypeError, "handler must be a function"),
    ("wds_decode", (), {"max_bytes": 0}, ValueError, "max_bytes must be at least 1"),
    ("wds_interleaved", (), {"layout": "dashes"}, ValueError, f"layout must be one of {LAYOUTS}"),
    ("wds_interleaved", (), {"missing": None}, ValueError, "one of 'error', 'drop_image', 'skip_sample', 'none'"),
    ("wds_interleaved", (), {"images": "rgb9"}, ValueError, "unknown image spec 'rgb9'"),
    ("wds_interleaved", (), {"images": len}, TypeError, "images must be an image spec"),
    ("wds_interleaved", (), {"min_images": -1}, ValueError, "min_images must be a whole number from 0"),
    ("wds_interleaved", (), {"max_images": 1.0}, ValueError, "max_images must be a whole number"),
    ("wds_interleaved", (), {"min_images": 3, "max_images": 2}, ValueError, "nothing would be left"),
    ("wds_interleaved", (), {"min_similarity": math.nan}, ValueError, "min_similarity must be a finite number"),
    ("wds_interleaved", (), {"min_similarity": "0.5"}, TypeError, "min_similarity must be a number or None"),
    ("wds_interleaved", (), {"handler": None}, TypeError, "handler must be a function"),
    *(("cache_samples", ("x",), {"max_samples": n}, ValueError, "max_samples must be a whole") for n in NO_COUNTS),
    *(
        ("cache_samples", (file,), {}, ValueError, "file must be the path of a local file, or None for no cache, not '")
        for file in ("", "/", ".", "folder/", "s3://key:secret@bucket/x.db", "pipe:cat")
    ),
    *(
        ("cache_samples", (file,), {}, TypeError, "file must be the path of a local file")
        for file in (3, b"x.db", True, ["x.db"])
    ),
    ("cache_samples", ("x.db",), {"allow_pickle": "yes"}, TypeError, "allow_pickle"),
    ("cache_shards", ("",), {}, ValueError, "takes a folder"),
    ("cache_shards", (3,), {}, ValueError, "takes a folder"),
    ("cache_shards", ("c",), {"max_bytes": 0}, ValueError, "max_bytes must be more than 0"),
    ("cache_shards", ("c",), {"max_bytes": math.nan}, ValueError, "max_bytes must be more than 0"),
    ("cache_shards", ("c",), {"max_bytes": "1GB"}, TypeError, "max_bytes must be a number"),
    ("cache_shards", ("c",), {"max_bytes": True}, TypeError, "max_bytes must be a number"),
    ("cache_shards", ("c",), {"name": "url"}, ValueError, "name must be None, 'unsigned'"),
    ("cache_shards", ("c",), {"name": 3}, TypeError, "name must be None"),
    ("cache_shards", ("c",), {"verify": 1}, TypeError, "verify must be True or False"),
    ("cache_shards", ("c",), {"while_reading": None}, TypeError, "while_reading must be"),
    ("cache_shards", ("c",), {"cache_local": "yes"}, TypeError, "cache_local must be"),
    ("cache_shards", ("c",), {"verbose": 1}, TypeError, "verbose must be"),
    ("cache_shards", ("c",), {"storage_options": {"s3": 3}}, TypeError, "storage_options"),
    ("cache_shards", ("c",), {"handler": "warn"}, TypeError, "handler must be a function"),
    *(
        ("wds_shuffle", (), {name: value}, ValueError, f"{name} must be a whole number")
        for name in ("buffer_size", "initial", "max_bytes")
        for value in (-1, 1.5, "10", True, *([] if name == "max_bytes" else [None]))
    ),
    ("load_wds_shards", (), {"keys": "middle"}, ValueError, "keys must be"),
    ("load_wds_shards", (), {"select": 3}, TypeError, "select must be"),
    ("load_wds_shards", (), {"storage_options": {"s3": "secret"}}, TypeError, "s3"),
    ("load_wds_shards", (), {"rename": "x"}, TypeError, "rename must be"),
    ("load_wds_shards", (), {"max_member_bytes": 0}, ValueError, "max_member_bytes"),
    ("load_wds_shards", (), {"require_end_marker": "no"}, TypeError, "require_end_marker must be True or False"),
    ("load_wds_shards", (), {"handler": "warn"}, TypeError, "handler must be"),
    ("load_wds_shards", ("*.jpg",), {}, TypeError, "positional"),
    ("group_by_key", (), {"lowercase": "yes"}, TypeError, "lowercase must be True or False"),
    ("group_by_key", (), {"handler": "yes"}, TypeError, "handler must be"),
    *(
        ("list_shards", (), {"storage_options": value}, TypeError, "storage_options|options")
        for value in ("s3", {"s3": "key"}, [("s3", {})])
    ),
    *(
        (f"load_{kind}_shards", (), {"max_bytes": value}, ValueError, "max_bytes")
        for kind in ("cbor", "msgpack")
        for value in (*NO_COUNTS, None)
    ),
    ("save_wds_shards", ("x-%d.tar",), {"max_count": 0}, ValueError, "max_count"),
    ("save_wds_shards", ("x-%d.tar",), {"start_shard": "last"}, ValueError, "start_shard"),
    ("save_wds_shards", ("x-%d.tar",), {"compress": "zip"}, ValueError, "compress"),
    ("save_wds_shards", ("x-%d.tar",), {"colour": 1}, TypeError, "colour"),
    ("save_wds_shards", ("x-%d.tar",), {"opener": open}, TypeError, "unknown option 'opener'"),
    ("save_wds_shards", ("x.tar",), {}, ValueError, "0 places"),
    *(("wds_epoch", (n,), {}, ValueError, "n must be a whole number from 1") for n in (*NO_COUNTS, None, math.inf)),
    *(
        ("wds_mix", (IterableWrapper([]),), {"weights": weights, "stop": "all"}, ValueError, "weights must be")
        for weights in (
            *[(), (1,), (1, 2, 3), 3, "12", {"a": 1, "b": 2}],
            *[(1, value) for value in (0, -2, math.nan, math.inf, 10**400, 1j, "2", None, True)],
        )
    ),
    *(
        ("wds_mix", (IterableWrapper([]),), {"stop": stop}, ValueError, "'first', 'all', 'cycle'")
        for stop in ("", "last", "First", 1, True)
    ),
    ("wds_mix", (IterableWrapper([]),), {}, TypeError, "stop"),
    *(
        ("wds_mix", (IterableWrapper([]), other), {"stop": "all"}, TypeError, "source 2, counted from 0")
        for other in (None, [1, 2], "ab", 2)
    ),
]


@pytest.mark.parametrize("form", dict.fromkeys(row[0] for row in OPTIONS))
def test_constructors_refuse_options_when_they_are_wrong(form: str) -> None:
    """Each says which option it is, and shows no secret."""
    for _, arguments, options, error, match in (row for row in OPTIONS if row[0] == form):
        with pytest.raises(error, match=match) as caught:
            getattr(IterableWrapper([]), form)(*arguments, **options)
        assert "secret" not in str(caught.value), arguments


#: Stages, the items that they refuse, and what they raise for each.
ITEMS: list[tuple[Any, tuple[Any, ...], Any, str]] = [
    (
        lambda pipe: pipe.load_wds_shards(),
        (3, None, ["a.tar"], ("a.tar", 1, 2), b"a.tar"),
        ShardListError,
        "load_wds_shards got {kind} .*it takes URLs",
    ),
    (
        lambda pipe: pipe.load_wds_shards(),
        tuple(ShardSlice(*part) for part in (("x", -1), ("x", 0, -1), ("x", 0, None, 0), ("x", 0.5), ("x", None))),
        ShardListError,
        "is not a slice of a shard",
    ),
    (
        lambda pipe: pipe.split_shards(),
        (5, ("a.tar", None), ["a.tar"], b"a.tar", ShardSlice("a.tar")),
        ShardListError,
        "split_shards got {kind} .*it takes URLs",
    ),
    (
        lambda pipe: pipe.group_by_key(),
        (3, ("a.txt",), ("a.txt", 3, 4), {"a": 1}, ("a.txt", 5), ("a.txt", "text")),
        SampleError,
        "group_by_key",
    ),
    (
        lambda pipe: pipe.wds_unbatch(),
        (
            *(3, "ab", None, torch.zeros(2), torch.tensor(1), np.zeros(2), {"a": 1}, {"__key__": "abc", "txt": "abc"}),
            *((torch.zeros(2), 3), (torch.tensor(1), torch.tensor(2)), (np.array(1),), (b"ab", [1, 2]), ("ab", "cd")),
            *(["ab", "cd"], ({"a": 1}, [1]), ([1, 2], {1, 2})),
        ),
        ValueError,
        "wds_unbatch got {kind} .*a tuple or dict of columns",
    ),
    (lambda pipe: pipe.wds_decode(), NO_SAMPLES, TypeError, "wds_decode got {kind} .*before .wds_to_tuple"),
    (lambda pipe: pipe.wds_rename(a="b"), NO_SAMPLES, TypeError, "wds_rename got {kind} .*before .wds_to_tuple"),
    (lambda pipe: pipe.wds_map_dict(a=len), NO_SAMPLES, TypeError, "wds_map_dict got {kind} .*before .wds_to_tuple"),
    (lambda pipe: pipe.wds_rename_keys(a="b"), NO_SAMPLES, TypeError, "wds_rename_keys got {kind} .*before .wds_to_t"),
    (lambda pipe: pipe.wds_to_tuple("a"), NO_SAMPLES, TypeError, "wds_to_tuple got {kind} .*before .wds_to_tuple"),
    (lambda pipe: pipe.wds_extract_keys("a"), NO_SAMPLES, TypeError, "wds_extract_keys got {kind} .*before .wds_to_t"),
]


@pytest.mark.parametrize("row", ITEMS, ids=lambda row: row[-1].split()[0])
def test_stages_refuse_items_when_they_are_of_another_kind(row: Any) -> None:
    """The message names what came and what is taken: mostly, stages stand in the wrong order."""
    stage, items, error, match = row
    for item in items:
        with pytest.raises(error, match=match.format(kind=type(item).__name__)):
            list(stage(IterableWrapper([item], deepcopy=False)))
