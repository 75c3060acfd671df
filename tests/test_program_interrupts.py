"""Ctrl-C while the program starts or ends: it is quiet, and other programs are left alone."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.kits.processes import in_child
from torchdata_wds import program_interrupts as interrupts

NUMPY = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def heed_interrupts() -> None:
    """Undoes what a shell does to the programs that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "start", [("-m", "torchdata_wds"), (sysconfig.get_path("scripts") + "/wds",)], ids=["-m", "wds"]
)
def test_program_ends_quietly_when_interrupted_while_it_imports(start: tuple[str, ...], tmp_path: Path) -> None:
    """Exit status 130, and no traceback."""
    (tmp_path / "numpy.py").write_text(NUMPY)
    paths = [str(tmp_path), str(Path(interrupts.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *start, "ls", "x.tar"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=300,
        preexec_fn=heed_interrupts,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("argv", "command", "expected"),
    [
        (["-m", "ls"], ["python", "-u", "-m", "torchdata_wds", "ls"], True),
        (["-m", "ls"], ["python", "-mtorchdata_wds", "ls"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["/venv/bin/wds", "ls"], ["/venv/bin/python", "/venv/bin/wds", "ls"], True),
        (["train.py"], ["python", "train.py", "wds"], False),
        (["train.py", "wds"], ["python", "train.py", "wds"], False),
        (["/venv/bin/wds", "ls"], ["python", "-c", "spawn_main(tracker_fd=5)", "--multiprocessing-fork"], False),
        (["/lib/torchdata_wds/__main__.py"], ["python", "-c", "spawn_main()", "--multiprocessing-fork"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_interrupts_know_the_program(
    argv: list[str], command: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, or run as a module; its workers, and programs that import the package, are none."""
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", command)
    assert interrupts._is_program() is expected


def test_interrupts_end_the_process_when_armed() -> None:
    """At once, with the status that a shell reports."""

    def end() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with interrupts.armed():
            os.kill(os.getpid(), signal.SIGINT)

    assert in_child(end) == 130


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN, lambda *_: None])
def test_interrupts_leave_other_handlers_alone(handler: signal.Handlers) -> None:
    """What ignores Ctrl-C goes on doing so; afterwards all is as it was."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.armed():
            assert (signal.getsignal(signal.SIGINT) is handler) is (handler is not signal.default_int_handler)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
