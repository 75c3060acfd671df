"""An S3 server for tests: moto on the loopback address, with a record of what was asked, and faults on request."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.kits.servers import serving

KEY, SECRET = "AKIDTEST", "very-secret"


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    range: str
    key: str


class S3Server:
    """A running server.

    Attributes:
        url: Its address.
        asked: The requests since `asked.clear()`.
        faults: Each is called with the next GET of an object and its body, and gives what is sent of it.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self.url = ""
        self.asked: list[Asked] = []
        self.faults: list[Callable[[bytes], bytes]] = []

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Storage options that reach it."""
        return {"s3": {"key": KEY, "secret": SECRET, "endpoint_url": self.url}}

    def put(self, path: str, data: bytes, *, key: str = KEY) -> None:
        """Stores an object, making its bucket, without the code under test."""
        import boto3

        client = boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=key, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        bucket, _, name = path.partition("/")
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key=name, Body=data)
        client.close()

    def gets(self) -> list[Asked]:
        """The requests for the content of objects."""
        return [asked for asked in self.asked if asked.method == "GET" and "/" in asked.path[1:]]

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        key = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        path = environ.get("PATH_INFO", "")
        asked = Asked(environ["REQUEST_METHOD"], path, environ.get("HTTP_RANGE", ""), key[1] if key else "")
        self.asked.append(asked)
        answer = self._app(environ, start_response)
        if self.faults and asked.method == "GET" and "/" in path[1:]:
            # Less than its length says: the connection is closed behind it.
            return [self.faults.pop(0)(b"".join(answer))]
        return answer


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs the server in a thread of this process; what is in it is gone at the end."""
    from moto.moto_api._internal import moto_api_backend
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any, **__: Any) -> None:
            pass

    app = S3Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    try:
        with serving(server) as app.url:
            yield app
    finally:
        moto_api_backend.reset()
