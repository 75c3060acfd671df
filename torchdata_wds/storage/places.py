"""Where a shard lies: its URL is resolved once, and every backend takes the result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torchdata_wds.environment import ais_schemes, rewriting_variables
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.rewriting import RewriteRules
from torchdata_wds.storage.urls import AIS, LOCAL, mask_url, scheme_of, url_text

_rules_of = lru_cache(maxsize=16)(RewriteRules)


class Place(NamedTuple):
    """Where a shard lies."""

    url: str  # as the rewriting rules made it
    scheme: str  # selects the backend, as `scheme_of` says; "ais" for every scheme that goes through AIStore
    options: StorageOptions  # of all protocols
    shown: str  # the URL without what is secret in it, for messages
    name: str  # the URL as it was given

    @property
    def is_local(self) -> bool:
        """Whether it is a local path or a ``file:`` URL."""
        return self.scheme in LOCAL

    @property
    def is_moved(self) -> bool:
        """Whether a rule sends it elsewhere."""
        return self.url != self.name


def place_of(url: str, options: StorageOptions, *, name: str | None = None) -> Place:
    """Returns the place of a URL to which no rule is applied."""
    scheme = scheme_of(url)
    kind = AIS if scheme in ais_schemes() else scheme
    return Place(url, kind, options, mask_url(url), url if name is None else name)


def resolve(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
) -> Place:
    """Finds the place of a shard, by the rules given and then by those of the environment.

    A malformed rule is a ValueError if it was given, and a ShardOpenError if it is the environment's.
    """
    text = url_text(url)
    if isinstance(storage_options, StorageOptions) and rewrite is None:
        options = storage_options
    else:
        options = StorageOptions(storage_options, rewrite=rewrite)
    found = options.rewrite.apply(text)
    for variable, rules in rewriting_variables() if found is None else ():
        try:
            found = _rules_of(rules).apply(text)
        except ValueError as error:
            shard = mask_url(text)
            raise ShardOpenError(
                f"cannot open shard {shard} while {variable} is wrong: {error}", shard=shard
            ) from error
        if found is not None:
            break
    return place_of(text if found is None else found, options, name=text)
