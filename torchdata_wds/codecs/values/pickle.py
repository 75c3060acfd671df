"""Pickle fields, which run code that the shard chooses: off unless the program allows them."""

from __future__ import annotations

import pickle
from typing import Any

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError

# Fixed, so that the bytes do not depend on the Python that writes them.
_PROTOCOL = 4


def decode_pickle(data: bytes, options: DecodeOptions) -> Any:
    """Unpickles a field, only with ``allow_pickle=True`` and without ``WDS_SECURE=1``."""
    if not options.allow_pickle:
        raise UnsafeDataError(
            "is a pickle, which can run any code while it is loaded. If you trust whoever wrote the shard, decode with "
            "allow_pickle=True; otherwise leave the field as bytes, with only= naming the others"
        )
    if is_secure():
        raise UnsafeDataError("is a pickle, and WDS_SECURE=1 refuses pickles also where allow_pickle=True")
    return pickle.loads(data)


def encode_pickle(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Pickles a value; readers need ``allow_pickle=True``.

    Equal values may have different pickles: sets of str have another order in each process, unless PYTHONHASHSEED is
    set, and an object that is in a value twice is written once, where two equal ones are written twice.
    """
    return pickle.dumps(value, _PROTOCOL)
