"""The rules that every pipe keeps, over the rows of tests/contract.py."""

import ast
import contextlib
import inspect
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

import torchdata_wds
from tests.contract import ROWS, Row
from tests.kits import declared_forms
from tests.kits.forms import functional_forms
from tests.kits.processes import open_files

RANDOM = [name for name, row in ROWS.items() if row.random]
ORDERED = [name for name, row in ROWS.items() if not row.random]
HANDLING = [name for name, row in ROWS.items() if row.bad]
only = partial(pytest.mark.parametrize, "row", indirect=True)


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    """Each row in turn."""
    return ROWS[request.param]


def comparable(item: Any) -> Any:
    """An item as something that can be compared and counted."""
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, tuple):
        return tuple(map(comparable, item[:3])) if hasattr(item, "visit") else tuple(map(comparable, item))
    return repr(item)


def epoch(pipe: IterDataPipe[Any]) -> list[Any]:
    """One epoch's items."""
    return [comparable(item) for item in pipe]


def test_contract_has_a_row_for_every_functional_form() -> None:
    """A pipe without a row fails here."""
    assert set(ROWS) == set(functional_forms)


def test_pipes_work_twice_when_iterated_again(row: Row, tmp_path: Path) -> None:
    """Two iterations are two epochs of the same items."""
    pipe = row.make(tmp_path)
    first, second = epoch(pipe), epoch(pipe)
    assert len(first) == row.count
    assert Counter(map(str, first)) == Counter(map(str, second))
    assert row.random or first == second


def test_pipes_open_nothing_when_constructed(row: Row, tmp_path: Path) -> None:
    """The constructor does no work: the data may come later."""
    before = open_files()
    pipe = row.make(tmp_path)
    assert open_files() <= before, pipe


def test_pipes_close_everything_when_left_early(row: Row, tmp_path: Path) -> None:
    """After a break no file is open, and the next epoch is whole."""
    pipe = row.make(tmp_path)
    before = open_files()
    for _ in pipe:
        break
    assert open_files(collect=False) <= before
    assert len(epoch(pipe)) == row.count


def test_pipes_pickle_before_during_and_after_iteration(row: Row, tmp_path: Path) -> None:
    """A copy gives the same items whenever it is taken."""
    pipe = row.make(tmp_path)
    expected = Counter(map(str, epoch(row.make(tmp_path))))
    copies = [pickle.loads(pickle.dumps(pipe))]
    iterator = iter(pipe)
    next(iterator)
    copies.append(pickle.loads(pickle.dumps(pipe)))
    list(iterator)
    copies.append(pickle.loads(pickle.dumps(pipe)))
    for copy in copies:
        assert Counter(map(str, epoch(copy))) == expected


def test_pipes_show_their_source_when_the_graph_is_traversed(row: Row, tmp_path: Path) -> None:
    """Services find every pipe upstream."""
    ((_, (_, sources)),) = traverse_dps(row.make(tmp_path)).items()
    assert sources


@only(ORDERED)
def test_pipes_take_no_seed_when_they_draw_nothing(row: Row, tmp_path: Path) -> None:
    """The method is not there, so that a service does not look for it."""
    assert "set_seed" not in vars(type(row.make(tmp_path)))


@only(RANDOM)
def test_pipes_give_the_same_order_when_seeded_alike(row: Row, tmp_path: Path) -> None:
    """After set_seed(s) epochs are a function of s and their number, and differ from one another."""
    one, two = row.make(tmp_path), row.make(tmp_path)
    orders = []
    for pipe in (one, two):
        pipe.set_seed(2**64 - 1)
        orders.append([epoch(pipe) for _ in range(3)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1] != orders[0][2]
    one.set_seed(2**64 - 1)
    assert epoch(one) == orders[0][0]


@only(RANDOM)
def test_pipes_draw_from_torch_when_never_seeded(row: Row, tmp_path: Path) -> None:
    """Unseeded random pipes follow torch.manual_seed, and give a new order each epoch."""
    pipe = row.make(tmp_path)
    torch.manual_seed(3)
    first = [epoch(pipe), epoch(pipe)]
    torch.manual_seed(3)
    fresh = row.make(tmp_path)
    assert [epoch(fresh), epoch(fresh)] == first
    assert first[0] != first[1]


def test_pipes_have_the_right_length_or_none(row: Row, tmp_path: Path) -> None:
    """len() is exact or a TypeError."""
    pipe, length = row.make(tmp_path), row.count
    with contextlib.suppress(TypeError):
        length = len(pipe)
    assert length == row.count == len(epoch(pipe))


@only(HANDLING)
def test_pipes_raise_with_context_when_an_item_is_bad(row: Row, tmp_path: Path) -> None:
    """The default handler raises the named type, with torch's note of the pipe."""
    with pytest.raises(row.error) as caught:
        epoch(row.bad(tmp_path, torchdata_wds.reraise_exception))
    assert str(caught.value)


@only(HANDLING)
def test_pipes_go_on_when_the_handler_skips(row: Row, tmp_path: Path) -> None:
    """One item may fail, the stream may not; what was skipped is counted by type."""
    pipe = row.bad(tmp_path, torchdata_wds.ignore_and_continue)
    assert epoch(pipe)
    assert sum(pipe.skipped.values()) == 1
    assert any(issubclass(getattr(torchdata_wds, name, ValueError), row.error) for name in pipe.skipped)


@only(HANDLING)
def test_pipes_end_when_the_handler_stops(row: Row, tmp_path: Path) -> None:
    """A handler that answers False ends the epoch at that item; the first item of these rows is the bad one."""
    assert epoch(row.bad(tmp_path, torchdata_wds.ignore_and_stop)) == []


@only(HANDLING)
def test_pipes_refuse_a_handler_that_forgets_its_answer(row: Row, tmp_path: Path) -> None:
    """A handler that returns None would end the stream in silence: a TypeError instead."""
    with pytest.raises(TypeError, match="must return True"):
        epoch(row.bad(tmp_path, _forgetful))


def _forgetful(error: Exception) -> None:
    return None


def test_pipes_store_arguments_under_their_names(row: Row, tmp_path: Path) -> None:
    """Torch prints constructor arguments in exceptions, by attribute."""
    pipe = row.make(tmp_path)
    for parameter in list(inspect.signature(type(pipe).__init__).parameters)[1:]:
        hidden = f"_{parameter}" if parameter in IterDataPipe.functions else parameter  # it would hide the form
        assert {parameter, hidden} & vars(pipe).keys(), f"{type(pipe).__name__} does not store {parameter}"


@pytest.mark.parametrize("name", ROWS)
def test_functional_forms_are_documented(name: str) -> None:
    """The docstring names the functional form, and has Args, Yields and Example."""
    text = inspect.getdoc(functional_forms[name]) or ""
    assert f"(functional name: ``{name}``)." in text.splitlines()[0]
    for section in ("Args:", "Yields:", "Example:"):
        assert section in text, f"{name} has no {section}"


@pytest.mark.parametrize("name", ROWS)
def test_declarations_for_type_checkers_equal_the_constructors(name: str) -> None:
    """What editors see of a functional form is what its constructor takes, with types and defaults."""
    written = ast.unparse(declared_forms.declared(declared_forms.FILE.read_text())[name].args)
    assert written == ast.unparse(declared_forms.arguments_of(functional_forms[name]))


def test_functional_forms_have_no_forbidden_names() -> None:
    """Names that the libraries test with hasattr on every pipe are never registered."""
    forbidden = {"pause", "resume", "is_replicable", "set_seed", "set_shuffle", "apply_sharding", "reset", "state_dict"}
    assert not forbidden & set(IterDataPipe.functions)
