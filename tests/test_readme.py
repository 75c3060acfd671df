"""README and the manual are true: their blocks run, their tables are complete, their links lead somewhere."""

import ast
import contextlib
import copy
import inspect
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import torchdata_wds
from tests.contract import ROWS
from tests.kits.forms import functional_forms
from tests.kits.shards import image_samples, sample_members, write_tar
from tests.kits.tool_kit import run_line, run_wds
from tests.kits.torchdata import is_installed, needs_torchdata, skip_test, uses_torchdata
from torchdata_wds import environment
from torchdata_wds.cli import demo
from torchdata_wds.cli.main import COMMANDS
from torchdata_wds.codecs import CODECS, IMAGE_SPECS

ROOT = Path(torchdata_wds.__file__).parent.parent
MANUAL = {path.stem: path for path in sorted((ROOT / "torchdata_wds" / "docs").glob("*.md"))}
PAGES = {"README": ROOT / "README.md", "benchmarks": ROOT / "benchmarks" / "README.md", **MANUAL}
TEXTS = {page: path.read_text() for page, path in PAGES.items()}
SIZES = (9, 4, 13, 1, 7, 20, 3, 6)
#: Lines that other tests run (the benchmarks, the distributed script), or that nothing can run on one host offline.
NOT_RUN = ("pip install", "pytest", "ruff check", "torchrun", "python benchmarks/", "ray ", "python train.py")
#: Pages whose blocks take seconds to import what they are about, and a command that measures for seconds.
SLOW, SLOW_PARTS = {"frameworks"}, ("wds bench", "profile_pipe(", "repeat_batches(")
#: What README's training loop prints.
LOSSES = r"epoch 0: loss \d+\.\d\d\nepoch 1: loss \d+\.\d\d\n"
#: What the blocks of the manual may import, and a reader need not have.
FRAMEWORKS = ("accelerate", "lightning", "prometheus_client", "tensorboard", "transformers")


class Block(NamedTuple):
    """A fenced block of a page; the line is that of its fence."""

    line: int
    language: str
    source: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page that can run, in its order."""
    text = TEXTS[page]
    found = re.finditer(r"^```(python|shell)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text[: match.start(2)].count("\n"), match[1], match[2]) for match in found]


def slow_if(page: str, block: Block) -> list[pytest.MarkDecorator]:
    """The mark of a block that takes seconds."""
    return [pytest.mark.slow] * (page in SLOW or any(part in block.source for part in SLOW_PARTS))


class Workplace:
    """A folder and a module in which the blocks of one page run, one after the other, as a reader would type them.

    Where torchdata is not installed, the statements that need it are left out, and those that need what these define.
    """

    def __init__(self, page: str, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.module = types.ModuleType(f"blocks_of_{page.replace('-', '_')}")
        self.blocks = blocks(page)
        self.done = 0
        self.left_out: set[str] = set()  # names
        self.cut: set[int] = set()  # numbers of blocks
        self.missing: dict[int, str] = {}  # the framework that a block needs

    def __getitem__(self, name: str) -> Any:
        """What the blocks call so; skips the test if it was left out."""
        self.run()
        if name in self.left_out:
            skip_test()
        return self.module.__dict__[name]

    def run(self, count: int | None = None) -> None:
        """Runs the blocks up to a number of them, all by default, each once."""
        with contextlib.chdir(self.folder):
            for block in self.blocks[self.done : count]:
                self.done += 1
                if block.language == "python":
                    tree = ast.increment_lineno(ast.parse(block.source), block.line)
                    if not is_installed():
                        tree.body = self._without_torchdata(tree.body)
                    try:
                        exec(compile(tree, str(PAGES[self.page]), "exec"), self.module.__dict__)
                    except ModuleNotFoundError as error:
                        if error.name not in FRAMEWORKS:
                            raise
                        self.missing[self.done] = error.name
                else:
                    run_shell(block.source)

    def _without_torchdata(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        kept = []
        for statement in single_imports(statements):
            defined, used = names_in(statement)
            if uses_torchdata(statement) or used & self.left_out:
                self.left_out |= defined
                self.cut.add(self.done)
            else:
                self.left_out -= defined
                kept.append(statement)
        return kept


def single_imports(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with an import of its own for each imported name."""
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                single = ast.ImportFrom(statement.module, [alias], statement.level)
                yield ast.copy_location(single, statement)
        else:
            yield statement


def names_in(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement defines, and those that it uses."""
    defined, used = set(), set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.alias(name=name, asname=other):
                defined.add(other or name)
    return defined, used - defined


def run_shell(source: str) -> None:
    """Runs the lines of a shell block, those of the package in this process; each must do what the page says."""
    for line in source.splitlines():
        if line.startswith("wds "):
            # Beside threads, several processes would be spawned. The demo's own shards are larger than is needed here.
            with mock.patch("os.cpu_count", return_value=1), mock.patch.object(demo, "SIZES", SIZES):
                done = run_line(line)
            assert done is not None, line
            assert done.status == int("damaged" in line), done.err
            assert "wds demo" not in line or done.text.endswith("every sample came exactly once\n")
        elif not line.startswith(NOT_RUN):
            assert subprocess.run(line, shell=True, check=False).returncode == 0, line


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the manual speaks of: shards like the demo's but smaller, a damaged one, a folder of files."""
    path = tmp_path_factory.mktemp("manual")
    for number, size in enumerate(SIZES):
        members = [member for key in range(size) for member in _sample(number, key)]
        write_tar(path / f"train-{number:06d}.tar", members)
    whole = (path / "train-000003.tar").read_bytes() + (path / "train-000002.tar").read_bytes()
    (path / "damaged.tar").write_bytes(whole[: len(whole) * 2 // 3])
    (path / "folder").mkdir()
    (path / "folder" / "000017.cls").write_text("1")
    return path


def _sample(shard: int, key: int) -> list[tuple[str, bytes]]:
    jpg, json, cls = (data for _, data in image_samples(f"{shard}-", key + 1)[-3:])
    return sample_members(f"{shard}-{key:05d}", jpg=jpg, json=json, cls=cls)


@pytest.fixture(scope="module")
def workplaces(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Workplace]]:
    """One for each page. README's is empty: its first command leaves the demo's shards there."""
    made = {}
    for page in PAGES:
        folder = tmp_path_factory.mktemp(page)
        if page != "README":
            shutil.copytree(shards, folder, dirs_exist_ok=True, copy_function=os.link)
        made[page] = Workplace(page, folder)
        sys.modules[made[page].module.__name__] = made[page].module  # DataLoader2 pickles its functions by their module
    yield made
    for workplace in made.values():
        del sys.modules[workplace.module.__name__]


# ------------------------------------------------------------------------------------------------------ the blocks run
@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, n, id=f"{page}-{block.line}", marks=slow_if(page, block))
        for page in PAGES
        for n, block in enumerate(blocks(page), 1)
    ],
)
def test_block_runs_when_those_before_it_have_run(page: str, number: int, workplaces: dict[str, Workplace]) -> None:
    """Every Python and shell block, offline, beside shards of the names it uses."""
    workplaces[page].run(number)
    assert workplaces[page].done >= number
    if number in workplaces[page].cut:
        skip_test()
    if framework := workplaces[page].missing.get(number):
        pytest.skip(f"needs {framework}")


def test_training_loop_prints_the_loss_of_each_epoch(
    workplaces: dict[str, Workplace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's first program, on the demo's shards."""
    main = workplaces["README"]["main"]
    monkeypatch.chdir(workplaces["README"].folder)
    capsys.readouterr()
    main()
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert re.fullmatch(LOSSES, printed)


@pytest.mark.slow
def test_training_loop_runs_when_pasted_after_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's first program, in a process of its own, beside nothing but the demo's shards."""
    monkeypatch.chdir(tmp_path)
    assert run_wds("demo", "--keep", "train", "--workers", "0").status == 0
    program = next(block.source for block in blocks("README") if "def main" in block.source)
    if uses_torchdata(ast.parse(program)) and not is_installed():
        skip_test()
    (tmp_path / "loop.py").write_text(program)
    done = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(LOSSES, done.stdout)


def test_pages_lose_no_sample_when_workers_are_joined_or_a_shard_is_missing(workplaces: dict[str, Workplace]) -> None:
    """The rebatched epoch and the skipped shard."""
    assert len(workplaces["errors"]["samples"]) == SIZES[0]
    assert sum(len(labels) for _, labels in workplaces["workers"]["batches"]) == sum(SIZES)


def test_distributed_page_resumes_to_the_same_weights_when_started_from_a_state(
    workplaces: dict[str, Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two functions, as the only rank of a run."""
    train, train_ddp = workplaces["distributed"]["train"], workplaces["distributed"]["train_ddp"]
    monkeypatch.chdir(workplaces["distributed"].folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train() == sum(SIZES)
    torch.distributed.init_process_group("gloo")
    states: list[dict[str, Any]] = []
    models = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 16, 10)) for _ in range(2)]
    try:
        train_ddp(models[0], 2, lambda state: states.append(copy.deepcopy(state)))
        train_ddp(models[1], 2, lambda _: None, states[0])
    finally:
        torch.distributed.destroy_process_group()
    assert len(states) > 2
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_page_has_no_block_that_is_not_checked(page: str) -> None:
    """Every fenced block is Python, shell, text that is only to be read, or YAML, of which test_cluster_page knows."""
    fences = re.findall(r"^```(\w*)$", TEXTS[page], re.MULTILINE)
    texts = fences.count("text") + (fences.count("yaml") if page == "cluster" else 0)
    assert set(fences) <= {"python", "shell", "text", "yaml", ""}
    assert len(blocks(page)) + texts == len(fences) / 2


# -------------------------------------------------------------------------------------------- the tables are complete
def names_in_code(text: str) -> set[str]:
    """Every identifier that stands in backticks."""
    return {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[A-Za-z_]\w*", span)}


def first_cells(page: str, header: str) -> list[str]:
    """The first column of the table whose header begins so."""
    _, found, after = TEXTS[page].partition(f"\n| {header} |")
    assert found, header
    rows = after.split("\n\n", 1)[0].splitlines()[2:]
    return [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]


def names_in_first_cells(page: str, header: str) -> list[str]:
    """The names in backticks of the first column."""
    return [name for cell in first_cells(page, header) for name in re.findall(r"`(\w+)`", cell)]


def test_table_of_commands_is_complete() -> None:
    """Each command of the program has a place in it, in the order of the help."""
    assert re.findall(r"`wds (\w+)`", " ".join(first_cells("cli", "command"))) == list(COMMANDS)


def test_table_of_functional_forms_is_complete() -> None:
    """Each form has one row, and nothing else has."""
    forms = [re.sub(r"`\.(\w+)\(.*", r"\1", cell) for cell in first_cells("README", "form")]
    assert sorted(forms) == sorted(ROWS)


def test_table_of_functional_forms_names_arguments_that_exist() -> None:
    """An argument in the table is one of the form's."""
    for cell in first_cells("README", "form"):
        name, arguments = re.fullmatch(r"`\.(\w+)\((.*)\)`", cell).groups()  # type: ignore[union-attr]
        known = set(inspect.signature(functional_forms[name].__init__).parameters)
        shown = set(re.findall(r"(\w+)=(?=[,)]|$)", arguments))
        assert shown <= known, name


def test_table_of_classes_has_each_form_beside_its_class() -> None:
    """In the order of the cells."""
    _, _, after = TEXTS["forms"].partition("\n| form | class |\n")
    rows = [row.split("|")[1:3] for row in after.partition("\n\n")[0].splitlines()[1:]]
    shown = {
        form: name
        for forms, names in rows
        for form, name in zip(re.findall(r"`\.(\w+)`", forms), re.findall(r"`(\w+)`", names), strict=True)
    }
    assert shown.keys() == set(ROWS)
    assert all(getattr(torchdata_wds, name) is functional_forms[form] for form, name in shown.items())


def test_table_for_webdatasets_users_names_everything_that_webdataset_exports() -> None:
    """A user who moves over finds every name of webdataset's pipeline, even those without an equivalent."""
    import webdataset

    exported = {
        name
        for name, value in vars(webdataset).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    _, _, table = TEXTS["webdataset"].partition("\n| WebDataset |")
    assert exported - names_in_code(table.partition("\n## ")[0]) == set()


def test_table_of_extras_is_complete() -> None:
    """The extras are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(names_in_first_cells("README", "extra")) == sorted(project["optional-dependencies"])


def test_table_of_environment_variables_is_complete() -> None:
    """The variables are those that environment.py lists."""
    rows = re.findall(r"^\| (``.*?``) \|", environment.__doc__ or "", re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"``(\w+)``", row)}
    assert set(names_in_first_cells("storage", "environment variable")) == listed


def test_table_of_fields_is_complete() -> None:
    """Each extension that has a codec is there, and no other; each image spec is named."""
    assert sorted(names_in_first_cells("fields", "fields")) == sorted(CODECS)
    named = set(re.findall(r"`(\w+)`", TEXTS["fields"].partition("Image specs: ")[2].partition("\n\n")[0]))
    named |= {"torch" + spec for spec in ("l8", "rgb8", "rgba8", "l", "rgb", "rgba")}
    assert set(IMAGE_SPECS) <= named


def test_speed_table_is_that_of_the_benchmarks() -> None:
    """README repeats one table of figures."""
    header = "| shards | webdataset"
    tables = [TEXTS[page].partition(header)[2].partition("\n\n")[0] for page in ("README", "benchmarks")]
    assert tables[0]
    assert tables[0] == tables[1]


def test_tree_of_exceptions_is_complete() -> None:
    """Each exception is under its base, with the builtin that it also is."""
    tree = re.search(r"^```text\n(WdsError\n.*?)^```$", TEXTS["errors"], re.MULTILINE | re.DOTALL)
    assert tree is not None
    above = [torchdata_wds.WdsError]
    for line in tree[1].splitlines()[1:]:
        indent, name, builtin = re.match(r"( +)(\w+)(?: \((\w+)\))?", line).groups()  # type: ignore[union-attr]
        error = getattr(torchdata_wds, name)
        del above[len(indent) // 4 :]
        assert error.__bases__[0] is above[-1], name
        assert [base.__name__ for base in error.__bases__[1:]] == ([builtin] if builtin else []), name
        above.append(error)
    named = set(re.findall(r"^ *(\w+Error)\b", tree[1], re.MULTILINE))
    assert named == {name for name in torchdata_wds.__all__ if name.endswith("Error")}


@needs_torchdata
@pytest.mark.parametrize(
    ("name", "first"), [("WdsLoader", "pipe, num_workers=0"), ("WorkersReadingService", "num_workers")]
)
def test_signature_of_a_loader_is_the_real_one(name: str, first: str) -> None:
    """Names and defaults."""
    shown = re.search(rf"`{name}\(({first}, \*.*?)\)`", TEXTS["workers"], re.DOTALL)
    assert shown is not None
    real = inspect.signature(getattr(torchdata_wds, name).__init__).parameters.values()
    written = [f"{option.name}={option.default!r}" for option in real if option.kind is option.KEYWORD_ONLY]
    assert " ".join(shown[1].split()).replace('"', "'") == ", ".join([first, "*", *written])


# ---------------------------------------------------------------------------------------------- the pages are in order
def test_pages_name_every_public_name() -> None:
    """Nothing public is left without a word."""
    text = "\n".join(TEXTS.values())
    trees = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert set(torchdata_wds.__all__) - names_in_code(text) - set(re.findall(r"\w+", " ".join(trees))) == set()


def test_readme_is_short_and_links_to_each_topic_of_the_manual() -> None:
    """A start, not a reference."""
    assert len(TEXTS["README"].splitlines()) <= 250
    linked = re.findall(r"\[[\w-]+\]\(torchdata_wds/docs/([\w-]+)\.md\)", TEXTS["README"])
    assert set(linked) == set(MANUAL)


def test_readme_lists_its_sections() -> None:
    """The contents are its headings, in their order."""
    contents = TEXTS["README"].partition("**Contents:**")[2].partition("\n\n")[0]
    assert re.findall(r"\[([^\]]+)\]", contents) == re.findall(r"^## (.+)$", TEXTS["README"], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files_and_headings_that_exist(page: str) -> None:
    """Relative ones, as a code host resolves them."""
    prose = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        file = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", PAGES)
def test_page_names_modules_and_scripts_that_exist(page: str) -> None:
    """Loggers and modules by their dotted name, scripts by their path in the repository."""
    for name in re.findall(r"`(torchdata_wds(?:\.\w+)+)[`(]", TEXTS[page]):
        assert pkgutil.resolve_name(name) is not None
    for path in re.findall(r"\b((?:tests|benchmarks)/[\w/]+\.py)\b", TEXTS[page]):
        assert (ROOT / path).is_file(), path


def anchors(text: str) -> set[str]:
    """The anchors that a code host gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_picture_of_the_readme_is_small() -> None:
    """It is fetched with every look at the page."""
    assert 10_000 < (ROOT / "torchdata_wds/docs/contact-sheet.png").stat().st_size < 100_000


def test_changelog_has_the_version() -> None:
    """The version of the package has its section, with every form."""
    text = (ROOT / "CHANGELOG.md").read_text()
    section = text.partition(f"## [{torchdata_wds.__version__}]")[2].partition("\n## ")[0]
    assert set(ROWS) <= names_in_code(section)


@pytest.mark.parametrize("path", [*PAGES.values(), ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_document_has_short_lines(path: Path) -> None:
    """Lines fit beside a diff; tables may be longer."""
    assert not [line for line in path.read_text().splitlines() if len(line) > 125 and not line.startswith("|")]
