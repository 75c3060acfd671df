"""Shards from web servers: ``http:`` and ``https:``, by urllib3, which is imported when it is needed.

`client` sends one request; `source` goes on where one breaks, if the object is still the same.
"""

from __future__ import annotations

import io

from torchdata_wds.storage.places import Place


def open_http(place: Place, offset: int) -> io.BufferedReader:
    """Opens a shard on a web server; an offset becomes a range request if the server and the shard allow it.

    A user name and password in the URL are sent as basic authentication.
    """
    from torchdata_wds.storage.http.source import open_object

    return open_object(place, offset)
