"""Secrets stay out of pickles and checkpoints, and reach every process that needs them all the same."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_keys, write_text_shards
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from tests.kits.workers_kit import run_script, time_limit
from torchdata_wds import ShardOpenError
from torchdata_wds.storage import RewriteRules, StorageOptions
from torchdata_wds.storage.secrets.withheld import Withheld

SECRET = "hunter2hunter2"
OPTIONS = {"s3": {"key": "AKIA" + SECRET, "secret": SECRET, "anon": False}, "https": {"headers": {"X": SECRET}}}
RULES = {f"s3://b/\\?token={SECRET}": "/data/"}


PLAIN = {"s3": {"anon": True, "endpoint_url": "http://host:9000", "profile": "mine"}, "https": {"retries": 3}}
OWN = {"s3": {"key": "new", "secret": "new", "anon": True}, "https": {"headers": {}}}
USE = """o = pickle.loads(data)
print(o, len(o), 's3' in o, 'gs' in o)
try:
    o['s3']
except torchdata_wds.ShardOpenError as error:
    print(error)
"""
#: What another process does with a pickle, by name.
WORKS = {
    "plain": (StorageOptions(PLAIN, rewrite="s3://=/data/"), "o = pickle.loads(data); print(dict(o), o.rewrite)"),
    "own": (StorageOptions(OPTIONS), f"o = pickle.loads(data); p = StorageOptions({OWN}); print(dict(o) == {OWN})"),
    "none": (StorageOptions({"s3": {"key": SECRET}}), USE),
    "two": (
        StorageOptions({"s3": {"key": SECRET}}),
        "a, b = (StorageOptions({'s3': {'key': k}}) for k in 'ab')\n" + USE,
    ),
}
SCRIPT = """import json, os, pickle, sys
import torchdata_wds
from torchdata_wds.storage import *
shown = {}
for name, (data, work) in json.loads(sys.argv[1]).items():
    data = bytes.fromhex(data)
    reading, writing = os.pipe()
    if not os.fork():  # a child knows nothing of what the others have made
        os.dup2(writing, 1)
        exec(work)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    shown[name] = open(reading).read().strip()
    assert os.wait()[1] == 0, name
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What a new interpreter prints that has read a pickle, by the name of its work."""
    given = {name: (pickle.dumps(held).hex(), work) for name, (held, work) in WORKS.items()}
    done = run_script(SCRIPT, json.dumps(given))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("held", [StorageOptions(OPTIONS), RewriteRules(RULES)], ids=["options", "rules"])
def test_secret_comes_back_in_this_process_and_its_children(held: Any) -> None:
    """By a mark, though the pickle does not hold it."""
    data = pickle.dumps(held)
    assert SECRET.encode() not in data
    for other in (pickle.loads(data), copy.deepcopy(held), copy.copy(held), type(held)(pickle.loads(data))):
        assert other == held
        assert pickle.loads(pickle.dumps(other)) == held
        assert repr(other) == repr(held)
        assert SECRET not in repr(other)


@pytest.mark.slow
def test_options_without_secrets_go_along_anywhere(shown: dict[str, str]) -> None:
    """Numbers, and texts that are known to be none; an address with a password in it is one."""
    assert shown["plain"] == f"{PLAIN} RewriteRules('s3://=/data/')"
    address = StorageOptions({"s3": {"endpoint_url": f"http://me:{SECRET}@host"}})
    assert SECRET.encode() not in pickle.dumps(address)
    assert pickle.loads(pickle.dumps(address)) == address


@pytest.mark.slow
def test_another_process_takes_what_its_own_program_has_given(shown: dict[str, str]) -> None:
    """Under the same names: another key may have come meanwhile."""
    assert shown["own"] == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [("none", "none of that name is known"), ("two", "2 different ones of the same names are known")],
)
def test_another_process_is_told_what_it_lacks(name: str, said: str, shown: dict[str, str]) -> None:
    """Where the options are used, with their names and the cure; their repr needs none."""
    assert shown[name].startswith("StorageOptions(s3={key=***}) 1 True False")
    assert said in shown[name]
    assert "Make one pipe with it in the program" in shown[name]
    assert "'key'" in shown[name]


def test_copies_keep_their_secret_when_many_others_come() -> None:
    """The graph that a loader has copied goes on, whatever else the program opens."""
    held = StorageOptions({"s3": {"key": SECRET}})
    copied = copy.deepcopy(held)
    for number in range(20):
        StorageOptions({"s3": {"key": f"another {number}"}})
    assert copied["s3"] == held["s3"] == {"key": SECRET}


def test_only_so_many_secrets_are_remembered() -> None:
    """A token that is new at each shard does not fill memory; those in use do not need to be looked up."""
    pickles = [pickle.dumps(Withheld("a secret", "token", str(number), is_secret=True)) for number in range(20)]
    assert len(set(pickles)) == 20
    assert pickle.dumps(Withheld("a secret", "token", "19", is_secret=True)) == pickles[19]
    assert pickle.loads(pickles[12]).value == "12"
    with pytest.raises(ShardOpenError, match="8 different ones"):
        _ = pickle.loads(pickles[3]).value


def keys_of(loader: Any) -> list[str]:
    return sorted(sample["__key__"] for sample in loader)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_have_the_secrets_and_checkpoints_have_not(method: str, tmp_path: Path) -> None:
    """Of our service and torch's loader; a state goes on in the same program."""
    urls = write_text_shards(tmp_path, (3, 4, 2))
    rules = {f"mine:/|s3://b?token={SECRET}": str(tmp_path)}
    shards = [f"mine://{Path(url).name}" for url in urls]
    pipe = IterableWrapper(shards).sharding_filter().load_wds_shards(storage_options=OPTIONS, rewrite=rules)
    pipe = pipe.group_by_key()
    count = 2 if method == "fork" else 1
    with time_limit(60):
        loader = DataLoader(pipe, batch_size=None, num_workers=count, multiprocessing_context=method)
        assert keys_of(loader) == text_keys((3, 4, 2))
        service = WorkersReadingService(count, multiprocessing_context=method, seed=1)
        with DataLoader2(pipe, reading_service=service) as ours:
            items = iter(ours)
            first = [next(items)["__key__"] for _ in range(4)]
            state = ours.state_dict()
            rest = [sample["__key__"] for sample in items]
        assert sorted(first + rest) == text_keys((3, 4, 2))
        assert SECRET.encode() not in pickle.dumps(state)
        again = WorkersReadingService(count, multiprocessing_context=method, seed=1)
        with DataLoader2.from_state(pickle.loads(pickle.dumps(state)), again) as resumed:
            assert [sample["__key__"] for sample in resumed] == rest
