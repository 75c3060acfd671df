"""Errors carry their place, their kind and their advice, through pickling and copies."""

import logging
import pickle

import pytest

from torchdata_wds import errors
from torchdata_wds.errors import DOWNLOAD_AGAIN, Advice, ShardFormatError, ShardOpenError, WdsError, cli_message
from torchdata_wds.handlers import warn_and_continue

PLACE = {"shard": "x.tar", "member": "a.jpg", "key": "a", "field": "jpg"}


def all_types():
    return [made for made in vars(errors).values() if isinstance(made, type) and issubclass(made, WdsError)]


@pytest.mark.parametrize("made", all_types())
def test_errors_survive_pickling_with_all_they_carry(made):
    """Each type keeps its message, its place and both wordings of its advice."""
    more = {"kind": "cut", "offset": 512} if made is ShardFormatError else {}
    error = made("it fails.", advice=Advice("Pass x=True.", "Give --x."), **PLACE, **more)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (made, "it fails. Pass x=True.", vars(error))
    assert cli_message(again) == "it fails. Give --x."
    assert {name: getattr(again, name) for name in PLACE} == PLACE
    assert str(made()) == ""


def test_cli_message_is_the_message_where_there_are_not_two():
    """Advice in one wording, none at all, and exceptions of others."""
    assert cli_message(WdsError("it fails.", advice="Repair it.")) == "it fails. Repair it."
    assert cli_message(WdsError("it fails.")) == "it fails."
    assert cli_message(OSError(2, "No such file")) == "[Errno 2] No such file"


def test_extended_appends_to_both_wordings():
    """A copy; the error itself stays as it was."""
    error = ShardFormatError("it is cut.", shard="x.tar", member="a", advice=DOWNLOAD_AGAIN, kind="cut", offset=7)
    longer = error.extended(" (listed as y.tar)", shard="y.tar")
    assert str(longer) == f"it is cut. {DOWNLOAD_AGAIN.library} (listed as y.tar)"
    assert cli_message(longer) == f"it is cut. {DOWNLOAD_AGAIN.cli} (listed as y.tar)"
    assert (longer.shard, longer.member, longer.kind, longer.offset) == ("y.tar", "a", "cut", 7)
    assert (str(error), error.shard) == (f"it is cut. {DOWNLOAD_AGAIN.library}", "x.tar")
    assert str(ShardOpenError("no").extended(" one")) == "no one"


def test_warnings_carry_both_wordings(caplog):
    """The record of a warning has the whole text with the command line's words."""
    with caplog.at_level(logging.WARNING):
        warn_and_continue(ShardOpenError("it broke off.", advice=Advice("Pass a handler.", "Give --errors skip.")))
    (record,) = caplog.records
    assert "it broke off. Pass a handler." in record.getMessage()
    assert record.cli_message == record.getMessage().replace("Pass a handler.", "Give --errors skip.")
