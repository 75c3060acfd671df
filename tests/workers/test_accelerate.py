"""What a loader finds out about Accelerate from the calling frames; Accelerate itself is not needed."""

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsLoader
from torchdata_wds.workers import lightning

#: As in accelerate/checkpointing.py.
CHECKPOINTING = """
def save_custom_state(obj, path, index=0, save_on_each_node=False):
    return obj.state_dict()

def save_something_else(obj):
    return obj.state_dict()
"""


class Progress:
    """An object that a training script registers, with a loader in it."""

    def __init__(self, loader: WdsLoader[int]) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "loader": self.loader.state_dict()}


def test_state_is_that_of_all_ranks_only_in_checkpoints_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a registered object's state; elsewhere other ranks may not take part."""
    monkeypatch.setattr(lightning, "gathered", lambda state: {**state, "ranks": [state]})
    module: dict[str, Any] = {"__name__": "accelerate.checkpointing"}
    exec(CHECKPOINTING, module)
    loader = WdsLoader(IterableWrapper(range(9)).sharding_filter(), seed=1)
    next(iter(loader))
    state = loader.state_dict()
    assert "ranks" not in state
    assert module["save_something_else"](loader) == state
    assert module["save_custom_state"](loader, "folder") == {**state, "ranks": [state]}
    assert module["save_custom_state"](Progress(loader), "folder")["loader"] == {**state, "ranks": [state]}
