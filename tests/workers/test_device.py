"""Pinning items in a thread and copying them to a device; stand-ins take the place of pinned memory and the device."""

import copy
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torchdata_wds.workers.device import DeviceItems, PinnedItems

#: A device that every torch has; its tensors have no data, but can be copied to.
META = "meta"
Point = namedtuple("Point", "x y")


class Pinnable:
    """A value whose method torch's pinning calls, as it does that of tensors."""

    def __init__(self, number: int) -> None:
        self.number = number

    def pin_memory(self) -> str:
        assert threading.current_thread().name == "wds-pin"
        return f"pinned {self.number}"


class Opaque:
    """A value with a method `to` that takes the device only, as batches of older tokenizers do."""

    def to(self, device: torch.device) -> str:
        return f"on {device}"


def pin_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wds-pin"]


def wait_until(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not is_true() and time.monotonic() < end:
        time.sleep(0.005)
    return is_true()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    assert not pin_threads()
    yield
    gc.collect()
    assert wait_until(lambda: not pin_threads())


class Counted(Iterator[Any]):
    """A source that counts what was taken, and fails at one item."""

    def __init__(self, count: int, *, fails: BaseException | None = None) -> None:
        self.taken = 0
        self.count = count
        self.fails = fails

    def __next__(self) -> Any:
        if self.taken == self.count:
            raise self.fails or StopIteration
        self.taken += 1
        return {"image": torch.full((2,), self.taken), "pin": Pinnable(self.taken), "text": str(self.taken)}


# --- pinning


def test_pinned_items_come_in_order() -> None:
    """Every item comes once, pinned, in the order of the source; after the end it stays ended."""
    items = PinnedItems(iter([Pinnable(number) for number in range(50)]), META)
    assert list(items) == [f"pinned {number}" for number in range(50)]
    assert list(items) == []


def test_pinned_items_keep_their_structure() -> None:
    """Collections keep their types; values that cannot be pinned pass."""
    item = {"a": [Pinnable(1), "b"], "point": Point(Pinnable(2), (3, None)), "more": OrderedDict(c=Pinnable(4))}
    [pinned] = PinnedItems(iter([item]), META)
    assert pinned == {"a": ["pinned 1", "b"], "point": Point("pinned 2", (3, None)), "more": {"c": "pinned 4"}}
    assert isinstance(pinned["point"], Point)
    assert isinstance(pinned["more"], OrderedDict)


def test_pinned_items_are_one_ahead() -> None:
    """Nothing is taken before the first item, then one more than was delivered."""
    source = iter(numbers := Counted(9))
    items = PinnedItems((item["pin"] for item in source), META)
    assert (numbers.taken, pin_threads()) == (0, [])
    for delivered in range(1, 9):
        next(items)
        assert wait_until(lambda count=delivered: numbers.taken == count + 1)  # type: ignore[misc]
    time.sleep(0.05)
    assert numbers.taken == 9
    items.close()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_pinned_items_raise_an_error_of_the_source_at_its_place(error: BaseException) -> None:
    """The items before it come first; the traceback shows the source; afterwards the iterator has ended."""

    def failing() -> Iterator[Pinnable]:
        yield Pinnable(0)
        yield Pinnable(1)
        raise error

    items = PinnedItems(failing(), META)
    assert [next(items), next(items)] == ["pinned 0", "pinned 1"]
    with pytest.raises(type(error)) as caught:
        next(items)
    assert caught.value is error
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert next(items, "ended") == "ended"


def test_pinned_items_raise_an_error_of_pinning_at_its_place() -> None:
    """An item that cannot be pinned is an error in its place."""

    class Stubborn:
        def pin_memory(self) -> None:
            raise MemoryError("no pages left")

    items = PinnedItems(iter([Pinnable(0), Stubborn(), Pinnable(2)]), META)
    assert next(items) == "pinned 0"
    with pytest.raises(MemoryError, match="no pages left"):
        next(items)
    assert next(items, "ended") == "ended"


def test_pinned_items_close_early() -> None:
    """Closing ends the thread and the iterator, as often as it is called; unused and ended ones can be closed."""
    items = PinnedItems((Pinnable(number) for number in range(1000)), META)
    assert next(items) == "pinned 0"
    for _ in range(3):
        items.close()
        assert not pin_threads()
    assert next(items, "ended") == "ended"
    unused = PinnedItems(iter([Pinnable(0)]), META)
    unused.close()
    assert next(unused, "ended") == "ended"
    ended = PinnedItems(iter([]), META)
    assert list(ended) == []
    ended.close()


def test_pinned_items_end_when_forgotten() -> None:
    """Without references the thread ends, and releases the source."""
    released = threading.Event()

    def endless() -> Iterator[Pinnable]:
        try:
            while True:
                yield Pinnable(0)
        finally:
            released.set()

    for item in PinnedItems(endless(), META):
        assert item == "pinned 0"
        assert pin_threads()
        break
    assert released.wait(20)
    assert wait_until(lambda: not pin_threads())


def test_pinned_items_close_while_the_source_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits a limited time for a source that does not respond; the thread ends once it does."""
    monkeypatch.setattr("torchdata_wds.workers.device._PATIENCE", 0.05)
    inside, resume = threading.Event(), threading.Event()

    def stalled() -> Iterator[Pinnable]:
        yield Pinnable(0)
        inside.set()
        assert resume.wait(20)
        yield Pinnable(1)

    items = PinnedItems(stalled(), META)
    next(items)
    assert inside.wait(20)
    items.close()
    assert len(pin_threads()) == 1
    assert next(items, "ended") == "ended"
    resume.set()
    assert wait_until(lambda: not pin_threads())


def test_pinned_items_close_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for an item is released when another thread closes the iterator."""
    monkeypatch.setattr("torchdata_wds.workers.device._PATIENCE", 0.05)
    started, resume = threading.Event(), threading.Event()

    def set_device(device: torch.device) -> None:
        started.set()
        assert resume.wait(20)

    monkeypatch.setattr(torch, META, types.SimpleNamespace(Stream=object, set_device=set_device), raising=False)
    got: list[Any] = []
    items = PinnedItems(iter([Pinnable(0)]), META)
    consumer = threading.Thread(target=lambda: got.extend(items))
    consumer.start()
    assert started.wait(20)
    items.close()
    resume.set()
    consumer.join(20)
    assert not consumer.is_alive()
    assert got == []


def test_pinned_items_continue_after_an_interrupt() -> None:
    """Ctrl-C while the consumer waits is raised there at once; the next call waits for the same item."""
    resume = threading.Event()

    def slow() -> Iterator[Pinnable]:
        assert resume.wait(20)
        yield Pinnable(0)
        yield Pinnable(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        items = PinnedItems(slow(), META)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            next(items)
    finally:
        signal.signal(signal.SIGALRM, before)
    resume.set()
    assert list(items) == ["pinned 0", "pinned 1"]


def test_pinned_items_use_the_device_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread uses the consumer's device, as torch's loader does."""
    chosen: list[tuple[str, Any]] = []
    fake = types.SimpleNamespace(
        Stream=object, set_device=lambda device: chosen.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch, META, fake, raising=False)
    assert list(PinnedItems(iter([Pinnable(0)]), META)) == ["pinned 0"]
    assert chosen == [("wds-pin", torch.device(META))]


@pytest.mark.slow
def test_pinned_items_leave_a_program_that_ends_early() -> None:
    """A program that ends while the iterator is in use waits for the item being made, and prints no message."""
    program = """
import threading, time
from torchdata_wds.workers.device import PinnedItems
is_at_work = threading.Event()

def numbers():
    yield 0
    yield 1
    is_at_work.set()
    time.sleep(0.5)
    print("2 is made", flush=True)
    yield 2
    print("3 is made", flush=True)

items = PinnedItems(numbers(), "meta")
print(next(items), next(items), is_at_work.wait(20), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("0 1 True\n2 is made\n", "")


# --- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize(
    "make",
    [
        lambda: DeviceItems(iter([1]), "cuda"),
        lambda: DeviceItems(iter([1]), "cuda:1"),
        lambda: PinnedItems(iter([1])),
    ],
)
def test_a_device_that_is_absent_is_an_error_before_the_first_item(make: Callable[[], Any]) -> None:
    """The message names the device and says why."""
    with pytest.raises(RuntimeError, match=r"device 'cuda(:1)?' cannot be used in this process: \S"):
        make()


def test_a_device_that_does_not_exist_is_an_error_before_the_first_item() -> None:
    """A misspelled device is torch's own error."""
    with pytest.raises(RuntimeError, match="kuda"):
        DeviceItems(iter([1]), "kuda")


def test_device_items_pass_on_the_cpu() -> None:
    """The CPU has the same objects, and nothing is taken ahead."""
    made = [{"image": torch.zeros(2)}, [1], None]
    source = iter(made)
    items = DeviceItems(source, "cpu")
    for number, item in enumerate(made, 1):
        assert next(items) is item
        assert len(list(copy.copy(source))) == len(made) - number
    assert next(items, "ended") == "ended"


def test_device_items_without_streams_are_copied_one_by_one() -> None:
    """On a device without streams, each item is copied when it is requested."""
    source = Counted(3)
    items = DeviceItems(source, META)
    for number in (1, 2, 3):
        assert next(items)["image"].device.type == META
        assert source.taken == number
    assert next(items, "ended") == "ended"


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be changed, only made from a dict."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields_of = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields_of)

    def __len__(self) -> int:
        return len(self._fields_of)


class Named(Fixed):
    """A mapping that cannot be made from a dict alone."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)


class Labels(list[Any]):
    """A list with an attribute."""

    kind = "none"


def test_device_items_keep_their_structure() -> None:
    """Objects with a method `to` are copied, in mappings, lists and tuples of any type; the rest passes unchanged."""
    labels = Labels([torch.zeros(1), "cat"])
    labels.kind = "animals"
    factory = defaultdict(list, a=torch.zeros(1))
    item = {
        "fields": [factory, OrderedDict(b=torch.zeros(1)), Fixed({"c": torch.zeros(1)}), Named("n", {"d": Opaque()})],
        "labels": labels,
        "point": Point(torch.zeros(1), (torch.zeros(1), 5)),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.zeros(3)]),
        "largest": torch.zeros(2, 2).max(dim=0),
        "rest": ["text", b"bytes", 1, 2.5, None, torch.float32, torch.Tensor, {1, 2}],
    }
    [copied] = DeviceItems(iter([item]), META)
    fields = copied["fields"]
    assert [type(value) for value in fields] == [defaultdict, OrderedDict, Fixed, dict]
    assert fields[0].default_factory is list
    assert fields[3] == {"d": "on meta"}
    assert (type(copied["labels"]), copied["labels"].kind, copied["labels"][1]) == (Labels, "animals", "cat")
    assert type(copied["point"]) is Point
    assert copied["point"].y[1] == 5
    assert type(copied["packed"]) is type(item["packed"])
    assert type(copied["largest"]) is type(item["largest"])
    tensors = [fields[0]["a"], fields[1]["b"], fields[2]["c"], copied["labels"][0], copied["point"].x]
    tensors += [copied["point"].y[0], copied["packed"].data, copied["largest"].values]
    assert {tensor.device.type for tensor in tensors} == {META}
    assert copied["rest"] == item["rest"]
    assert copied["rest"] is not item["rest"]
    assert factory["a"].device.type == "cpu"  # the source's own item stays as it was
    assert labels[0].device.type == "cpu"


class Stream:
    """A stream that only notes the calls of its methods."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"copy {self.events}"


class Streams:
    """Stands in for torch.cuda, as the module of the device "meta"."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream("main", self.log)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - as torch.cuda has it
        assert device == torch.device(META)
        return Stream("side", self.log)

    def set_device(self, device: torch.device) -> None:
        assert device == torch.device(META)

    def current_stream(self, device: torch.device) -> Stream:
        assert device == torch.device(META)
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Part:
    """A tensor that notes where it is copied, and which streams use it."""

    def __init__(self, name: Any, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def to(self, device: torch.device, non_blocking: bool = False) -> "Part":
        assert non_blocking
        self.streams.log.append(f"{self.name} copied on {self.streams.current.name}")
        return Part(self.name, self.streams)

    def record_stream(self, stream: Stream) -> None:
        self.streams.log.append(f"{self.name} used on {stream.name}")
        if self.name == "sparse":
            raise NotImplementedError("sparse tensors have no record_stream")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch, META, streams, raising=False)
    return streams


def test_device_items_copy_the_next_while_one_is_used(streams: Streams) -> None:
    """Each copy first waits for earlier work; each item waits for its own copy only, and claims its memory."""
    items = DeviceItems(iter([[Part(name, streams), "text"] for name in "abc"]), META)
    assert streams.log == []
    seen = []
    for item in items:
        assert item[1] == "text"
        seen.append(streams.log.copy())
        streams.log.clear()
    assert seen == [
        [
            *("side waits for main", "a copied on side", "side waits for main", "b copied on side"),
            *("main waits for copy 1", "a used on main"),
        ],
        ["side waits for main", "c copied on side", "main waits for copy 2", "b used on main"],
        ["main waits for copy 3", "c used on main"],
    ]
    assert next(items, "ended") == "ended"


def test_device_items_claim_only_what_they_copied(streams: Streams) -> None:
    """A tensor that was on the device already is not claimed; one that cannot be claimed is delivered all the same."""

    class There(Part):
        def to(self, device: torch.device, non_blocking: bool = False) -> "There":
            return self

    [item] = DeviceItems(iter([(There("there", streams), Part("sparse", streams), Opaque())]), META)
    assert item[2] == "on meta"
    assert streams.log[-2:] == ["main waits for copy 1", "sparse used on main"]
    assert "there used on main" not in streams.log


def test_device_items_raise_an_error_at_its_place(streams: Streams) -> None:
    """The item before an error is delivered; the error comes once, with the source's frames, then the end."""

    def failing() -> Iterator[Any]:
        yield Part("a", streams)
        yield Part("b", streams)
        raise ValueError("a damaged shard")

    items = DeviceItems(failing(), META)
    assert [next(items).name, next(items).name] == ["a", "b"]
    with pytest.raises(ValueError, match="a damaged shard") as caught:
        next(items)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert next(items, "ended") == "ended"


def test_device_items_raise_an_error_of_copying_at_its_place(streams: Streams) -> None:
    """An item that cannot be copied ends the iterator after those before it, on the stream of before."""

    class Large:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise MemoryError("the device is full")

    items = DeviceItems(iter([Part("a", streams), Large(), Part("c", streams)]), META)
    assert next(items).name == "a"
    with pytest.raises(MemoryError, match="the device is full"):
        next(items)
    assert next(items, "ended") == "ended"


def test_device_items_continue_after_an_interrupt(streams: Streams) -> None:
    """Ctrl-C while the next item is awaited is raised at once; the item that was ahead is not lost."""

    class Interrupted(Iterator[Part]):
        def __init__(self) -> None:
            self.taken = 0
            self.is_due = True

        def __next__(self) -> Part:
            if self.taken == 2 and self.is_due:
                self.is_due = False
                raise KeyboardInterrupt
            self.taken += 1
            return Part(self.taken, streams)

    items = DeviceItems(Interrupted(), META)
    assert next(items).name == 1
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert [next(items).name, next(items).name] == [2, 3]


def test_device_items_leave_no_cycles(streams: Streams) -> None:
    """Memory on a device is released with the last reference, not by a later garbage collection."""
    gc.collect()
    gc.disable()
    try:
        for count in (1, 2, 3):  # at the second item the end is known, at the third call it is raised
            items = DeviceItems(iter([Part("a", streams), Part("b", streams)]), META)
            references = [weakref.ref(item) for item in itertools.islice(items, count)]
            references.append(weakref.ref(items))
            del items
            assert [reference() for reference in references] == [None] * (min(count, 2) + 1)
    finally:
        gc.enable()


def test_pinned_items_are_copied_to_a_device(streams: Streams) -> None:
    """Both together: the items come in order."""

    class Both(Part):
        def pin_memory(self) -> Part:
            return Part(f"pinned {self.name}", self.streams)

    pinned = PinnedItems(iter([Both(number, streams) for number in range(5)]), META)
    items = DeviceItems(pinned, META)
    assert next(items).name == "pinned 0"
    assert [item.name for item in items] == [f"pinned {number}" for number in range(1, 5)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_items_reach_a_cuda_device() -> None:
    """Real tensors are pinned, and then copied with their values."""
    batches = [{"image": torch.full((1000,), number), "text": str(number)} for number in range(20)]
    pinned = list(PinnedItems(iter(batches)))
    assert all(batch["image"].is_pinned() for batch in pinned)
    copied = [(batch["image"].sum().item(), batch["text"]) for batch in DeviceItems(iter(pinned), "cuda")]
    assert copied == [(number * 1000, str(number)) for number in range(20)]
