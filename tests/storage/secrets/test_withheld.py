"""Secrets stay out of pickles and checkpoints, and reach every process that needs them all the same."""

import copy
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


def in_another_process(data: bytes, work: str) -> str:
    """What a new interpreter prints that has read a pickle and makes `found` of it."""
    script = f"import pickle, sys\nimport torchdata_wds\nfrom torchdata_wds.storage import *\n{work}"
    done = run_script(script, data.hex())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
def test_options_without_secrets_go_along_anywhere() -> None:
    """Numbers, and texts that are known to be none; an address with a password in it is one."""
    given = {"s3": {"anon": True, "endpoint_url": "http://host:9000", "profile": "mine"}, "https": {"retries": 3}}
    data = pickle.dumps(StorageOptions(given, rewrite="s3://=/data/"))
    shown = in_another_process(data, "o = pickle.loads(bytes.fromhex(sys.argv[1])); print(dict(o), o.rewrite)")
    assert shown == f"{given} RewriteRules('s3://=/data/')"
    address = StorageOptions({"s3": {"endpoint_url": f"http://me:{SECRET}@host"}})
    assert SECRET.encode() not in pickle.dumps(address)
    assert pickle.loads(pickle.dumps(address)) == address


@pytest.mark.slow
def test_another_process_takes_what_its_own_program_has_given() -> None:
    """Under the same names: another key may have come meanwhile."""
    data = pickle.dumps(StorageOptions(OPTIONS))
    own = "{'s3': {'key': 'new', 'secret': 'new', 'anon': True}, 'https': {'headers': {}}}"
    work = f"o = pickle.loads(bytes.fromhex(sys.argv[1])); p = StorageOptions({own}); print(dict(o) == {own})"
    assert in_another_process(data, work) == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("", "none of that name is known"),
        ("a, b = (StorageOptions({'s3': {'key': k}}) for k in 'ab')", "2 different ones of the same names are known"),
    ],
)
def test_another_process_is_told_what_it_lacks(own: str, said: str) -> None:
    """Where the options are used, with their names and the cure; their repr needs none."""
    data = pickle.dumps(StorageOptions({"s3": {"key": SECRET}}))
    work = f"{own}\no = pickle.loads(bytes.fromhex(sys.argv[1]))\nprint(o, len(o), 's3' in o, 'gs' in o)\n"
    work += "try:\n    o['s3']\nexcept torchdata_wds.ShardOpenError as error:\n    print(error)"
    shown = in_another_process(data, work)
    assert shown.startswith("StorageOptions(s3={key=***}) 1 True False")
    assert said in shown
    assert "Make one pipe with it in the program" in shown
    assert "'key'" in shown


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
    with time_limit(60):
        loader = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context=method)
        assert keys_of(loader) == text_keys((3, 4, 2))
        service = WorkersReadingService(2, multiprocessing_context=method, seed=1)
        with DataLoader2(pipe, reading_service=service) as ours:
            items = iter(ours)
            first = [next(items)["__key__"] for _ in range(4)]
            state = ours.state_dict()
            rest = [sample["__key__"] for sample in items]
        assert sorted(first + rest) == text_keys((3, 4, 2))
        assert SECRET.encode() not in pickle.dumps(state)
        again = WorkersReadingService(2, multiprocessing_context=method, seed=1)
        with DataLoader2.from_state(pickle.loads(pickle.dumps(state)), again) as resumed:
            assert [sample["__key__"] for sample in resumed] == rest
