"""Handlers: what they answer, log and count."""

import logging
import pickle
import time
from collections import Counter
from typing import Any

import pytest

from torchdata_wds import errors, handlers
from torchdata_wds.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    keep_going,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)

ALL = [reraise_exception, ignore_and_continue, ignore_and_stop, warn_and_continue, warn_and_stop]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts begin at zero."""
    monkeypatch.setattr(handlers, "handled", Counter())
    monkeypatch.setattr(handlers, "_warned", Counter())


@pytest.mark.parametrize(
    ("handler", "answer"),
    [(ignore_and_continue, True), (warn_and_continue, True), (ignore_and_stop, False), (warn_and_stop, False)],
)
def test_handlers_answer_and_count(handler: Any, answer: bool) -> None:
    """True goes on, False stops; each call is counted by handler and type, and by the pipe."""
    skipped: Counter[str] = Counter()
    assert keep_going(handler, ValueError("x"), skipped) is answer
    assert skipped == {"ValueError": 1}
    assert handlers.handled == {f"{handler.__name__}/ValueError": 1}


@pytest.mark.parametrize("handler", ALL)
@pytest.mark.parametrize("cause", [MemoryError(), ImportError("x"), ModuleNotFoundError("zstandard")])
def test_handlers_are_not_asked_when_the_item_is_not_at_fault(handler: Any, cause: Exception) -> None:
    """Without memory or a package every item would fail, also as the cause of another error: skipping hides that."""
    skipped: Counter[str] = Counter()
    wrapped = errors.DecodingError("x")
    wrapped.__cause__ = cause
    for error in (cause, wrapped):
        with pytest.raises(type(error)) as caught:
            keep_going(handler, error, skipped)
        assert caught.value is error
    assert not skipped
    assert not handlers.handled


def test_reraise_exception_raises_the_same_object() -> None:
    """The exception comes out as it went in."""
    error = errors.ShardFormatError("cut", shard="x.tar")
    with pytest.raises(errors.ShardFormatError) as caught:
        keep_going(reraise_exception, error, Counter())
    assert caught.value is error


def test_warnings_are_rare_when_errors_are_many(caplog: pytest.LogCaptureFixture) -> None:
    """The first ten of a type are logged, then the 100th and the 1,000th; and nothing sleeps."""
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(1500):
            warn_and_continue(ValueError("bad"))
        assert len(caplog.records) == 12
        warn_and_continue(KeyError("other"))
        assert len(caplog.records) == 13
    assert time.perf_counter() - start < 5
    assert "bad" in caplog.records[0].getMessage()


def test_warn_and_stop_logs_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says that the stream stopped, and why."""
    with caplog.at_level(logging.WARNING):
        warn_and_stop(ValueError("bad"))
    assert "stopped (ValueError" in caplog.text


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_keep_going_refuses_when_a_handler_gives_no_bool(answer: Any) -> None:
    """A forgotten return is a TypeError, caused by what was to be handled."""
    with pytest.raises(TypeError, match="must return True") as caught:
        keep_going(lambda error: answer, ValueError("x"), Counter())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("handler", ALL)
def test_handlers_pickle_by_name(handler: Any) -> None:
    """They cross to worker processes."""
    assert pickle.loads(pickle.dumps(handler)) is handler


def test_errors_derive_from_builtins_that_callers_catch() -> None:
    """The tree is the documented one."""
    parents = {
        "ShardListError": ValueError,
        "ShardOpenError": OSError,
        "ShardFormatError": ValueError,
        "SampleError": ValueError,
        "DecodingError": errors.SampleError,
        "CacheError": OSError,
        "SpecError": ValueError,
        "DivisionError": RuntimeError,
    }
    for name, parent in parents.items():
        assert issubclass(getattr(errors, name), parent)
