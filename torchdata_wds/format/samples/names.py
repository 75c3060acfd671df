"""Member names to sample keys and fields and back, and the options of grouping.

The key is the folder part plus the base name up to its first dot, the field is all after that dot, as in WebDataset.
Unlike there, hidden files never become fields. Only what is read back as it is may be written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.checks import check_choice
from torchdata_wds.errors import Advice, EncodingError, MissingFieldError, SampleError
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing, SplitName

_DOT, _NEWLINE, _SLASH = b".\n/"
_OTHERS = bytes(set(range(256)) - {_DOT, _NEWLINE, _SLASH})  # all bytes but these three

_CURES = {
    "metadata": "its first part has the form __x__, which marks what belongs to no sample",
    "macOS metadata": "macOS writes such names beside the real files, and readers skip them",
}
_LONE_SURROGATE = "it holds {!r}, which is not a character of its own (a lone surrogate)"
_KEEP_CASE = Advice.of("Rename it, or write and read with {}", "lowercase=False", "--keep-case")

#: Fields that the library itself puts into samples: a member that would become one is an error.
RESERVED_FIELDS = frozenset({"__key__", "__url__", "__local_path__", "__dataset__", "__pad__"})


def is_metadata(field: str) -> bool:
    """Returns whether a field is about the sample, as ``__key__`` is, and not its data."""
    return field.startswith("__") and field.endswith("__")


def split_name(name: str) -> tuple[str, str] | None:
    """Splits a member name, without a leading ``./``, into its key, folder included, and the field after the first dot.

    None is for a name that belongs to no sample; `skip_reason` says why.

    Example:
        >>> split_name("./d.v1/a.seg.png"), split_name("d.v1/README")
        (('d.v1/a', 'seg.png'), None)
    """
    name = name.removeprefix("./")
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start or dot + 1 == len(name) or (name.startswith("__") and _is_metadata_name(name)):
        return None
    return name[:dot], name[dot + 1 :]


def split_names(names: Sequence[str], split: SplitName) -> tuple[Sequence[str], Sequence[str]] | None:
    """Splits names to keys and fields; None where one belongs to no sample, or the rule is the user's own."""
    if split is split_name and (columns := _split_plain(names)) is not None:
        return columns
    if split is not split_name and split is not _split_last_dot:
        return None
    pairs = [pair for name in names if (pair := split(name)) is not None]
    if len(pairs) < len(names):
        return None
    keys, fields = zip(*pairs, strict=True)
    return keys, fields


def _split_plain(names: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """Splits names at their first dot, if that is right for all of them."""
    joined = "\n".join(("", *names, ""))
    has_slashes = "/" in joined  # which is found much faster than two characters
    if has_slashes and "\n./" in joined:
        joined = joined.replace("\n./", "\n")
    if (has_slashes and "/." in joined) or ("_" in joined and "\n__" in joined):
        return None
    encoded = joined.encode("utf-8", "surrogatepass")
    shape = b"/" * joined.count("/", 0, joined.find("\n", 1)) + b".\n"  # what is left of the first name
    if encoded.translate(None, _OTHERS) == b"\n" + shape * len(names):
        columns = joined[1:-1].replace(".", "\n").split("\n")
        keys, fields = columns[::2], columns[1::2]
        return (keys, fields) if all(keys) and all(fields) else None
    if "\n." in joined or ".\n" in joined:
        return None
    letters = np.frombuffer(encoded, np.uint8)
    ends, dots = np.flatnonzero(letters == _NEWLINE), np.flatnonzero(letters == _DOT)
    places = np.searchsorted(dots, ends[:-1])  # of the first dot after each newline
    if len(ends) != len(names) + 1 or not len(dots) or places[-1] == len(dots):
        return None
    firsts = dots[places]
    if (firsts > ends[1:]).any():  # a name without a dot
        return None
    slashes = np.flatnonzero(letters == _SLASH)
    if len(slashes) and (np.searchsorted(slashes, firsts) != np.searchsorted(slashes, ends[1:])).any():
        return None  # a dot in a folder's name
    parts = letters.copy()
    parts[firsts] = _NEWLINE
    # No tuples, of which the garbage collector would look at a hundred thousand now and then.
    columns = parts[1:-1].tobytes().decode("utf-8", "surrogatepass").split("\n")
    return columns[::2], columns[1::2]


def _split_last_dot(name: str) -> tuple[str, str] | None:
    if split_name(name) is None:
        return None
    name = name.removeprefix("./")
    dot = name.rfind(".")
    return (name[:dot], name[dot + 1 :]) if dot + 1 < len(name) else None


def _is_metadata_name(name: str) -> bool:
    top = name.partition("/")[0]
    return top == "__MACOSX" or (len(top) >= 4 and top.endswith("__"))


def skip_reason(name: str) -> str:
    """Says why a name belongs to no sample, in the words that the pipes count by."""
    name = name.removeprefix("./")
    base = name[name.rfind("/") + 1 :]
    top = name.partition("/")[0]
    if base.startswith("._") or base == ".DS_Store" or top == "__MACOSX":
        return "macOS metadata"
    if top.startswith("__") and _is_metadata_name(name):
        return "metadata"
    if base.startswith("."):
        return "hidden file"
    return "empty extension" if base.endswith(".") else "no extension"


def key_splitter(keys: KeyRule) -> SplitName:
    """Turns a ``keys=`` argument into a function from name to (key, field), or None to skip the member.

    A callable sees every name, hidden ones too, and decides alone.
    """
    if keys in ("first_dot", "last_dot"):
        return split_name if keys == "first_dot" else _split_last_dot
    if callable(keys):
        return partial(_checked, keys)
    raise ValueError(f"keys must be 'first_dot', 'last_dot' or a callable name -> (key, field) or None, not {keys!r}")


def _checked(function: SplitName, name: str) -> tuple[str, str] | None:
    answer: object = function(name)
    if answer is None:
        return None
    if isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(part, str) for part in answer):
        return answer
    what = f"keys= returned {answer!r} for member {name!r}"
    raise TypeError(f"{what}; it must return a tuple (key, field) of two str, or None")


class GroupingRules(NamedTuple):
    """How members become samples: the options of `group_members`."""

    split: SplitName
    lowercase: bool = True
    fields: frozenset[str] | None = None
    on_duplicate: OnDuplicate = "error"
    on_reappearing: OnReappearing = "error"


def grouping_rules(
    keys: KeyRule = "first_dot",
    lowercase: bool = True,
    fields: Iterable[str] | str | None = None,
    on_duplicate: OnDuplicate = "error",
    on_reappearing: OnReappearing = "error",
) -> GroupingRules:
    """Checks the options of grouping, which are those of ``group_by_key``."""
    check_choice("on_duplicate", on_duplicate, ("error", "first", "last"))
    check_choice("on_reappearing", on_reappearing, ("error", "warn", "allow"))
    kept = None
    if fields is not None:
        separated = re.split(r"[;\s]+", fields.strip("; \t\n")) if isinstance(fields, str) else fields
        names = list(separated) if isinstance(separated, Iterable) else []
        if not names or not all(isinstance(name, str) and name.strip(".") for name in names):
            raise ValueError(f"fields must name at least one field, as 'jpg cls' or ['jpg', 'cls'], not {fields!r}")
        kept = frozenset((name.lower() if lowercase else name).removeprefix(".") for name in names)
    return GroupingRules(key_splitter(keys), lowercase, kept, on_duplicate, on_reappearing)


def is_written(field: object, key: object = None) -> bool:
    """Returns whether a sample's entry becomes a member: not names like ``__key__``, which describe the sample."""
    if not isinstance(field, str):
        what = f"field {field!r} of sample {key!r} is of type {type(field).__name__}"
        known = key if isinstance(key, str) else None
        raise SampleError(f"{what}: the name of a field must be a str, such as 'jpg'", key=known)
    return not is_metadata(field)


def check_key(key: object) -> bytes:
    """Checks a sample's key."""
    if key is None:
        what = "the sample has no __key__: each needs one, a str that no other sample of its shard has"
        raise MissingFieldError(what, field="__key__")
    if not isinstance(key, str):
        message = f"__key__ is {key!r}, of type {type(key).__name__}: it must be a str. Write str(key), say"
        raise SampleError(message, field="__key__")
    # a member name that the reader would split elsewhere, skip, or that unpacking would put anywhere else
    if split_name(key + ".x") != (key, "x") or key[0] == "/" or "\0" in key or (".." in key and ".." in key.split("/")):
        reason = _reason(key)
    else:
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            reason = _LONE_SURROGATE.format(key[error.start])
    raise SampleError(f"key {key!r} cannot be written, because it could not be read back: {reason}", key=key)


def check_field(field: str, key: object, lowercase: bool = True) -> bytes:
    """Checks the name of a field."""
    reason = "" if field else "it is empty"
    if "/" in field or "\0" in field:
        reason = "it holds a slash or NUL"
    elif lowercase and field.lower() != field:
        reason = f"it is read as {field.lower()!r}, in lower case."
    try:
        encoded = field.encode()
    except UnicodeEncodeError as error:
        reason = _LONE_SURROGATE.format(field[error.start])
    if reason:
        what = f"field {field!r} of sample {key!r} cannot be written, because it could not be read back: {reason}"
        known = key if isinstance(key, str) else None
        advice = _KEEP_CASE if reason.endswith("lower case.") else ""
        raise SampleError(what, key=known, field=field, advice=advice)
    return encoded


def as_bytes(value: Any, key: object, field: str) -> bytes:
    """Gives a value that is bytes, a bytearray or a memoryview as bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    found = "None" if value is None else f"a value of type {type(value).__name__}"
    what = f"field {field!r} of sample {key!r} is not encoded: expected bytes, found {found}"
    known = key if isinstance(key, str) else None
    raise EncodingError(f"{what}. Encode it first, or let encoder=True do it", key=known, field=field)


def _reason(key: str) -> str:
    base = key.rpartition("/")[2]
    cure = base.replace(".", "_")
    dotted = f"its last part {base!r} has a dot, and the field begins after the first dot; write {cure!r}, say"
    reasons = (
        (not key, "it is empty"),
        (key.startswith("/"), "it is an absolute path; leave the first slash out"),
        (".." in key.split("/"), "it has a part '..', which leads out of the folder that an archive is unpacked in"),
        ("\0" in key, "it holds a NUL"),
        (not base, "it ends in a slash, so that its file has no name"),
        ("." in base, dotted),
        (key.startswith("./"), "a leading './' is stripped when it is read; leave it out"),
    )
    return next((reason for holds, reason in reasons if holds), None) or _CURES[skip_reason(key + ".x")]
