"""A chain of pipes on one line, as messages show it."""

import functools
import itertools
import pickle
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.forms import functional_forms
from torchdata_wds import TarWriter, WebDataset, ignore_and_continue, wds_collate
from torchdata_wds.pipes.chain_text import chain_text

SECRET = "hunter2"


def shards(*urls: str) -> Any:
    return IterableWrapper(list(urls) or ["x.tar"])


def test_chain_is_written_with_its_arguments_when_stages_are_ours_and_native() -> None:
    """Arguments by position, others where they differ from the default; native stages by name."""
    pipe = WebDataset("x-{0..9}.tar", shuffle=1000, decoder="pil", extensions="jpg;png cls", transforms=[None, int])
    assert chain_text(pipe) == (
        "IterableWrapper(['x-{0..9}.tar']).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()"
        ".wds_shuffle(1000).wds_decode('pil').wds_to_tuple('jpg;png', 'cls').wds_map_tuple(None, int)"
    )


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        (lambda pipe: pipe.load_wds_shards(read_ahead=2), ".load_wds_shards(read_ahead=2)"),
        (lambda pipe: pipe.group_by_key(handler=ignore_and_continue), ".group_by_key(handler=ignore_and_continue)"),
        (lambda pipe: pipe.map(len).wds_shuffle(5, initial=1), ".map(len).wds_shuffle(5, initial=1)"),
        (
            lambda pipe: pipe.batch(64).collate(wds_collate).wds_unbatch(),
            ".batch(64).collate(conversion=wds_collate).wds_unbatch()",
        ),
        (lambda pipe: pipe.wds_rename(a="jpg;png", keep=False), ".wds_rename(keep=False, a='jpg;png')"),
        (lambda pipe: pipe.wds_map_dict(cls=int), ".wds_map_dict(cls=int)"),
        (lambda pipe: pipe.wds_map(lambda item: item), ".wds_map(<lambda>)"),
        (lambda pipe: pipe.wds_map(functools.partial(max, 1)), ".wds_map(partial(max, ...))"),
        (lambda pipe: pipe.wds_compose(itertools.islice, 5), ".wds_compose(islice, 5)"),
        (lambda pipe: pipe.wds_mix(shards().group_by_key(), stop="all"), "(<pipe .group_by_key()>, stop='all')"),
        (lambda pipe: pipe.resample_shards().cache_shards("c"), ".resample_shards().cache_shards('c')"),
    ],
)
def test_chain_shows_arguments_when_they_differ_from_the_default(chain: Any, text: str) -> None:
    """Functions by their names, lists and options as they were given."""
    assert chain_text(chain(shards())).endswith(text)


def test_chain_is_cut_when_values_are_long() -> None:
    """Many shards, long names and large values take no more than a few words."""
    many = shards(*(f"{'long' * 99}-{number}.tar" for number in range(10_000)))
    values = [b"x" * 10_000, list(range(10_000)), set(range(10_000)), dict.fromkeys(range(99), "x" * 999)]
    text = chain_text(many.load_wds_shards().wds_compose(itertools.zip_longest, *values))
    assert len(text) < 1000
    assert "..." in text


def test_chain_shows_no_secrets_when_urls_and_options_hold_them() -> None:
    """Passwords, signatures, options of stores and arguments with secret names."""
    pipe = shards(f"https://me:{SECRET}@host/x.tar?X-Amz-Signature={SECRET}", f"pipe:curl -u me:{SECRET} host")
    pipe = pipe.load_wds_shards(storage_options={"s3": {"secret": SECRET}}, rewrite={"a": f"https://me:{SECRET}@b/"})
    pipe = pipe.wds_compose(itertools.islice, 5, token=SECRET, options={"password": SECRET})
    assert SECRET not in chain_text(pipe)
    assert chain_text(pipe).count("***") >= 5


def test_chain_never_raises_when_a_pipe_is_half_made_or_odd() -> None:
    """A debugger shows a pipe whose constructor has not ended; a cycle and a failing repr end it nowhere."""

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("odd")

    for form in functional_forms.values():
        assert chain_text(form.__new__(form)).startswith(form.__name__.removesuffix("IterDataPipe"))
    assert chain_text(shards().wds_compose(itertools.islice, Odd())).endswith(".wds_compose(islice, <Odd>)")
    loop: Any = shards().wds_shuffle()
    loop.source_datapipe = loop
    assert "wds_shuffle" in chain_text(loop)


def test_chain_stays_when_a_pipe_was_pickled() -> None:
    """Also with options that another process does not have."""
    pipe = WebDataset("x.tar", shuffle=10, decoder="rgb8")
    assert chain_text(pickle.loads(pickle.dumps(pipe))) == chain_text(pipe)


def test_exceptions_name_stage_and_chain_when_torch_adds_its_line(tmp_path: Any) -> None:
    """Torch shows the constructor's arguments by name, the source among them as its chain."""
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", "cls": 1})
    pipe = WebDataset(str(tmp_path / "x.tar")).wds_map_dict(cls=len, missing=len)
    with pytest.raises(ValueError, match="has no field 'missing'") as caught:
        list(pipe)
    line = str(caught.value).splitlines()[-1]
    assert line.startswith("This exception is thrown by __iter__ of FieldMapperIterDataPipe(fns={'cls': ")
    assert line.endswith(".load_wds_shards().group_by_key())")
