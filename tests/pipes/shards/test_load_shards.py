"""Loading and grouping shards: every damage, fused and not, and what reaches the handler."""

import bz2
import gzip
import io
import logging
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.damage import DAMAGES, GOOD, KEYS, MEMBERS
from tests.kits.shards import sample_members, tar_bytes, text_keys, write_tar, write_text_shards
from torchdata_wds import ShardFormatError, ShardMember, ShardOpenError, UnsafeDataError, handlers
from torchdata_wds.format.tar import links
from torchdata_wds.pipes import division

pytestmark = pytest.mark.usefixtures("each_reader")

Graph = Callable[..., IterDataPipe[Any]]


def everything(member: ShardMember) -> bool:
    """A filter that lets all pass."""
    return bool(member.name)


def fused(urls: list[Any], **options: Any) -> IterDataPipe[Any]:
    """Grouping directly behind loading."""
    return IterableWrapper(urls).load_wds_shards(**options).group_by_key()


def unfused(urls: list[Any], **options: Any) -> IterDataPipe[Any]:
    """A stage between loading and grouping."""
    return IterableWrapper(urls).load_wds_shards(**options).filter(everything).group_by_key()


both = pytest.mark.parametrize("graph", [fused, unfused])


def where(samples: Any) -> list[tuple[str, str]]:
    """Shard and key of each sample."""
    return [(Path(sample["__url__"]).name, sample["__key__"]) for sample in samples]


@pytest.fixture
def good(tmp_path: Path) -> tuple[str, str]:
    """Two whole shards."""
    for name in ("1.tar", "3.tar"):
        (tmp_path / name).write_bytes(GOOD)
    return str(tmp_path / "1.tar"), str(tmp_path / "3.tar")


@both
@pytest.mark.parametrize("name", DAMAGES)
def test_load_wds_shards_raises_when_a_shard_is_damaged(name: str, graph: Graph, tmp_path: Path) -> None:
    """Every damage is a ShardFormatError that names the shard and the byte offset."""
    (tmp_path / "2.tar").write_bytes(DAMAGES[name].data)
    samples = []
    with pytest.raises(ShardFormatError) as caught:
        for sample in graph([str(tmp_path / "2.tar")]):
            samples.append(sample)
    assert [sample["__key__"] for sample in samples] == DAMAGES[name].complete[: len(samples)]
    assert graph is unfused or len(samples) == len(DAMAGES[name].complete)
    assert DAMAGES[name].says in str(caught.value)
    assert "2.tar" in str(caught.value)
    assert caught.value.shard == str(tmp_path / "2.tar")


@both
@pytest.mark.parametrize("name", DAMAGES)
def test_load_wds_shards_gives_all_that_is_whole_when_damage_is_skipped(
    name: str, graph: Graph, tmp_path: Path, good: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Under warn_and_continue come the samples before the damage, whole, and all other shards; nothing is merged."""
    (tmp_path / "2.tar").write_bytes(DAMAGES[name].data)
    samples = list(graph([good[0], str(tmp_path / "2.tar"), good[1]], handler=torchdata_wds.warn_and_continue))
    expected = [("1.tar", key) for key in KEYS]
    expected += [("2.tar", key) for key in DAMAGES[name].complete]
    expected += [("3.tar", key) for key in KEYS]
    assert where(samples) == expected
    for sample in samples:
        assert sample["txt"] == sample["__key__"].encode() * 600
        assert sample["cls"] == b"1"
        assert len(sample) == 4


@both
def test_load_wds_shards_stops_when_the_handler_says_so(graph: Graph, tmp_path: Path, good: tuple[str, str]) -> None:
    """ignore_and_stop ends the stream at the damage; what was whole before it has come."""
    (tmp_path / "2.tar").write_bytes(GOOD[:3200])
    pipe = graph([good[0], str(tmp_path / "2.tar"), good[1]], handler=torchdata_wds.ignore_and_stop)
    assert where(pipe) == [("1.tar", "a"), ("1.tar", "b"), ("1.tar", "c"), ("2.tar", "a")]


@both
def test_load_wds_shards_never_merges_when_the_next_shard_begins_with_the_same_key(
    graph: Graph, tmp_path: Path
) -> None:
    """The half sample of a cut shard does not get the fields of a sample of the same key in the next."""
    cut = tar_bytes(sample_members("a", txt=b"one") + sample_members("b", txt=b"half"), end=b"")
    (tmp_path / "1.tar").write_bytes(cut)
    write_tar(tmp_path / "2.tar", sample_members("b", cls=b"2"))
    urls = [str(tmp_path / "1.tar"), str(tmp_path / "2.tar")]
    samples = list(graph(urls, handler=torchdata_wds.ignore_and_continue))
    assert [sorted(sample) for sample in samples] == [["__key__", "__url__", "txt"], ["__key__", "__url__", "cls"]]


@both
def test_load_wds_shards_keeps_readings_apart_when_a_shard_comes_twice(graph: Graph, tmp_path: Path) -> None:
    """A shard of one sample read twice in a row gives two samples, in later epochs too."""
    url = write_tar(tmp_path / "1.tar", sample_members("a", txt=b"x"))
    assert len(list(graph([url, url]))) == 2
    assert len(list(IterableWrapper([url]).load_wds_shards().cycle(3).group_by_key())) == 3


def test_load_wds_shards_counts_openings_in_visit(tmp_path: Path) -> None:
    """The visit grows with every opening, of all loaders: joined streams of two loaders stay apart."""
    url = write_tar(tmp_path / "1.tar", sample_members("a", txt=b"x"))
    pipe = IterableWrapper([url, url]).load_wds_shards()
    visits = [member.visit for member in [*pipe, *pipe, *IterableWrapper([url]).load_wds_shards()]]
    assert visits == list(range(visits[0], visits[0] + 5))
    loaders = [IterableWrapper([url]).load_wds_shards() for _ in range(2)]
    assert len(list(loaders[0].concat(loaders[1]).group_by_key())) == 2


@pytest.mark.parametrize("kind", ["missing", "folder", "pattern"])
def test_load_wds_shards_says_what_to_do_when_a_path_cannot_be_opened(kind: str, tmp_path: Path) -> None:
    """A missing file, a folder and an unexpanded pattern are ShardOpenErrors that name it."""
    url = {"missing": str(tmp_path / "no.tar"), "folder": str(tmp_path), "pattern": str(tmp_path / "{00..02}.tar")}[
        kind
    ]
    with pytest.raises(ShardOpenError) as caught:
        list(fused([url]))
    assert url in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert kind != "pattern" or "list_shards" in str(caught.value)


def test_load_wds_shards_reads_streams_when_given_pairs(tmp_path: Path) -> None:
    """Pairs (url, stream) are read and closed; compressed ones too; hard links by opening the path again."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"A"))
        link = tarfile.TarInfo("b.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "a.txt"
        tar.addfile(link)
    path = tmp_path / "1.tar.gz"
    path.write_bytes(gzip.compress(out.getvalue()))
    stream = path.open("rb")
    samples = list(IterableWrapper([(str(path), stream)], deepcopy=False).load_wds_shards().group_by_key())
    assert [(sample["__key__"], sample["txt"]) for sample in samples] == [("a", b"A"), ("b", b"A")]
    assert stream.closed


@pytest.mark.parametrize("options", [{}, {"select": "*.txt"}, {"select": "b.*"}, {"rename": str.upper}])
def test_load_wds_shards_reads_a_hard_link_when_it_comes_from_a_stream(options: Any, tmp_path: Path) -> None:
    """A pipe cannot be opened again, but the members just before the link are held; streams of others are so too."""
    path = tmp_path / "1.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.txt", "a.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 5
            tar.addfile(info, io.BytesIO(name.encode()))
        for name, target in (("b.txt", "a.txt"), ("b.jpg", "a.jpg"), ("c.txt", "./b.txt")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, target
            tar.addfile(link)
    plain = [member[1:3] for member in IterableWrapper([str(path)]).load_wds_shards(**options)]
    assert plain[-1][1] in (b"a.txt", b"a.jpg")
    stream = io.BytesIO(path.read_bytes())
    for source in (f"pipe:cat '{path}'", ("other.tar", stream), f"pipe:gzip -c '{path}'"):
        pipe = IterableWrapper([source], deepcopy=False).load_wds_shards(**options)
        assert [member[1:3] for member in pipe] == plain


def test_load_wds_shards_refuses_a_hard_link_when_it_comes_from_a_command_and_points_far_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the cure."""
    monkeypatch.setattr(links, "RECENT_BYTES", 1000)
    with tarfile.open(tmp_path / "1.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
        for number in range(40):
            info = tarfile.TarInfo(f"a.{number}")
            info.size = 3000
            tar.addfile(info, io.BytesIO(bytes(3000)))
        link = tarfile.TarInfo("b.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "a.txt"
        tar.addfile(link)
    assert len(list(fused([str(tmp_path / "1.tar")]))) == 2
    with pytest.raises(ShardFormatError, match="--hard-dereference"):
        list(fused([f"pipe:cat '{tmp_path}/1.tar'"]))


def test_load_wds_shards_raises_when_a_command_fails_behind_a_whole_shard(tmp_path: Path) -> None:
    """A command that gives a whole archive and then fails is an error all the same."""
    write_tar(tmp_path / "1.tar", MEMBERS)
    samples = []
    with pytest.raises(ShardOpenError, match="3"):
        for sample in fused([f"pipe:cat '{tmp_path}/1.tar'; exit 3"]):
            samples.append(sample)
    assert [sample["__key__"] for sample in samples] == KEYS


def test_load_wds_shards_refuses_commands_when_secure(monkeypatch: pytest.MonkeyPatch, good: tuple[str, str]) -> None:
    """WDS_SECURE=1 refuses pipe: with an UnsafeDataError, which a handler may skip."""
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE"):
        list(fused([f"pipe:cat {good[0]}"]))
    assert len(list(fused([f"pipe:cat {good[0]}", good[1]], handler=torchdata_wds.ignore_and_continue))) == 3


def test_load_wds_shards_keeps_secrets_out_of_text() -> None:
    """Neither exceptions nor torch's note of the pipe's arguments show storage options or signed queries."""
    options = {"http": {"headers": {"Authorization": "Bearer hunter2"}, "retries": 0}}
    pipe = fused(["http://user:hunter2@127.0.0.1:9/x.tar?X-Amz-Signature=hunter2"], storage_options=options)
    with pytest.raises(ShardOpenError) as caught:
        list(pipe)
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_load_wds_shards_passes_options_on_to_the_reader(tmp_path: Path) -> None:
    """select, rename, require_end_marker and concatenated reach the tar reader, keys the release of samples."""
    url = write_tar(tmp_path / "1.tar", MEMBERS, end=b"")
    members = IterableWrapper([url]).load_wds_shards(
        select="*.TXT", rename=str.upper, require_end_marker=False, keys=lambda name: (name[0], "txt")
    )
    assert [member.name for member in members] == ["A.TXT", "B.TXT", "C.TXT"]
    twice = tmp_path / "2.tar"
    twice.write_bytes(GOOD + tar_bytes(sample_members("d", txt=b"x")))
    assert len(list(fused([str(twice)], concatenated=True))) == 4


@pytest.mark.parametrize("open_shard", [open, gzip.open, bz2.open, lzma.open])
@both
def test_load_wds_shards_refuses_a_member_when_it_is_larger_than_the_limit(
    open_shard: Any, graph: Graph, tmp_path: Path
) -> None:
    """Whole samples before it are given; the shards after it too, where the handler skips the shard."""
    members = [*sample_members("a", txt=b"a"), *sample_members("b", txt=b"b", bin=bytes(100_000)), ("c.txt", b"c")]
    urls = [str(tmp_path / "1.tar"), write_tar(tmp_path / "2.tar", sample_members("d", txt=b"d"))]
    with open_shard(urls[0], "wb") as file:
        file.write(tar_bytes(members))
    kept: list[Any] = []
    options: dict[str, Any] = {"max_member_bytes": 50_000, "handler": lambda error: not kept.append(error)}
    assert where(graph(urls, **options)) == [("1.tar", "a"), ("2.tar", "d")]
    assert (kept[0].member, kept[0].shard) == ("b.bin", urls[0])
    assert len(list(graph(urls, max_member_bytes=100_000))) == 4


def test_load_wds_shards_raises_when_memory_runs_out_whatever_the_handler() -> None:
    """Skipping a shard because the machine is full would lose data without a word."""

    class Exhausted(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell() + (count or 0) > 2 << 20:
                raise MemoryError
            return super().read(count)

    archive = tar_bytes([("a.txt", b"a"), ("b.bin", bytes(4 << 20))])
    pipe = IterableWrapper([("x.tar", Exhausted(archive))], deepcopy=False).load_wds_shards(
        handler=torchdata_wds.ignore_and_continue
    )
    members = iter(pipe)
    assert next(members).name == "a.txt"
    with pytest.raises(ShardFormatError, match=r"b\.bin of 4,194,304 bytes, more than this process has memory for"):
        next(members)


def test_group_by_key_uses_its_own_keys_when_fused(tmp_path: Path) -> None:
    """Fused and unfused group by the grouper's rule."""
    url = write_tar(tmp_path / "1.tar", [("a.1.txt", b"x"), ("a.1.cls", b"y"), ("a.2.txt", b"z")])
    loader = IterableWrapper([url]).load_wds_shards(keys="last_dot")
    for source in (loader, loader.filter(everything)):
        assert [sample["__key__"] for sample in source.group_by_key(keys="last_dot")] == ["a.1", "a.2"]


def test_group_by_key_gives_the_same_when_fused_or_not(tmp_path: Path) -> None:
    """The fused loop is only faster."""
    urls = write_text_shards(tmp_path, [3, 0, 5, 1])
    assert list(fused(urls)) == list(unfused(urls))
    assert [sample["__key__"] for sample in fused(urls)] == text_keys([3, 0, 5, 1])


def test_group_by_key_groups_pairs_when_a_native_loader_made_them(tmp_path: Path) -> None:
    """load_from_tar's (path, stream) pairs become the samples that our loader gives."""
    urls = write_text_shards(tmp_path / "d.v1", [2, 1])
    assert list(IterableWrapper(urls).open_files(mode="b").load_from_tar().group_by_key()) == list(fused(urls))


class Failing(io.BytesIO):
    """A stream that breaks."""

    def read(self, *_: Any) -> bytes:
        raise OSError("broken")


def test_group_by_key_asks_the_handler_when_an_item_is_wrong() -> None:
    """A wrong item is skipped; a stream that fails takes its whole sample with it; all others come."""
    items = [
        ("x.tar/a.txt", b"1"),
        ("x.tar/a.cls", Failing()),
        3,
        ("x.tar/b.txt", io.BytesIO(b"2")),
        ("x.tar/c.txt", 5),
    ]
    pipe = IterableWrapper(items, deepcopy=False).group_by_key(handler=torchdata_wds.ignore_and_continue)
    assert [sample["__key__"] for sample in pipe] == ["b"]
    assert pipe.skipped == {"OSError": 1, "SampleError": 2}
    stopped = IterableWrapper(items, deepcopy=False).group_by_key(handler=torchdata_wds.ignore_and_stop)
    assert list(stopped) == []


def test_group_by_key_finds_the_archive_in_a_path() -> None:
    """The last folder that ends like an archive is the shard."""
    paths = ["/d/foo.tar.d/x.tar/a.txt", "/d/x.tar.gz/s/b.txt", "plain/c.txt"]
    samples = IterableWrapper([(path, b"") for path in paths]).group_by_key()
    assert [(sample["__url__"], sample["__key__"]) for sample in samples] == [
        ("/d/foo.tar.d/x.tar", "a"),
        ("/d/x.tar.gz", "s/b"),
        ("", "plain/c"),
    ]


def by_folder(name: str) -> tuple[str, str] | None:
    """A rule of the user's: the folder is the key."""
    folder, _, base = name.rpartition("/")
    return folder, base


def test_group_by_key_warns_when_the_loader_has_other_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With stages between, the loader must know where samples end: one warning says so, and the same keys= mend it."""
    members = [(f"{folder}/{name}", b"x") for folder in ("d1", "d2") for name in ("meta", "img.jpg", "seg.png")]
    cut = tmp_path / "1.tar"
    cut.write_bytes(tar_bytes(members)[:-1400])
    source, skip = IterableWrapper([str(cut)]), torchdata_wds.ignore_and_continue
    alike = source.load_wds_shards(keys=by_folder, handler=skip).filter(everything).group_by_key(keys=by_folder)
    assert [sample["__key__"] for sample in alike] == ["d1"]
    assert not caplog.records
    list(source.load_wds_shards(handler=skip).filter(everything).group_by_key(keys=by_folder))
    assert "Use the same keys= for both" in caplog.text


def test_load_wds_shards_gives_the_sample_before_damage_when_it_selects(tmp_path: Path) -> None:
    """Members left out still tell that the sample before them is complete."""
    cut = tmp_path / "1.tar"
    cut.write_bytes(GOOD[:4200])  # inside b.cls
    for graph in (fused, unfused):
        pipe = graph([str(cut)], select="*.txt", handler=torchdata_wds.ignore_and_continue)
        assert [sample["__key__"] for sample in pipe] == ["a"]


def test_load_wds_shards_asks_the_handler_when_rename_gives_no_name(good: tuple[str, str]) -> None:
    """rename= that returns None fails the shard with a message that says what to return."""
    with pytest.raises(TypeError, match="must return a str"):
        list(fused([good[0]], rename=lambda name: None))


def test_load_wds_shards_warns_once_when_every_worker_reads_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several consumers without a sharding filter: one warning that says what to add."""
    monkeypatch.setattr(division, "_is_shared", lambda *_: True)
    urls = write_text_shards(tmp_path, [1])
    with caplog.at_level(logging.WARNING):
        list(fused(urls))
        list(fused(urls))
        assert caplog.text.count("sharding_filter") == 1
        caplog.clear()
        handlers.said.clear()
        list(IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key())
        assert not caplog.records


def test_wds_shuffle_goes_on_when_the_graph_cannot_be_traversed(tmp_path: Path) -> None:
    """Open streams in the source keep the graph from being traversed, not from being shuffled."""
    path = Path(write_tar(tmp_path / "1.tar", MEMBERS))
    source = IterableWrapper([(str(path), path.open("rb"))], deepcopy=False)
    samples = source.load_wds_shards().group_by_key().wds_shuffle(3)
    assert sorted(sample["__key__"] for sample in samples) == KEYS


LETTER_TRAPS: list[Any] = [
    lambda source: source.load_wds_shards(),
    lambda source: source.load_wds_shards(read_ahead=2).group_by_key(),
    lambda source: source.sharding_filter().load_wds_shards().group_by_key(),
    lambda source: source.filter(str.isalpha).resample_shards(1).load_wds_shards(),
    lambda source: source.split_shards().load_wds_shards(),
    lambda source: source.split_shards({"x.tar": 3}).load_wds_shards(),
    lambda source: source.split_shards(index=True).load_wds_shards(),
    lambda source: source.cache_shards("cache", cache_local=True).load_wds_shards(),
    lambda source: source.load_cbor_shards(),
    lambda source: source.load_msgpack_shards(),
]


@pytest.mark.parametrize("graph", LETTER_TRAPS)
def test_shards_are_refused_when_they_are_letters(graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A str in place of a list of shards: the error says what to write, whichever stage gets the letters."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(torchdata_wds.ShardListError, match=r"Write IterableWrapper\(\["):
        list(graph(IterableWrapper("x.tar")))


def test_load_wds_shards_opens_a_shard_when_its_name_is_a_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name is there."""
    monkeypatch.chdir(tmp_path)
    Path("x").write_bytes(GOOD)
    assert len(list(IterableWrapper(["x"]).load_wds_shards())) == len(MEMBERS)
