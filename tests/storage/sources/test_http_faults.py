"""Web servers that fail, through the whole chain: identical samples, or an error that says what happened."""

import gzip
import json
import os
import random
import re
from itertools import chain, repeat
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds  # noqa: F401  registers the functional forms
from tests.kits.fault_server import Fault, Plan, Site, serve_site
from tests.kits.processes import open_files, wait_until
from tests.kits.shards import tar_bytes
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.handlers import ignore_and_continue, warn_and_continue
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.sources import http_client
from torchdata_wds.storage.sources.http_client import Answer

PIECE = 64 * 1024
OPTIONS: dict[str, Any] = {"http": {"retries": 3, "read_timeout": 0.3, "connect_timeout": 5}}
SERVERS: list[dict[str, Any]] = [
    {"validators": "etag"},
    {"validators": "none"},
    {"validators": "weak"},
    {"validators": "date"},
    {"validators": "fresh"},
    {"validators": "etag", "heeds_condition": False},
    {"validators": "date", "repeats": False},
    {"validators": "etag", "tells_ranges": False, "chunked": True},
]
#: The first two by default, the others with the slow tests.
every_server = pytest.mark.parametrize(
    "server",
    [
        pytest.param(server, id=",".join(map(str, server.values())), marks=[pytest.mark.slow] if number > 1 else [])
        for number, server in enumerate(SERVERS)
    ],
)


def members(prefix: str, count: int, version: int = 0, size: int = 3000) -> list[tuple[str, bytes]]:
    """Members of `count` samples that no compression makes smaller, other ones for each version."""
    found = []
    for number in range(count):
        noise = random.Random(f"{prefix}/{number}/{version}").randbytes(size + number % 7)
        found += [
            (f"{prefix}{number:04d}.bin", noise),
            (f"{prefix}{number:04d}.json", json.dumps({"number": number, "version": version}).encode()),
        ]
    return found


SHARD = tar_bytes(members("a", 60))
OTHER = tar_bytes(members("a", 60, version=1))
BOUNDARIES = [found.start() for found in re.finditer(rb"a\d{4}\.(bin|json)\0", SHARD)]
PATH = "/train-000.tar"


def samples_of(urls: list[str], **options: Any) -> list[dict[str, Any]]:
    """All samples, without what depends on the server's port."""
    pipe = IterableWrapper(urls).load_wds_shards(storage_options=OPTIONS, **options).group_by_key()
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in pipe]


def expected(prefix: str, count: int, version: int = 0) -> list[dict[str, Any]]:
    """The samples of `members`."""
    found = members(prefix, count, version)
    return [
        {"__key__": name.partition(".")[0], "bin": data, "json": record}
        for (name, data), (_, record) in zip(found[::2], found[1::2], strict=True)
    ]


SAMPLES = expected("a", 60)


def run(plan: Plan, shard: bytes = SHARD, **server: Any) -> tuple[list[dict[str, Any]], Site]:
    """Reads one shard from a server; gives the samples."""
    site = Site({PATH: shard}, {PATH: OTHER}, {PATH: plan}, **server)
    with serve_site(site) as address:
        return samples_of([address + PATH]), site


def fail(plan: Plan, match: str, kind: type[Exception] = ShardOpenError, **server: Any) -> list[dict[str, Any]]:
    """Reads one shard to the error that must come; gives the samples before it, which must be the shard's first."""
    site = Site({PATH: SHARD}, {PATH: OTHER}, {PATH: plan}, **server)
    found = []
    with serve_site(site) as address:
        pipe = IterableWrapper([address + PATH]).load_wds_shards(storage_options=OPTIONS).group_by_key()
        with pytest.raises(kind, match=match) as caught:
            found.extend({name: value for name, value in sample.items() if name != "__url__"} for sample in pipe)
        assert f"{address}{PATH}" in str(caught.value)
    assert found == SAMPLES[: len(found)]
    return found


# --------------------------------------------------------------------------------------------------- going on
@every_server
@pytest.mark.parametrize("kind", ["drop", pytest.param("reset", marks=pytest.mark.slow)])
def test_samples_are_identical_when_the_connection_drops_every_64_kb(kind: str, server: dict[str, Any]) -> None:
    """Each connection gives 64 KB and is gone: reading goes on behind it, whatever tells versions apart."""
    samples, site = run(repeat(Fault(kind, after=PIECE)), **server)
    assert samples == SAMPLES
    assert len(site.requests) >= len(SHARD) // PIECE


def test_reading_goes_on_at_the_very_byte_when_the_server_has_strong_validators() -> None:
    """Range and If-Range name the byte and the version; a date serves where there is no tag."""
    for validators, condition in (("etag", r'"[0-9a-f]{16}"'), ("date", r"Sat, 01 Jan 2022 10:00:00 GMT")):
        samples, site = run(iter([Fault("drop", until=PIECE)]), validators=validators)
        assert samples == SAMPLES
        (_, first), (_, second) = site.requests
        assert ("Range" in first, "If-Range" in first) == (False, False)
        assert second["Range"] == f"bytes={PIECE}-"
        assert re.fullmatch(condition, second["If-Range"])


@pytest.mark.parametrize("validators", ["weak", "fresh", "none"])
def test_last_bytes_are_asked_for_again_when_no_validator_proves_anything(validators: str) -> None:
    """A weak tag or a date of the same second is no condition: the end of what was delivered is compared."""
    samples, site = run(iter([Fault("drop", until=PIECE)]), validators=validators)
    assert samples == SAMPLES
    again = site.requests[1][1]
    assert "If-Range" not in again
    assert 0 < int(again["Range"].removeprefix("bytes=").removesuffix("-")) < PIECE


@every_server
def test_samples_are_identical_when_connections_drop_between_members(server: dict[str, Any]) -> None:
    """An end exactly where a member begins is no end of the shard."""
    samples, _ = run(iter([Fault("drop", until=position) for position in BOUNDARIES[::5]]), **server)
    assert samples == SAMPLES


def test_samples_are_identical_when_connections_drop_in_the_end_marker() -> None:
    """Neither the end marker's middle nor the byte before the last is the end."""
    cuts = [len(SHARD) - 1024, len(SHARD) - 512, len(SHARD) - 1]
    samples, _ = run(iter([Fault("drop", until=position) for position in cuts]))
    assert samples == SAMPLES


@pytest.mark.slow
@every_server
def test_samples_are_identical_when_the_server_stalls(server: dict[str, Any]) -> None:
    """A connection on which nothing comes is as good as broken."""
    samples, _ = run(iter([Fault("stall", until=70_000)]), **server)
    assert samples == SAMPLES


@pytest.mark.parametrize("wait", [None, "1"])
def test_samples_are_identical_when_the_server_is_overloaded(wait: str | None) -> None:
    """Bursts of 503 at the beginning and in the middle are waited out."""
    burst = [Fault("status", wait=wait)] * 3
    samples, _ = run(iter([*burst, Fault("drop", until=PIECE), *burst[:2], Fault("drop", until=PIECE + 1), *burst[:2]]))
    assert samples == SAMPLES


@pytest.mark.parametrize(
    "status", [429, *(pytest.param(status, marks=pytest.mark.slow) for status in (408, 425, 500, 502, 503, 504))]
)
def test_samples_are_identical_when_a_status_is_passing(status: int) -> None:
    """Whatever a server says that may be over in a moment."""
    samples, _ = run(iter([Fault("status", status=status), Fault("drop", until=5), Fault("status", status=status)]))
    assert samples == SAMPLES


@pytest.mark.parametrize("kind", ["silent", "garbage", "less"])
def test_samples_are_identical_when_an_answer_is_none(kind: str) -> None:
    """No answer, one that is no HTTP, and one with less than was asked for."""
    samples, site = run(iter([Fault("drop", until=PIECE), Fault(kind), Fault(kind)]))
    assert samples == SAMPLES
    assert len(site.requests) == 4


@every_server
def test_samples_are_identical_when_the_server_gives_no_parts(server: dict[str, Any]) -> None:
    """The shard is read from its start again, and what was delivered is compared and passed over."""
    cuts = [Fault("drop", until=position) for position in (100, PIECE, 2 * PIECE, len(SHARD) - 1)]
    samples, _ = run(iter(cuts), **{**server, "ranges": False})
    assert samples == SAMPLES


def test_samples_are_identical_when_a_server_stops_giving_parts() -> None:
    """Also where it had promised them, so that no checksum was kept: tag and last bytes are the same."""
    samples, _ = run(iter([Fault("drop", until=2 * PIECE), Fault("whole")]))
    assert samples == SAMPLES


@every_server
def test_the_end_is_found_when_a_length_is_not_known_and_the_last_byte_was_the_last(server: dict[str, Any]) -> None:
    """All bytes came, and the last chunk did not: 416 says that nothing is missing."""
    samples, _ = run(iter([Fault("drop", until=len(SHARD))]), **{**server, "chunked": True})
    assert samples == SAMPLES


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("validators", ["etag", "none"])
def test_an_offset_is_kept_when_the_connection_drops(ranges: bool, validators: str) -> None:
    """Reading that began inside the shard goes on there."""
    cuts = [None, Fault("drop", until=200_000), Fault("drop", until=200_000), Fault("drop", until=250_000)]
    site = Site({PATH: SHARD}, plans={PATH: iter(cuts)}, ranges=ranges, validators=validators)
    with serve_site(site) as address, open_shard(address + PATH, offset=150_000, storage_options=OPTIONS) as stream:
        assert stream.read() == SHARD[150_000:]
    assert len(site.requests) == 5


@pytest.mark.parametrize("validators", ["etag", "none"])
def test_an_offset_is_kept_when_the_server_stops_giving_parts(validators: str) -> None:
    """What lies before the offset is passed over, and the rest compared."""
    faults = [None, None, Fault("drop", until=200_000), Fault("whole"), Fault("drop", until=250_000), Fault("whole")]
    for plan in (faults[1:], [None, Fault("whole"), *faults[2:]]):
        with (
            serve_site(Site({PATH: SHARD}, plans={PATH: iter(plan)}, validators=validators)) as address,
            open_shard(address + PATH, offset=150_000, storage_options=OPTIONS) as stream,
        ):
            assert stream.read() == SHARD[150_000:]


@pytest.mark.parametrize("ranges", [True, False])
def test_compressed_shards_are_whole_when_the_connection_drops(ranges: bool) -> None:
    """What goes on is the compressed stream, below what decompresses it."""
    cuts = [Fault("drop", until=position) for position in (1, 15, 1000, PIECE)]
    samples, _ = run(iter(cuts), gzip.compress(SHARD, 1), ranges=ranges)
    assert samples == SAMPLES


@pytest.mark.usefixtures("_body")
def test_one_connection_serves_all_shards_when_they_are_read_to_their_ends() -> None:
    """A connection is kept for the next shard, and not where reading stopped early, which reads no more."""
    site = Site({f"/{number}.tar": SHARD for number in range(5)})
    with serve_site(site) as address:
        assert len(samples_of([address + path for path in site.objects])) == 5 * 60
        assert site.connections == 1
        assert samples_of([address + "/none.tar"], handler=ignore_and_continue) == []
        assert site.connections == 1
        with open_shard(address + "/0.tar") as stream:
            stream.read(512)
        samples_of([address + "/1.tar"])
    assert site.connections == 2


# ------------------------------------------------------------------------------------------------ named errors
@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", until=PIECE),
        Fault("reset", until=PIECE),
        pytest.param(Fault("stall", until=PIECE), marks=pytest.mark.slow),
    ],
)
def test_reading_gives_up_when_nothing_new_comes(fault: Fault) -> None:
    """As many attempts as `retries` allows bring nothing: the error tells byte, length and attempts."""
    # A reset takes with it what was not read yet.
    byte = r"[\d,]+" if fault.kind == "reset" else "65,536"
    fail(
        repeat(fault),
        rf"broke off after {byte} of {len(SHARD):,} bytes: .*gave up at byte {byte} after 4 attempts .*retries=3",
    )


def test_reading_gives_up_when_a_server_without_parts_never_gets_further() -> None:
    """What was delivered before is no progress."""
    fail(repeat(Fault("drop", until=PIECE)), "broke off after 65,536 .* after 4 attempts", ranges=False)


def test_reading_gives_up_when_the_server_stays_overloaded() -> None:
    """The status is named, at the beginning and in the middle."""
    fail(repeat(Fault("status")), "cannot open shard .*: the server answered 503 .*at byte 0 after 4 attempts")
    plan = chain([Fault("drop", until=PIECE)], repeat(Fault("status", status=429)))
    fail(plan, "broke off after 65,536 .*answered 429 Too Many Requests; gave up at byte 65,536 after 4 attempts")


@every_server
def test_reading_raises_when_the_server_overstates_the_length(server: dict[str, Any]) -> None:
    """A body that is shorter than promised is never taken for the whole."""
    fail(repeat(Fault("overstate")), "was changed|gave up", **{**server, "chunked": False})
    fail(repeat(Fault("overstate")), "gave up", **{**server, "chunked": False, "ranges": False})


def test_reading_raises_when_the_server_understates_the_length() -> None:
    """What is cut off at the length that was told is a cut shard."""
    fail(repeat(Fault("understate", size=2000)), "cut off|end-of-archive|end marker", ShardFormatError)
    fail(repeat(Fault("understate", size=50_000)), "cut off|end-of-archive|end marker", ShardFormatError)


CHANGED = [Fault("drop", until=PIECE), Fault("change")]


@pytest.mark.parametrize("ranges", [True, False])
@every_server
def test_reading_raises_when_the_object_changes(server: dict[str, Any], ranges: bool) -> None:
    """Another object of the same length is noticed: by its tag or date, or by the bytes themselves."""
    assert len(OTHER) == len(SHARD)
    fail(iter(CHANGED), "was changed while it was read, after 65,536 bytes: ", **{**server, "ranges": ranges})


def test_both_versions_are_named_when_the_object_changes() -> None:
    """The message has the tags, or the dates."""
    fail(iter(CHANGED), r"its ETag was '\"[0-9a-f]{16}\"' and is now '\"[0-9a-f]{16}\"'")
    fail(iter(CHANGED), "its Last-Modified was 'Sat, 01 Jan .*' and is now 'Sun, 02 Jan", validators="date")
    fail(iter(CHANGED), "its bytes differ from those already", validators="none")


def test_bytes_are_compared_when_a_part_comes_without_validators() -> None:
    """A server that looks at no condition and repeats no tag cannot pass another object for the same."""
    server = {"heeds_condition": False, "repeats": False}
    fail(iter([CHANGED[0], Fault("change")]), "its bytes differ from those already", **server)
    samples, site = run(iter([Fault("drop", until=PIECE)]), **server)
    assert samples == SAMPLES
    assert "If-Range" not in site.requests[2][1]


@pytest.mark.parametrize(("validators", "tells_ranges"), [("none", False), ("none", True), ("stuck", False)])
def test_all_bytes_are_compared_when_a_server_gives_no_parts(validators: str, tells_ranges: bool) -> None:
    """One byte of difference at the beginning, far from where reading goes on, is enough."""
    changed = SHARD[:1000] + bytes([SHARD[1000] ^ 1]) + SHARD[1001:]
    server = {"validators": validators, "ranges": False, "tells_ranges": tells_ranges}
    site = Site({PATH: SHARD}, {PATH: changed}, {PATH: iter(CHANGED)}, **server)
    with (
        serve_site(site) as address,
        pytest.raises(ShardOpenError, match=r"changed .*its bytes differ from those already"),
    ):
        samples_of([address + PATH])


def test_reading_raises_when_the_object_becomes_shorter() -> None:
    """An object that ends before the byte where reading goes on is another one."""
    site = Site({PATH: SHARD}, {PATH: SHARD[: PIECE // 2]}, {PATH: iter(CHANGED)}, validators="none")
    with serve_site(site) as address, pytest.raises(ShardOpenError, match=r"changed .*it ends at byte 32,768 now"):
        samples_of([address + PATH])
    site = Site({PATH: SHARD}, {PATH: SHARD[:-1024]}, {PATH: iter(CHANGED)}, validators="none")
    with serve_site(site) as address, pytest.raises(ShardOpenError, match=r"length was [\d,]+ bytes and is now [\d,]+"):
        samples_of([address + PATH])


@pytest.mark.parametrize(
    "status", [404, *(pytest.param(status, marks=pytest.mark.slow) for status in (400, 401, 403, 410, 501))]
)
def test_reading_raises_at_once_when_a_status_is_final(status: int) -> None:
    """One request and no more; in the middle, the byte is told."""
    site = Site({PATH: SHARD}, plans={PATH: repeat(Fault("status", status=status))})
    with serve_site(site) as address, pytest.raises(ShardOpenError, match=f"cannot open .* answered {status} "):
        samples_of([address + PATH])
    assert len(site.requests) == 1
    plan = iter([Fault("drop", until=PIECE), Fault("status", status=status)])
    assert fail(plan, f"broke off after 65,536 of .* answered {status} ")


def test_reading_raises_when_another_part_comes() -> None:
    """A part that begins elsewhere is refused, with what it says of itself."""
    fail(iter([Fault("drop", until=PIECE), Fault("elsewhere")]), "206 .*'bytes 65543-.*' for bytes from 65,536")


def test_reading_raises_when_a_part_is_longer_than_the_object() -> None:
    """Nothing is delivered that lies behind the length that the object had."""
    fail(
        iter([Fault("drop", until=PIECE), Fault("more")]), f"sent more bytes than the {len(SHARD):,} that it announced"
    )


def test_warn_and_continue_goes_on_with_the_next_shard_when_one_fails() -> None:
    """Whole samples of the failed shard, and all of the others; each failure is counted."""
    shards = {f"/{name}.tar": tar_bytes(members(name, 40)) for name in "abcd"}
    plans = {
        "/a.tar": chain([Fault("drop", until=PIECE)], repeat(Fault("status"))),
        "/b.tar": iter([Fault("drop", until=1), Fault("stall", until=PIECE)]),
        "/c.tar": repeat(Fault("status", status=404)),
    }
    with serve_site(Site(shards, plans=plans)) as address:
        loader = IterableWrapper([address + path for path in shards]).load_wds_shards(
            storage_options=OPTIONS, handler=warn_and_continue
        )
        keys = [sample["__key__"] for sample in loader.group_by_key()]
    whole = [sample["__key__"] for name in "bd" for sample in expected(name, 40)]
    first = [key for key in keys if key.startswith("a")]
    assert first == [sample["__key__"] for sample in expected("a", 40)][: len(first)]
    assert 10 < len(first) < 40
    assert keys == first + whole
    assert loader.skipped == {"ShardOpenError": 2}


# -------------------------------------------------------------------------------------------------- other hosts
SECRETS = {"Authorization": "Bearer hunter2", "Cookie": "hunter2", "X-Key": "hunter2", "Proxy-Authorization": "hunter2"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_header_of_the_user_goes_elsewhere_when_the_server_redirects(host: str) -> None:
    """Another port or another name is another host: it gets the range and what is harmless, on resuming too."""
    other = Site({PATH: SHARD}, plans={PATH: iter([Fault("drop", until=PIECE), Fault("drop", until=2 * PIECE)])})
    with serve_site(other, host) as elsewhere:
        site = Site({PATH: SHARD}, plans={PATH: repeat(Fault("redirect", to=elsewhere))})
        with serve_site(site) as address:
            options = {"http": {"headers": {**SECRETS, "User-Agent": "me"}}}
            with open_shard(address + PATH, storage_options=options) as stream:
                assert stream.read() == SHARD
    assert [headers["Authorization"] for _, headers in site.requests] == ["Bearer hunter2"] * 3
    assert [headers.get("Range") for _, headers in other.requests] == [None, "bytes=65536-", "bytes=131072-"]
    for _, headers in other.requests:
        assert "hunter2" not in str(headers)
        assert headers["User-Agent"] == "me"


def test_no_password_goes_elsewhere_when_the_server_redirects() -> None:
    """Nor does the one in the address, not even where the other host sends us back."""
    site, other = Site({"/a.tar": SHARD}), Site({})
    with serve_site(site) as address, serve_site(other, "localhost") as elsewhere:
        site.plans["/a.tar"] = iter([Fault("redirect", to=elsewhere)])
        other.plans["/a.tar"] = iter([Fault("redirect", to=address)])
        with open_shard(address.replace("//", "//me:hunter2@") + "/a.tar") as stream:
            assert stream.read() == SHARD
    assert ["Authorization" in headers for _, headers in site.requests] == [True, False]
    assert "Authorization" not in other.requests[0][1]


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("http://[bad?token=hunter2&x=", "malformed"),
        ("http://host:99999999/?token=hunter2&x=", "malformed"),
        ("ftp://me:hunter2@host", "not a web address"),
    ],
)
def test_reading_raises_when_the_server_redirects_to_nowhere(to: str, said: str) -> None:
    """Whatever a server writes as an address is an error of the shard, at once, and shows no secret."""
    site = Site({}, plans={PATH: iter([Fault("redirect", to=to)])})
    with serve_site(site) as address, pytest.raises(ShardOpenError, match=f"redirects to .*{said}") as caught:
        samples_of([address + PATH])
    assert "hunter2" not in str(caught.value)
    assert len(site.requests) == 1


def test_headers_stay_when_the_server_redirects_to_itself() -> None:
    """The same scheme, host and port is no other host."""
    site = Site({PATH: SHARD})
    with serve_site(site) as address:
        site.plans[PATH] = iter([Fault("redirect", to=address)])
        with open_shard(address + PATH, storage_options={"http": {"headers": SECRETS}}) as stream:
            assert stream.read() == SHARD
    assert [headers["X-Key"] for _, headers in site.requests] == ["hunter2"] * 2


# ------------------------------------------------------------------------------------------------- random plans
def random_faults(rng: random.Random, size: int) -> list[Fault | None]:
    """Some faults for one shard; few of them are final."""
    faults: list[Fault | None] = []
    for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 8])):
        where = rng.randrange(size + 1)
        faults.append(
            rng.choice(
                [
                    *[Fault("drop", until=where), Fault("drop", after=rng.choice([1, 512, PIECE])), None] * 3,
                    *[Fault("reset", until=where), Fault("reset", after=PIECE), Fault("whole")] * 2,
                    *[Fault("status", status=rng.choice([429, 500, 502, 503])), Fault("less"), Fault("silent")] * 2,
                    Fault("stall", after=rng.choice([0, 10_000])),
                    Fault("drop", until=rng.choice(BOUNDARIES)),
                    Fault("garbage"),
                    Fault("change"),
                    Fault("overstate"),
                    Fault("understate"),
                    Fault("elsewhere"),
                    Fault("status", status=404),
                ]
            )
        )
    return faults


def check_random_plan(seed: int, handler: Any = None) -> tuple[int, int]:
    """Reads shards from a server that fails at random; gives how many of them came whole, and how many did not."""
    rng = random.Random(f"http faults {seed}")
    counts = {f"s{number}-": rng.choice([1, 20, 60]) for number in range(rng.randint(1, 4))}
    objects = {f"/{prefix}.tar": tar_bytes(members(prefix, count)) for prefix, count in counts.items()}
    others = {f"/{prefix}.tar": tar_bytes(members(prefix, count, 1)) for prefix, count in counts.items()}
    plans = {path: iter(random_faults(rng, len(data))) for path, data in objects.items()}
    server = {**rng.choice(SERVERS), "ranges": rng.random() < 0.7, "chunked": rng.random() < 0.3}
    urls = list(objects)
    site = Site(objects, others, plans, **server)
    options = {} if handler is None else {"handler": handler}
    found: list[dict[str, Any]] = []
    failure: Exception | None = None
    with serve_site(site) as address:
        loader = IterableWrapper([address + url for url in urls]).load_wds_shards(storage_options=OPTIONS, **options)
        try:
            found.extend(loader.group_by_key())
        except (ShardOpenError, ShardFormatError) as error:
            assert error.shard in [address + url for url in urls]
            failure = error
    whole, position = 0, 0
    for prefix, count in counts.items():
        taken = [sample for sample in found if sample["__key__"].startswith(prefix)]
        assert found[position : position + len(taken)] == taken, "shards are mixed"
        position += len(taken)
        plain = [{name: value for name, value in sample.items() if name != "__url__"} for sample in taken]
        versions = [expected(prefix, count, version) for version in (0, 1)]
        assert any(plain == version[: len(plain)] for version in versions), f"{prefix}: not the shard's first samples"
        if len(plain) < count:
            assert failure is not None or handler is not None
            if handler is None:
                assert position == len(found), "samples behind an error"
                break
        else:
            whole += 1
    assert position == len(found)
    failed = sum(loader.skipped.values()) if handler else int(failure is not None)
    assert failed >= (len(counts) - whole if handler else int(whole < len(counts)))
    assert failure is None or handler is None
    return whole, failed


@pytest.fixture(params=["straight", "by urllib3"])
def _body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads bodies straight into the buffer, or as where urllib3 has another inside."""
    if request.param == "by urllib3":
        monkeypatch.setattr(http_client, "_plain_body", lambda response: None)


@pytest.mark.usefixtures("_body")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_when_faults_come_at_random(seed: int) -> None:
    """Identical samples, or a named error behind the first samples; under a handler, each loss is counted."""
    check_random_plan(seed, warn_and_continue if seed % 3 == 2 else None)


@pytest.mark.slow
@pytest.mark.usefixtures("_body")
def test_nothing_is_lost_when_faults_come_at_random_60_times() -> None:
    """The same, 60 plans, each also under a handler; most shards come whole, and some do not."""
    whole = failed = 0
    for seed in range(60):
        for handler in (None, warn_and_continue):
            counts = check_random_plan(seed, handler)
            whole, failed = whole + counts[0], failed + counts[1]
    assert whole > 120
    assert failed > 12


@pytest.mark.parametrize(("chunked", "straight"), [(False, True), (True, False)])
def test_bodies_of_known_length_are_read_straight_into_the_buffer(
    chunked: bool, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those in chunks."""
    copied: list[bytes] = []
    inner = Answer.read
    monkeypatch.setattr(Answer, "read", lambda answer, size: copied.append(inner(answer, size)) or copied[-1])
    assert run(iter(()), chunked=chunked)[0] == SAMPLES
    assert sum(map(len, copied)) == (0 if straight else len(SHARD))


def test_no_connection_is_left_when_reading_fails_or_stops() -> None:
    """Broken, refused, changed and abandoned shards leave nothing open."""
    before = open_files()
    site = Site({PATH: SHARD}, {PATH: OTHER}, validators="none")
    with serve_site(site) as address:
        for faults in (
            [Fault("drop", until=9), Fault("status", status=404)],
            [Fault("drop", until=PIECE)],
            CHANGED,
            [],
        ):
            site.plans[PATH] = iter(faults)
            loader = IterableWrapper([address + PATH]).load_wds_shards(
                storage_options=OPTIONS, handler=warn_and_continue
            )
            for number, _ in enumerate(loader.group_by_key()):
                if number == 30:
                    break
    http_client._pool(None, os.getpid()).clear()
    assert wait_until(lambda: open_files() <= before)
