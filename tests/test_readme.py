"""The README is true: its blocks run, its tables are complete."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import socket
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdata_wds
from tests.contract import ROWS
from tests.kits.shards import image_samples, sample_members, write_tar
from tests.kits.tool_kit import run_line
from torchdata_wds import environment
from torchdata_wds.cli.main import COMMANDS
from torchdata_wds.codecs import CODECS, IMAGE_SPECS
from torchdata_wds.pipes.base import functional_forms

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
SIZES = (9, 4, 13, 1, 7, 20, 3, 6)


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, with the line that each begins at."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [(TEXT[: match.start(1)].count("\n"), match[1]) for match in found]


def commands() -> list[str]:
    """The lines of the shell blocks that call the package."""
    lines = [line for _, block in blocks("shell") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("python -m torchdata_wds", "wds "))]


def names_in_code(text: str) -> set[str]:
    """Every identifier that stands in backticks."""
    return {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[A-Za-z_]\w*", span)}


def first_cells(header: str) -> list[str]:
    """The first column of the table whose header begins so."""
    _, found, after = TEXT.partition(f"\n| {header} |")
    assert found, header
    rows = after.split("\n\n", 1)[0].splitlines()[2:]
    return [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards that the README speaks of."""
    path = tmp_path_factory.mktemp("readme")
    for number, size in enumerate(SIZES):
        members = [member for key in range(size) for member in _sample(number, key)]
        write_tar(path / f"train-{number:06d}.tar", members)
    return path


def _sample(shard: int, key: int) -> list[tuple[str, bytes]]:
    jpg, json, cls = (data for _, data in image_samples(f"{shard}-", key + 1)[-3:])
    return sample_members(f"{shard}-{key:05d}", jpg=jpg, json=json, cls=cls, words=b"a b")


@pytest.fixture(scope="module")
def module() -> Iterator[types.ModuleType]:
    """The module that the blocks run in, one after the other, as a reader would type them."""
    made = types.ModuleType("readme_blocks")
    sys.modules[made.__name__] = made  # DataLoader2 pickles its functions by their module
    yield made
    del sys.modules[made.__name__]


# ------------------------------------------------------------------------------------------------------ the blocks run


@pytest.mark.parametrize(
    ("line", "source"), blocks("python"), ids=lambda value: value if isinstance(value, int) else ""
)
def test_python_block_runs(
    line: int, source: str, folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block runs after those before it, offline, beside shards of the names it uses."""
    monkeypatch.chdir(folder)
    tree = ast.increment_lineno(ast.parse(source), line)
    exec(compile(tree, str(ROOT / "README.md"), "exec"), module.__dict__)


@pytest.mark.slow
def test_first_program_runs_where_there_are_no_shards(tmp_path: Path) -> None:
    """Pasted into an empty folder, right after the installation."""
    (tmp_path / "first.py").write_text(blocks("python")[0][1])
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("train-*.tar"))) == 8


def test_blocks_do_what_the_text_says(folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebatched epoch, the skipped shard and the rank of a distributed run lose nothing."""
    monkeypatch.chdir(folder)
    values = module.__dict__
    assert sum(len(labels) for _, labels in values["batches"]) == sum(SIZES)
    assert len(values["samples"]) == SIZES[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert values["train"]() == sum(SIZES)
    torch.distributed.init_process_group("gloo")
    states: list[dict[str, Any]] = []
    models = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 16, 10)) for _ in range(2)]
    try:
        values["train_ddp"](models[0], 2, lambda state: states.append(copy.deepcopy(state)))
        values["train_ddp"](models[1], 2, lambda _: None, states[0])
    finally:
        torch.distributed.destroy_process_group()
    assert len(states) > 2
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def test_shell_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the package that the README shows ends well, in their order; the one about damage tells it."""
    monkeypatch.chdir(folder)
    whole = (folder / "train-000003.tar").read_bytes() + (folder / "train-000002.tar").read_bytes()
    (folder / "damaged.tar").write_bytes(whole[: len(whole) * 2 // 3])
    for command in commands():
        done = run_line(command.replace("python -m torchdata_wds", "wds"))
        assert done is not None, command
        assert done.status == int("damaged" in command), done.err
        if " demo" in command:
            assert done.text.endswith("every sample came exactly once\n")


def test_blocks_are_all_seen() -> None:
    """Every fenced block is of a language that is checked here."""
    fences = re.findall(r"^```(\w*)$", TEXT, re.MULTILINE)
    assert set(fences) == {"python", "shell", ""}
    assert len(blocks("python")) + len(blocks("shell")) == len(fences) / 2
    assert len(commands()) == 10
    assert {command.split()[1] for command in commands()} - {"-m"} <= set(COMMANDS)


# -------------------------------------------------------------------------------------------- the tables are complete


def test_table_of_commands_is_complete() -> None:
    """Each command of the program has a place in it, in the order of the help."""
    cells = " ".join(first_cells("command"))
    assert re.findall(r"`wds (\w+)`", cells) == list(COMMANDS)


def test_table_of_functional_forms_is_complete() -> None:
    """Each form has one row, and nothing else has."""
    forms = [re.sub(r"`\.(\w+)\(.*", r"\1", cell) for cell in first_cells("form")]
    assert set(forms) == set(ROWS)
    assert len(forms) == len(ROWS)


def test_table_of_functional_forms_names_arguments_that_exist() -> None:
    """An argument in the table is one of the form's."""
    for cell in first_cells("form"):
        name, arguments = re.fullmatch(r"`\.(\w+)\((.*)\)`", cell).groups()  # type: ignore[union-attr]
        known = set(inspect.signature(functional_forms[name].__init__).parameters)
        shown = set(re.findall(r"(\w+)=(?=[,)]|$)", arguments))
        assert shown <= known, name


def test_table_for_webdatasets_users_names_everything_that_webdataset_exports() -> None:
    """Who moves over finds every name of webdataset's pipeline, even those that are not there yet."""
    import webdataset

    exported = {
        name
        for name, value in vars(webdataset).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    _, _, table = TEXT.partition("\n| WebDataset |")
    assert exported - names_in_code(table.partition("\n### ")[0]) == set()


def test_table_of_extras_is_complete() -> None:
    """The extras are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [name for cell in first_cells("extra") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_table_of_environment_variables_is_complete() -> None:
    """The variables are those that environment.py lists."""
    rows = re.findall(r"^\| (``.*?``) \|", environment.__doc__ or "", re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"``(\w+)``", row)}
    assert {name for cell in first_cells("environment variable") for name in re.findall(r"`(\w+)`", cell)} == listed


def test_table_of_fields_is_complete() -> None:
    """Each extension that has a codec is there, and no other; each image spec is named."""
    shown = [name for cell in first_cells("fields")[:-1] for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(shown) == sorted(CODECS)
    specs = TEXT.partition("Image specs: ")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", specs)) | {
        "torch" + spec for spec in ("l8", "rgb8", "rgba8", "l", "rgb", "rgba")
    }
    assert set(IMAGE_SPECS) <= named


def test_readme_names_every_public_name() -> None:
    """Nothing public is left without a word."""
    assert set(torchdata_wds.__all__) - names_in_code(TEXT) == set()


def test_changelog_has_the_version() -> None:
    """The version of the package has its section, with every form."""
    text = (ROOT / "CHANGELOG.md").read_text()
    section = text.partition(f"## [{torchdata_wds.__version__}]")[2].partition("\n## ")[0]
    assert set(ROWS) <= names_in_code(section)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_documents_have_short_lines(name: str) -> None:
    """Lines fit beside a diff; tables and code may be longer."""
    prose = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not [line for line in prose.splitlines() if len(line) > 125 and not line.startswith("|")]
