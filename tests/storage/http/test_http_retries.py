"""How long a web server wants to be left alone."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from torchdata_wds.storage.http.client import retry_after


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
