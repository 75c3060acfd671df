"""Graphs and the pipes in them, as the package finds them."""

import pickle
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from torchdata_wds.consumers import traverse


def test_traverse_finds_what_torch_does_but_pickles_no_list_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that share a source, pipes in collections and among long lists, and what cannot be pickled."""
    names = [f"{number}.tar" for number in range(1000)]
    source = IterableWrapper(names)
    first, second = source.fork(2)
    held = IterableWrapper([*names, IterableWrapper(tuple(names))])
    held.more = {"in a dict": [IterableWrapper(names)], "itself": held}
    for pipe in (source, first.mux(second.map(str)).zip(first), held, IterableWrapper([names, names]).batch(2)):
        assert traverse(pipe) == traverse_dps(pipe)
    for wrong in (IterableWrapper([lambda: 1]), 3):
        with pytest.raises(Exception, match=r"pickle|Expected") as expected:
            traverse_dps(wrong)
        with pytest.raises(expected.type):
            traverse(wrong)
    pickled: list[object] = []
    monkeypatch.setattr("torchdata_wds.consumers.pickle.Pickler", lambda file: RecordingPickler(file, pickled))
    assert len(traverse(source.sharding_filter())) == 1
    assert "1.tar" not in pickled


class RecordingPickler(pickle.Pickler):
    """Records what it pickles."""

    def __init__(self, file: Any, pickled: list[object]) -> None:
        super().__init__(file)
        self.pickled = pickled

    def persistent_id(self, obj: object) -> None:
        self.pickled.append(obj)
