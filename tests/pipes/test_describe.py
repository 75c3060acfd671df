"""The drawing of a graph: `describe`, and what repr() and notebooks show."""

import functools
import html.parser
import itertools
import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, default_collate
from torch.utils.data.datapipes.iter import FileOpener, IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tests.kits.forms import functional_forms
from tests.kits.torchdata import MapToIterConverter, SampleMultiplexer
from torchdata_wds import WebDataset, describe, wds_collate
from torchdata_wds.pipes.chain_text import stages_of
from torchdata_wds.pipes.form_names import install
from torchdata_wds.workers import import_torchdata

SECRET = "hunter2"


def shards(*urls: str) -> Any:
    return IterableWrapper(list(urls) or ["x.tar"])


def drawn(text: str) -> str:
    """Removes the indentation of a drawing in a test."""
    return "\n".join(line[8:] for line in text.strip("\n").rstrip(" ").splitlines()).rstrip()


def fail(item: Any) -> None:
    raise TypeError(item)


def by_length(text: str) -> int:
    return len(text) % 2


class Users(IterDataPipe[Any]):
    """A user's stage, with arguments that it keeps under other names, or not at all."""

    def __init__(self, source: Any, size: int, mode: str = "r", dropped: int = 0, *, api_key: str = "") -> None:
        self.source, self._size, self.mode, self.api_key = source, size, mode, api_key

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("describe iterates nothing")


def test_chain_has_one_line_a_stage_when_it_has_no_branches() -> None:
    """As it was written; native stages with their arguments too, unless they are the defaults."""
    pipe = WebDataset("x-{0..9}.tar", shuffle=1000, decoder="pil", extensions="jpg cls")
    pipe = pipe.shuffle(buffer_size=7).map(by_length, input_col=1).batch(64, drop_last=True).collate(wds_collate)
    assert describe(pipe) == drawn("""
        IterableWrapper(['x-{0..9}.tar'])
            .list_shards()
            .shuffle()
            .sharding_filter()
            .load_wds_shards()
            .group_by_key()
            .wds_shuffle(1000)
            .wds_decode('pil')
            .wds_to_tuple('jpg', 'cls')
            .shuffle(buffer_size=7)
            .map(by_length, input_col=1)
            .batch(64, drop_last=True)
            .collate(conversion=wds_collate)
        """)
    assert describe(shards().batch(2).collate(default_collate)).endswith(".batch(2)\n    .collate()")


def test_branches_are_drawn_when_streams_join() -> None:
    """Each stream in a lane of its own, from its source to the stage that joins them."""
    mixed = shards("a").group_by_key().wds_mix(shards("b").wds_shuffle(5), weights=[1, 2], stop="all")
    assert describe(mixed.concat(shards("c")).map(len)) == drawn("""
        ● IterableWrapper(['a'])
        ● .group_by_key()
        │ ● IterableWrapper(['b'])
        │ ● .wds_shuffle(5)
        ├─╯
        ● .wds_mix(weights=(1.0, 2.0), stop='all')
        │ ● IterableWrapper(['c'])
        ├─╯
        ● .concat()
        ● .map(len)
        """)


def test_source_is_drawn_once_when_branches_share_it() -> None:
    """The children of demux, in any order, beside a stream that does not come from it."""
    even, odd = shards("a").demux(2, by_length, drop_none=True)
    assert describe(odd.zip(shards("b"), even.map(len))) == drawn("""
        ● IterableWrapper(['a'])
        ● .demux(2, by_length, drop_none=True)
        ├─╮
        ● │ [1]
        │ │ ● IterableWrapper(['b'])
        │ ● │ [0]
        │ ● │ .map(len)
        ├─┴─╯
        ● .zip()
        """)
    pipe = shards("a")
    assert describe(pipe.concat(pipe)) == "● IterableWrapper(['a'])\n├─╮\n├─╯\n● .concat()"


def test_lines_pass_a_lane_when_it_belongs_to_another_branch() -> None:
    """A lane in the middle of a joining line stays visible."""
    one, two, three = shards("a").fork(3)
    assert describe(one.zip(three).mux(shards("b").zip(two))) == drawn("""
        ● IterableWrapper(['a'])
        ● .fork(3)
        ├─┬─╮
        ● │ │ [0]
        │ ● │ [2]
        ├─╯ │
        ●   │ .zip()
        │ ● │ IterableWrapper(['b'])
        │ │ ● [1]
        │ ├─╯
        │ ● .zip()
        ├─╯
        ● .mux()
        """)
    crossed, straight = shards("a").fork(2)
    assert "│─" in describe(shards("b").mux(crossed.zip(shards("c")).concat(shards("d")), straight).zip(crossed))


def test_every_stage_is_drawn_once_when_graphs_are_random() -> None:
    """A line for each pipe, whatever forks and joins; every lane that begins goes on below."""
    for seed in range(40):
        rng = random.Random(seed)
        pipes = [shards(name) for name in "abc"]
        for _ in range(rng.randint(1, 20)):
            pipe = rng.choice(pipes)
            some = rng.sample(pipes, rng.randint(1, min(len(pipes), 4)))
            pipes += rng.choice([lambda: [pipe.map(len)], lambda: pipe.fork(3), lambda: [pipe.zip(*some)]])()  # noqa: B023
        lines = describe(pipes[-1]).splitlines()
        drawn = [line for line in lines if "●" in line] or lines
        assert len(drawn) == len(list(stages_of(pipes[-1])))
        for above, below in itertools.pairwise(lines):
            lanes = re.match("[●│├┴┬╯╮─ ]*", above)[0]  # type: ignore[index]
            assert all(below[place] in "●│├┴╯" for place, sign in enumerate(lanes) if sign in "│├┬╮")


def test_arguments_are_shown_when_a_user_s_pipe_holds_them() -> None:
    """Also under a private name; those that it does not hold are omitted, secrets are masked."""
    assert describe(Users(shards(), 3)).endswith("\n    Users(3)")
    text = describe(Users(shards(), 3, "w", api_key=SECRET))
    assert text.endswith("\n    Users(3, mode='w', api_key=***)")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lambda item: item, "<lambda>"),
        (functools.partial(by_length, 1), "partial(by_length, ...)"),
        (object(), "<object object>"),
        ({f"{number}": "x" for number in range(9)}, "'3': 'x', ... (9 in all)}"),
        (dict.fromkeys(range(5)).keys(), "[0, 1, 2, 3, ... (5 in all)]"),
        (["x" * 99] * 3, "... (3 in all)]"),
        (f"pipe:curl -H 'Authorization: Bearer {SECRET}' -u me:{SECRET} host", "***"),
        (f"https://h/x.tar?X-Amz-Signature={SECRET}", "X-Amz-Signature=***'"),
        ([{"headers": {"Authorization": SECRET}}], "'Authorization': ***"),
    ],
)
def test_values_take_one_short_line_without_secrets(value: Any, shown: str) -> None:
    """Functions by name, objects without addresses, the first items of collections with their number."""
    text = describe(shards().map(functools.partial).wds_compose(map, value)).splitlines()[-1]
    assert shown in text
    assert SECRET not in text
    assert len(text) < 400


def test_long_lists_cost_nothing_when_they_hold_a_million_shards() -> None:
    """Only the first are looked at; those that follow would raise."""

    class Shards(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            raise AssertionError("describe takes the first items only")

    text = describe(IterableWrapper(Shards([f"x-{number}.tar" for number in range(1_000_000)]), deepcopy=False))
    assert text == (
        "IterableWrapper(['x-0.tar', 'x-1.tar', 'x-2.tar', 'x-3.tar', ... (1,000,000 in all)], deepcopy=False)"
    )


def test_graph_is_cut_when_it_has_thousands_of_stages_or_sources() -> None:
    """It says how much is missing."""
    pipe = shards()
    for _ in range(300):
        pipe = pipe.map(len)
    assert describe(pipe).splitlines()[100] == "... 101 lines more ..."
    assert describe(shards().zip(*(shards() for _ in range(99)))).splitlines()[-1] == "● .zip() and 92 more sources"


def test_drawing_never_raises_when_a_pipe_is_half_built_or_odd() -> None:
    """A debugger shows a pipe whose constructor is running; objects may raise anything, and refer in circles."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __repr__(self) -> str:
            raise RuntimeError("odd")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("odd")

        __hash__ = None  # type: ignore[assignment]

    class Loud(IterDataPipe[Any]):
        def __init__(self, source: Any, text: Any = Odd()) -> None:  # noqa: B008
            self.source, self.text = source, text

        def __repr__(self) -> str:
            return "LOUD"

    class Escape:
        def __repr__(self) -> str:
            return "two\nlines \x1b[31mred"

    for form in functional_forms.values():
        assert repr(form.__new__(form)).startswith(form.__name__.removesuffix("IterDataPipe"))
    assert describe(Loud(shards(), Odd())).endswith("\n    Loud(text=<Odd>)")
    assert describe(Loud(shards(), Escape())).endswith(r"Loud(text=two lines \x1b[31mred)")
    loop: Any = shards().wds_shuffle(5)
    above = loop.map(len)
    loop.source_datapipe = above
    assert describe(above) == ".wds_shuffle(5)\n    .map(len)"
    with pytest.raises(TypeError, match="describe takes the last pipe of a graph, a DataPipe, not list"):
        describe([loop])  # type: ignore[arg-type]


def test_drawing_holds_map_style_sources_and_pairs_when_torchdata_has_them() -> None:
    """A map-style pipe is a stage; a pipe in a list of pairs is a source."""
    assert describe(MapToIterConverter(SequenceWrapper([1] * 9).map(len)).batch(2)) == drawn("""
        SequenceWrapper([1, 1, 1, 1, ... (9 in all)])
            .map(fn=len)
            MapToIterConverter(indices=range(0, 9))
            .batch(2)
        """)
    assert describe(SampleMultiplexer({shards("a"): 0.5, shards("b"): 0.5})).count("IterableWrapper") == 2


def test_repr_draws_the_graph_when_the_last_stage_is_native_or_ours() -> None:
    """In a session or notebook; print() does too."""
    for pipe in (shards().batch(2), shards().wds_shuffle(5)):
        assert repr(pipe) == str(pipe) == describe(pipe)
        assert "\n" in repr(pipe)


def test_messages_stay_on_one_line_when_they_show_a_pipe(caplog: pytest.LogCaptureFixture) -> None:
    """Those of torch, this package and logging."""
    pipe = shards().wds_shuffle(5).zip(shards()).map(fail)
    with pytest.raises(TypeError) as caught:
        list(pipe)
    assert str(caught.value).splitlines()[-1] == (
        "This exception is thrown by __iter__ of MapperIterDataPipe(datapipe=IterableWrapper(['x.tar'])"
        ".wds_shuffle(5).zip(<pipe .IterableWrapper()>), fn=fail, input_col=None, output_col=None)"
    )
    with pytest.raises(TypeError, match=r"is \[IterableWrapper\(\['x.tar'\]\).map\(len\)\]$"):
        shards().wds_mix([shards().map(len)], stop="all")
    logging.getLogger("torchdata_wds").warning("%s %r", *[shards().map(len)] * 2)
    assert caplog.messages == [" ".join(["IterableWrapper(['x.tar']).map(len)"] * 2)]


def test_repr_obeys_torchs_hook_when_a_program_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own pipes do."""
    monkeypatch.setattr(IterDataPipe, "repr_hook", staticmethod(lambda pipe: "hooked"))
    assert repr(WebDataset("x.tar")) == repr(shards()) == "hooked"
    install(import_torchdata)  # as an import of the package does
    assert repr(shards()) == "hooked"


def test_html_is_escaped_when_names_and_values_are_markup() -> None:
    """A notebook shows names and values of strangers as text, and runs nothing."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>&"
    named = type(evil, (Users,), {})
    left, right = shards(evil).fork(2)
    found = named(left.zip(right).wds_map_dict(**{"<b>": len}), evil)  # type: ignore[arg-type]
    page = found.wds_shuffle(5)._repr_html_()
    tags: list[str] = []
    text: list[str] = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.handle_data = text.append  # type: ignore[method-assign]
    parser.feed(page)
    assert set(tags) == {"pre", "b"}
    assert "".join(text) == describe(found.wds_shuffle(5))


def test_running_graph_is_drawn_alike_when_items_were_taken() -> None:
    """Iterators and buffers are not arguments; files stay closed."""
    one, two = shards("a", "b").fork(2)
    pipe = FileOpener(one, mode="b").zip(two.wds_shuffle(5).batch(2))
    before = describe(pipe)
    items = iter(two)
    next(items)
    assert describe(pipe) == before


def test_stages_that_a_form_puts_in_are_not_drawn() -> None:
    """Only those that the program wrote."""
    pipe = IterableWrapper(["x.tar"]).split_shards().load_wds_shards().group_by_key().join_workers().batch(2)
    names = [line.strip().partition("(")[0] for line in describe(pipe).splitlines()]
    assert names == ["IterableWrapper", ".split_shards", ".load_wds_shards", ".group_by_key", ".join_workers", ".batch"]
