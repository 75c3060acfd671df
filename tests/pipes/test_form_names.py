"""Names that no pipe has: WebDataset's, which say what to write here, and torchdata's, which are there when used."""

import copy
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import webdataset
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps

import torchdata_wds
from tests.kits.forms import functional_forms
from tests.kits.torchdata import Repeater, is_installed, needs_torchdata
from torchdata_wds import WebDataset, handlers, ignore_and_continue, wds_collate
from torchdata_wds.pipes import form_names
from torchdata_wds.pipes.form_names import (
    ARGUMENTS,
    EXPORTS,
    METHODS,
    TORCHDATA_FORMS,
    TORCHDATA_MAP_FORMS,
    argument_hint,
)
from torchdata_wds.workers import import_torchdata


def chains() -> list[IterDataPipe[Any]]:
    """A pipe of ours at the end of a chain, one of torch's after ours, and one of torch's alone."""
    ours = WebDataset("x.tar")
    return [ours, ours.batch(4).collate(wds_collate), IterableWrapper(["x.tar"])]


def webdatasets_methods() -> list[str]:
    """What a user of WebDataset may call on a data set, as far as no form here has the name."""
    names = {name for name in dir(webdataset.WebDataset) if not name.startswith("_")}
    names |= {"associate", "cached", "dbcache", "ddp_equalize", "detshuffle", "getfirst", "info", "pipe", "resampled"}
    internal = {"create_url_iterator", "invoke", "iterator1", "update_cache_info"}
    return sorted(names - internal - set(IterDataPipe.functions) - TORCHDATA_FORMS)


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was warned about yet."""
    monkeypatch.setattr(handlers, "said", set())


@pytest.fixture
def no_torchdata() -> Iterator[None]:
    """The forms of torchdata are not registered, and importing it fails."""

    def fail() -> None:
        raise ImportError("WorkersReadingService needs torchdata") from ImportError("libcurl.so.4 is missing")

    if is_installed():
        import_torchdata()
    forms = {name: IterDataPipe.functions.pop(name) for name in TORCHDATA_FORMS & set(IterDataPipe.functions)}
    map_forms = {name: MapDataPipe.functions.pop(name) for name in TORCHDATA_MAP_FORMS & set(MapDataPipe.functions)}
    form_names.install(fail)
    yield
    IterDataPipe.functions.update(forms)
    MapDataPipe.functions.update(map_forms)
    form_names.install(import_torchdata)


# ------------------------------------------------------------------------------------------------ WebDataset's names
def test_names_of_webdataset_are_all_answered() -> None:
    """Each public method of webdataset's class has a hint."""
    assert len(webdatasets_methods()) > 15
    for name in webdatasets_methods():
        with pytest.raises(AttributeError, match=r"WebDataset.* (here|is)"):
            getattr(WebDataset("x.tar"), name)


def test_hints_name_forms_that_exist() -> None:
    """What a hint tells to write is a functional name."""
    texts = [*METHODS.values(), *EXPORTS.values(), *form_names._WITHOUT_TORCHDATA.values()]
    texts += [text for hints in ARGUMENTS.values() for text in hints.values()]
    texts += form_names._OTHER_MEANING.values()
    for text in texts:
        for name in re.findall(r"(?<![\w)])\.([a-z_]+)\(", text):
            assert name in IterDataPipe.functions or name in TORCHDATA_FORMS, text


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("decode", ".wds_decode("),
        ("to_tuple", ".wds_to_tuple("),
        ("batched", ".batch(n)"),
        ("with_epoch", ".wds_epoch"),
    ],
)
def test_names_of_webdataset_stay_attribute_errors_when_they_are_looked_up(number: int, name: str, form: str) -> None:
    """Hasattr is False, so that no library that probes takes them for there; native pipes answer too."""
    pipe = chains()[number]
    assert not hasattr(pipe, name)
    assert getattr(pipe, name, None) is None
    with pytest.raises(AttributeError, match=re.escape(form)) as caught:
        getattr(pipe, name)
    assert name in str(caught.value)


def test_exports_of_webdataset_are_all_answered() -> None:
    """`import torchdata_wds as wds` and a name of webdataset's package: the module says what to write."""
    names = [name for name, value in vars(webdataset).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    assert len(names) > 60
    for name in names:
        if not hasattr(torchdata_wds, name):
            with pytest.raises(AttributeError, match=f"no attribute {name!r}: .*(here|write)"):
                getattr(torchdata_wds, name)


@pytest.mark.parametrize("name", ["encode", "mix", "epoch", "wds_decod", "wds_to_tuples", "load_wds_shard"])
def test_names_near_a_form_are_answered(name: str) -> None:
    """A forgotten wds_, and a form written wrongly."""
    with pytest.raises(AttributeError, match=r"is \.wds_|did you mean|no attribute"):
        getattr(WebDataset("x.tar"), name)


@pytest.mark.parametrize("name", ["wds_map", "group_by_key", "cycle"])
def test_forms_are_answered_when_taken_for_exports(name: str) -> None:
    """Not with another spelling: the name is right, but the package has no function of it."""
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': {name} is a form: write \.{name}\("):
        getattr(torchdata_wds, name)


@pytest.mark.parametrize(
    "name", ["set_epoch", "state_dict", "__getitems__", "_private", "shape", "dataset", "__array__"]
)
def test_other_names_stay_torchs_errors(name: str) -> None:
    """What libraries probe for is simply not there, at no cost of an import."""
    for pipe in chains():
        assert not hasattr(pipe, name)
        with pytest.raises(AttributeError, match="has no attribute") as caught:
            getattr(pipe, name)
        assert "WebDataset" not in str(caught.value)


def test_lookup_is_safe_when_a_pipe_has_no_state_yet() -> None:
    """Unpickling and copying look names up before there are attributes."""
    empty = type(WebDataset("x.tar")).__new__(type(WebDataset("x.tar")))
    assert not hasattr(empty, "decode")
    assert not hasattr(empty, "source_datapipe")
    for pipe in chains():
        assert type(pickle.loads(pickle.dumps(pipe))) is type(copy.deepcopy(pipe)) is type(copy.copy(pipe))
        assert len(traverse_dps(pipe)) == 1


# ------------------------------------------------------------------------------------- the same names, another meaning
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("args", "options"), [((1000,), {}), ((), {"initial": 100}), ((), {"size": 1000, "rng": None})]
)
def test_shuffle_says_what_to_write_when_it_is_called_as_webdatasets(
    number: int, args: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Torch's own form takes its size by name only."""
    with pytest.raises(TypeError, match=r"\.wds_shuffle\(1000\), shards with .*\.shuffle\(buffer_size=1000\)"):
        chains()[number].shuffle(*args, **options)  # type: ignore[attr-defined]


def test_shuffle_works_when_it_is_called_as_torchs() -> None:
    """By name, and without anything."""
    for pipe in chains():
        assert pipe.shuffle(buffer_size=7).buffer_size == 7  # type: ignore[attr-defined]
        assert type(pipe.shuffle()).__name__ == "ShufflerIterDataPipe"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda pipe: pipe.map(len, handler=None), r"\.wds_map\(f, handler="),
        (lambda pipe: pipe.batch(4, partial=False), "drop_last=True"),
        (lambda pipe: pipe.map(len, ignore_and_continue), r"\.wds_map\(f, handler="),
        (lambda pipe: pipe.filter(len, handler=None), r"\.wds_map\(f, handler="),
        (lambda pipe: pipe.batch(4).filter(len, ignore_and_continue), r"\.wds_map\(f, handler="),
        (lambda pipe: pipe.batch(4, collation_fn=list), r"\.collate\("),
        (lambda pipe: pipe.batch(4, wds_collate), r"\.collate\("),
        (lambda pipe: pipe.batch(4, collate_fn=wds_collate), r"\.collate\(f\)"),
        (lambda pipe: pipe.wds_to_tuple("jpg", missing_is_error=False), 'missing="none"'),
        (lambda pipe: pipe.wds_decode("pil", partial=True), "stay bytes"),
        (lambda pipe: pipe.wds_decode("pil", post=[len]), "put yours last"),
        (lambda pipe: pipe.wds_epoch(nbatches=4), r"after \.batch"),
        (lambda pipe: pipe.wds_shuffle(100, seed=3), "seed=s"),
    ],
)
def test_forms_say_what_to_write_when_they_get_webdatasets_arguments(call: Any, hint: str) -> None:
    """An argument that WebDataset's method has and the form here has not."""
    with pytest.raises(TypeError, match=hint):
        call(WebDataset("x.tar"))


def test_forms_raise_plainly_when_an_argument_is_unknown() -> None:
    """No hint for what WebDataset has not either."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'foo'$"):
        WebDataset("x.tar").wds_decode("pil", foo=True)  # type: ignore[call-arg]
    assert argument_hint("wds_decode", ["foo"]) is None


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(("name", "instead"), [("repeat", ".cycle(n)"), ("slice", "itertools.islice")])
def test_forms_of_torchdata_warn_when_webdataset_means_something_else(
    caplog: pytest.LogCaptureFixture, name: str, instead: str
) -> None:
    """Called on samples, once in a process, directly and after a native stage; looking the name up does nothing."""
    pipe = WebDataset("x.tar").batch(2)
    with caplog.at_level(logging.WARNING):
        form = getattr(pipe, name)
        assert not caplog.records
        assert type(form(2)).__module__.startswith("torchdata.")
        form(2)
    (record,) = caplog.records
    assert instead in record.getMessage()


@pytest.mark.parametrize("arguments", [{}, {"nepochs": 2}, {"nbatches": 10}])
def test_repeat_names_the_form_when_it_is_called_as_webdatasets(arguments: dict[str, int]) -> None:
    """Without a number, which is for ever there, or with WebDataset's arguments."""
    with pytest.raises(TypeError, match=r"For n passes over the data write \.cycle\(n\), .*\.wds_epoch\(n\)"):
        WebDataset("x.tar").repeat(**arguments)


@pytest.mark.usefixtures("unwarned")
def test_forms_of_torchdata_are_silent_when_they_are_surely_meant(caplog: pytest.LogCaptureFixture) -> None:
    """Over URLs, over anything that is not ours, and through the class."""
    with caplog.at_level(logging.WARNING):
        assert list(IterableWrapper([1, 2]).repeat(2)) == [1, 1, 2, 2]
        IterableWrapper(["x.tar"]).list_shards().repeat(2)
        Repeater(WebDataset("x.tar"), 2)
    assert not caplog.records


# ------------------------------------------------------------------------------------------------ torchdata's names
@needs_torchdata
def test_names_of_torchdata_are_all_known() -> None:
    """The lists are what torchdata registers, but for what torch and this package have registered."""
    import_torchdata()
    for kind, known in ((IterDataPipe, TORCHDATA_FORMS), (MapDataPipe, TORCHDATA_MAP_FORMS)):
        forms = {name: getattr(form, "args", (form,))[0] for name, form in kind.functions.items()}
        assert {name for name, form in forms.items() if form.__module__.startswith("torchdata.")} == known
    assert not TORCHDATA_FORMS & set(functional_forms)


@needs_torchdata
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TORCHDATA_MAP_FORMS))
def test_forms_of_map_pipes_are_there_when_used(name: str) -> None:
    """The first use imports torchdata; names of Python's protocols do not."""
    script = (
        "import copy, sys, torchdata_wds\n"
        "from torch.utils.data.datapipes.map import SequenceWrapper\n"
        "pipe = copy.copy(SequenceWrapper([1, 2]))\n"
        "assert not hasattr(pipe, 'other')\n"
        "assert 'torchdata' not in sys.modules\n"
        f"assert callable(pipe.{name})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.usefixtures("no_torchdata")
def test_forms_of_map_pipes_say_why_they_are_missing_when_torchdata_cannot_be_imported() -> None:
    """The reason; forms of torch are there."""
    pipe = SequenceWrapper([1, 2])
    with pytest.raises(AttributeError, match=r"\.to_iter_datapipe\(\) is a form of torchdata.*libcurl"):
        pipe.to_iter_datapipe()
    assert list(pipe.map(str)) == ["1", "2"]


@pytest.mark.usefixtures("no_torchdata")
@pytest.mark.parametrize("name", ["set_length", "cycle", "repeat", "read_from_http", "lines_to_paragraphs"])
def test_names_of_torchdata_say_why_they_are_missing_when_it_cannot_be_imported(name: str) -> None:
    """The reason, and what does the same without torchdata; hasattr is False."""
    for pipe in chains():
        assert not hasattr(pipe, name)
        with pytest.raises(AttributeError, match=r"libcurl\.so\.4 is missing") as caught:
            getattr(pipe, name)
        assert (name in form_names._WITHOUT_TORCHDATA) == (";" in str(caught.value))


ALONE = """
import sys
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WebDataset, TarWriter
def pairs(sample): return [sample, sample]
def chain():
    pipe = IterableWrapper(["t.tar"]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()
    return pipe.map(pairs).flatmap(list).cycle(2).in_memory_cache().prefetch(2).enumerate().set_length(32)
if __name__ == "__main__":
    with TarWriter("t.tar") as writer:
        for number in range(8):
            writer.write({"__key__": str(number), "cls": number})
    assert not hasattr(WebDataset("t.tar"), "state_dict") and not hasattr(WebDataset("t.tar"), "decode")
    assert "torchdata" not in sys.modules
    assert len(list(IterableWrapper(range(3)).batch(2).enumerate())) == 2
    loader = DataLoader(chain(), batch_size=None, num_workers=1, multiprocessing_context=sys.argv[1])
    assert len(loader) == 32 and len(list(loader)) == 32
    for opener in ("open_files_by_fsspec", "read_from_http", "load_from_tar"):
        assert hasattr(IterableWrapper(["t.tar"]).list_shards(), opener)
"""


@needs_torchdata
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_names_of_torchdata_work_when_only_this_package_is_imported(method: str, tmp_path: Any) -> None:
    """In a program that never names torchdata, on our pipes and on torch's, in its workers too; silently."""
    script = tmp_path / "program.py"
    script.write_text(ALONE)
    run = [sys.executable, "-W", "ignore", str(script), method]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
