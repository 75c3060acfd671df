"""Shards in AIStore, by its protocol over HTTP: ``ais:``, and the schemes listed in ``USE_AIS_FOR``.

The gateway at ``AIS_ENDPOINT`` redirects to the machine that has the object. The token is sent only to the gateway: the
redirect itself grants permission.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urljoin, urlsplit

from torchdata_wds.environment import ais_endpoint, ais_token
from torchdata_wds.errors import ShardListError
from torchdata_wds.storage.byte_streams import ByteStream, open_named
from torchdata_wds.storage.places import Place, StorageOptions
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.targets.fsspec import RemoteTarget, open_remote_target, remove_remote
from torchdata_wds.storage.urls import AIS, cannot_list, cannot_open, mask_url

if TYPE_CHECKING:
    import urllib3

_PROVIDERS = {
    "ais": "ais",
    **dict.fromkeys(("s3", "s3a", "aws"), "aws"),
    **dict.fromkeys(("gs", "gcs", "gcp"), "gcp"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "azure"),
    **dict.fromkeys(("oci", "oc"), "oci"),
}

_REDIRECTED = (301, 302, 307, 308)


def object_address(url: str) -> str:
    """Returns the address of an object at AIStore's gateway; raises ShardOpenError if there is none."""
    scheme, _, rest = url.partition("://")
    endpoint, provider = ais_endpoint(), _PROVIDERS.get(scheme.lower())
    bucket, _, name = rest.partition("/")
    bucket = bucket.partition("@")[0]  # abfs://container@account.host/name
    if not endpoint:
        reason = f"{scheme}: goes through AIStore, and AIS_ENDPOINT is not set; set it, as http://host:51080"
    elif not endpoint.lower().startswith(("http://", "https://")):
        reason = f"AIS_ENDPOINT={mask_text(f'http://{endpoint}')[7:]!r} is not an address such as http://host:51080"
    elif provider is None:
        reason = f"USE_AIS_FOR names {scheme!r}, which AIStore does not know; known are {', '.join(_PROVIDERS)}"
    elif not bucket or not name:
        reason = f"it names no object in a bucket; write {scheme}://bucket/object"
    else:
        return f"{endpoint}/v1/objects/{quote(bucket)}/{quote(name)}?provider={provider}"
    raise cannot_open(mask_url(url), reason)


def open_ais(place: Place, offset: int) -> ByteStream:
    """Opens a shard in AIStore; the options for ``"ais"`` are those for web servers."""
    from torchdata_wds.storage.sources.http import open_http  # which imports urllib3, as the client does

    return open_named(partial(open_http, web_place(place), offset), place.url, "AIStore's address of")


def web_place(place: Place) -> Place:
    """Returns the address of an object at AIStore's gateway, with the headers that it needs."""
    address = object_address(place.url)
    protocol = address.partition(":")[0].lower()
    options = StorageOptions({protocol: {**place.options.get(AIS, {}), "headers": _headers(place.options)}})
    return Place(address, protocol, options, mask_url(address), place.url)


def open_ais_target(place: Place, overwrite: bool) -> RemoteTarget:
    """Collects a shard in a temporary file, and then uploads it to AIStore."""
    return open_remote_target(place, overwrite, (_AisStore(_headers(place.options)), object_address(place.url)))


def remove_ais(place: Place) -> None:
    """Removes an object if it is there."""
    remove_remote(place, (_AisStore(_headers(place.options)), object_address(place.url)))


def no_listing(url: str) -> ShardListError:
    """Returns the error for a glob or folder in AIStore."""
    return cannot_list(
        url,
        "AIStore is not searched for globs and folders; write braces, as ais://bucket/train-{000..146}.tar, or take "
        "the URLs from the shards' own list",
    )


class _AisStore:
    """The methods of a filesystem that a `RemoteTarget` calls, with the addresses of `object_address` as paths."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def exists(self, address: str) -> bool:
        try:
            self.info(address)  # in AIStore itself, or in the store that it caches
        except FileNotFoundError:
            return False
        return True

    def info(self, address: str) -> dict[str, Any]:
        length = self._ask("HEAD", address).headers.get("Content-Length", "")
        return {"size": int(length) if re.fullmatch("[0-9]{1,18}", length) else None}

    def put_file(self, local: str, address: str) -> None:
        with Path(local).open("rb") as file:
            self._ask("PUT", address, file)

    def rm_file(self, address: str) -> None:
        self._ask("DELETE", address)

    def invalidate_cache(self) -> None:
        """Does nothing: there is no cache."""

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Does nothing: a bucket has no folders."""

    def _ask(self, method: str, address: str, file: BinaryIO | None = None) -> "urllib3.BaseHTTPResponse":
        # The gateway does not accept data: a request without any is answered with the address to send it to.
        answer = self._send(method, address, self._headers)
        place = urljoin(address, answer.headers.get("Location", ""))
        if answer.status not in _REDIRECTED or place == address:
            _check(answer)
            if file is None:
                return answer
        headers = self._headers if urlsplit(place.lower())[:2] == urlsplit(address.lower())[:2] else {}
        if file is not None:
            headers = {**headers, "Content-Length": str(os.fstat(file.fileno()).st_size)}
        return _check(self._send(method, place, headers, file))

    def _send(self, method: str, url: str, headers: dict[str, str], body: Any = None) -> "urllib3.BaseHTTPResponse":
        import urllib3

        # A new connection for each request: there are few, and a forked child must not inherit one.
        with urllib3.PoolManager(timeout=urllib3.Timeout(connect=30, read=300)) as pool:
            return pool.request(method, url, headers=headers, body=body, redirect=False, retries=False)


def _check(answer: "urllib3.BaseHTTPResponse") -> "urllib3.BaseHTTPResponse":
    if answer.status < 300:
        return answer
    told = mask_text(answer.data.decode(errors="replace")[:200].strip())
    message = f"AIStore answered {answer.status} {answer.reason or ''}".rstrip() + (f": {told}" if told else "")
    kinds: dict[int, type[OSError]] = {404: FileNotFoundError, 401: PermissionError, 403: PermissionError}
    raise kinds.get(answer.status, OSError)(message)


def _headers(options: StorageOptions) -> dict[str, str]:
    from torchdata_wds.storage.sources.http_client import read_http_options

    given = dict(read_http_options(AIS, options.get(AIS, {})).headers)
    token = ais_token()
    if token and not any(name.lower() == "authorization" for name in given):
        given["Authorization"] = f"Bearer {token}"
    return given
