"""The program starts fast: commands that need no tensor do not import torch, nor do their worker processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.test_program import expected_status, needs_shell
from tests.kits.tool_kit import write_example_folder
from torchdata_wds.cli.main import COMMANDS

#: In place of torch: notes who imports it, in any process.
TORCH = """
import os, traceback
with open(os.environ["NOTES"], "a") as notes:
    notes.write("".join(traceback.format_stack()))
raise ImportError("this test does without torch")
"""

#: Commands whose arguments call for tensors, or for functions of a user's module, which decide that themselves.
WITH_TORCH = {"bench", "demo", "map"}

EXAMPLES = [
    line.removeprefix("wds ").replace("shuffled.tar", f"{name}-shuffled.tar")  # of several commands
    for name in COMMANDS
    if name not in WITH_TORCH
    for line in COMMANDS[name].example.splitlines()
    if not needs_shell(line)
]
LINES = [
    *("--version", "--help", "help", "help resume"),
    *(f"{name} --help" for name in COMMANDS),
    *("ls --totals train-*.tar", "ls --json --slice 0:5 train-000000.tar", "ls --errors skip damaged.tar"),
    *EXAMPLES,
    *("cat train-000000.tar train-000001.tar --mix 2 -p 3 -o mixed.tar", "cat train-*.tar --slice 3:9:2 -o some.tar"),
    *("index -p 2 --force train-*.tar", "validate -p 2 train-*.tar", "stats -p 2 train-*.tar"),
    "map functions:shorten train-*.tar --per-sample --workers 2 -o shorter/",
]

PROGRAM = """
import json, sys
from tests.kits.tool_kit import run_line
from tests.cli.test_program import with_names
outcomes = []
for line in json.load(sys.stdin):
    done = run_line(with_names("wds " + line))
    outcomes.append((done.status, done.err))
    if "torch" in sys.modules or __import__("os").path.exists("notes"):
        break
print(json.dumps(outcomes))
"""


def test_commands_import_no_torch_when_they_need_no_tensor(tmp_path: Path) -> None:
    """Neither their own process nor those that they start; the examples of the help among them."""
    write_example_folder(tmp_path)
    (tmp_path / "functions.py").write_text("def shorten(sample):\n    return {**sample, 'txt': sample['txt'][:3]}\n")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text(TORCH)
    paths = [str(hidden), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(LINES),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NOTES": str(tmp_path / "notes")},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[Any] = json.loads(done.stdout)
    notes = tmp_path / "notes"
    assert not notes.exists(), f"{LINES[len(outcomes) - 1]}\n{notes.read_text()}"
    expected = [expected_status(line) for line in LINES]
    found = zip(LINES, outcomes, expected, strict=True)
    assert [(line, message) for line, (status, message), wanted in found if status != wanted] == []
