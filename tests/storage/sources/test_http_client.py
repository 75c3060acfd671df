"""Single answers of web servers: how long to wait, and whether two are of the same object."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from torchdata_wds.storage.sources.http import Version, content_range
from torchdata_wds.storage.sources.http_client import retry_after

DATE = "Sat, 01 Jan 2022 10:00:{:02d} GMT"


@pytest.mark.parametrize(("seconds", "settled"), [(0, False), (1, True), (30, True)])
def test_a_date_proves_something_when_it_was_over_as_the_answer_was_made(seconds: int, settled: bool) -> None:
    """Within one second an object may be written twice: RFC 9110, 8.8.2.2."""
    found = Version.of(200, {"Last-Modified": DATE.format(0), "Date": DATE.format(seconds)})
    assert found.condition == (DATE.format(0) if settled else None)


@pytest.mark.parametrize("modified", ["", "yesterday", "Sat, 99 Jan 99999999 10:00:00 GMT", DATE.format(7)])
def test_a_date_proves_nothing_when_it_cannot_be_read_or_lies_ahead(modified: str) -> None:
    """It is compared all the same, and is no condition."""
    assert Version.of(200, {"Last-Modified": modified, "Date": DATE.format(5)}).condition is None
    assert Version.of(200, {"Last-Modified": modified}).condition is None


def test_a_tag_goes_before_a_date_when_there_are_both() -> None:
    """A weak one is no condition, and keeps the date from being one: it may have changed within the second."""
    date = {"Last-Modified": DATE.format(0), "Date": DATE.format(9)}
    assert Version.of(200, {"ETag": '"a"', **date}).condition == '"a"'
    assert Version.of(200, {"ETag": 'W/"a"', **date}).condition is None


@pytest.mark.parametrize(
    ("headers", "difference"),
    [
        ({"ETag": '"a"', "Last-Modified": "later"}, None),
        ({"ETag": 'W/"a"'}, None),
        ({"ETag": '"b"'}, "its ETag was"),
        ({"Last-Modified": "later"}, "its Last-Modified was"),
        ({"Last-Modified": "then", "Content-Length": "9"}, "its length was 10 bytes and is now 9"),
        ({"Content-Length": "9" * 19}, None),
        ({"Content-Length": "9", "Transfer-Encoding": "chunked"}, None),
        ({"Content-Encoding": "GZIP"}, "its Content-Encoding was"),
        ({}, None),
    ],
)
def test_versions_differ_when_what_both_tell_does(headers: dict[str, str], difference: str | None) -> None:
    """A tag decides alone over dates; a length counts where it is told."""
    known = Version.of(200, {"ETag": '"a"', "Last-Modified": "then", "Content-Length": "10"})
    found = known.difference(Version.of(200, headers))
    assert found is None if difference is None else str(found).startswith(difference)


def test_content_range_is_nothing_when_it_is_no_range() -> None:
    """Whatever cannot be a range of bytes tells nothing, however long its numbers."""
    for value in ("", "bytes", "items 0-1/2", "bytes 0-1", "bytes 1/2", "bytes 0-1/" + "9" * 5000, "bytes ²-3/4"):
        assert content_range({"Content-Range": value}) == (None, None)
    assert content_range({"Content-Range": " bytes 0-1/* "}) == (0, None)
    assert content_range({"Content-Range": "bytes 5-9/100"}) == (5, 100)
    assert content_range({"Content-Range": "bytes */100"}) == (None, 100)


def test_retry_after_reads_seconds_and_dates() -> None:
    """Both forms, within reason; half a second where there is none that can be read."""
    now = datetime.now(UTC)
    assert retry_after({"Retry-After": " 12 "}) == 12
    assert 18 < retry_after({"Retry-After": format_datetime(now + timedelta(seconds=20), usegmt=True)}) <= 20
    assert retry_after({"Retry-After": format_datetime(now - timedelta(days=1), usegmt=True)}) == 0
    assert retry_after({"Retry-After": format_datetime(now + timedelta(days=1), usegmt=True)}) == 300
    assert retry_after({"Retry-After": "999999999999999999999"}) == 300
    for value in ("", "soon", "-5", "1.5", "²", "Sat, 99 Foo 2022 10:00:00 GMT"):
        assert retry_after({"Retry-After": value}) == 0.5
