"""The layout of the package: its floors, its folders, and what each file may import."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import torchdata_wds

ROOT = Path(torchdata_wds.__file__).parent
MOST_FILES = 16

#: The floors, each with what it may import besides itself and the floors of the rows above.
GROUND = (
    "errors",
    "environment",
    "handlers",
    "program_interrupts",
    "post_import",
    "garbage",
    "memory",
    "checks",
    "option_types",
)
FLOORS = (
    *GROUND,
    "storage",
    "format",
    "codecs",
    "process_place",
    "consumers",
    "writers",
    "pipes",
    "datasets",
    "workers",
    "",
    "cli",
    "__main__",
)
WITHOUT_TORCH = {*GROUND, "storage", "format"}


def name_of(path: Path) -> str:
    """The module in a file."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    """A module's source, parsed once and only when a test needs it."""
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """Everything in a module's tree."""
    return list(ast.walk(tree_of(module)))


def floor_of(module: str) -> str:
    """The folder or module right under the package; "" is the package's own __init__."""
    return (*module.split("."), "")[1]


@cache
def imports_of(module: str) -> list[str]:
    """The full name of everything that a module imports anywhere: inside functions and for type checkers too."""
    found: list[str] = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def modules_of(module: str) -> set[str]:
    """The modules of the package that a module imports, and the packages whose ``__init__`` runs for that."""
    found = set()
    for name in imports_of(module):
        parts = name.split(".")
        known = [".".join(parts[:count]) for count in range(2, len(parts) + 1)]
        wanted = [name for name in known if name in FILES]
        found.update(wanted[-1:])
        found.update(name for name in wanted[:-1] if not f"{module}.".startswith(f"{name}."))
    return found - {module}


def dotted(node: ast.AST) -> str:
    """The source of a name such as os.environ; empty for an attribute of anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if before := dotted(value):
            return f"{before}.{name}"
    return ""


def test_floors_are_all_known() -> None:
    """A new folder needs a place in FLOORS."""
    assert {floor_of(module) for module in FILES} == set(FLOORS)


def test_imports_point_down() -> None:
    """A floor imports itself and what lies below; nothing but the program uses the package's own names."""
    rank = {floor: number for number, floor in enumerate(FLOORS)}
    up = [
        f"{module} imports {name}"
        for module in FILES
        for name in modules_of(module) | {name for name in imports_of(module) if name.startswith("torchdata_wds.")}
        if rank.get(floor_of(name), rank[""]) > rank[floor_of(module)]
    ]
    assert not up


def test_imports_have_no_circle() -> None:
    """No two modules import each other, not even by way of others or for type checkers only."""
    graph = {module: modules_of(module) for module in FILES if module != "torchdata_wds"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_folders_are_small() -> None:
    """A folder that has more files is two folders."""
    count = {folder: len(list(folder.glob("*.py"))) for folder in ROOT.rglob("*") if folder.is_dir()}
    assert not {folder: number for folder, number in count.items() if number > MOST_FILES}


def test_torch_is_imported_only_where_it_may_be() -> None:
    """The lower floors need no torch, and torchdata is imported in one file."""
    for module in FILES:
        roots = {name.split(".")[0] for name in imports_of(module)}
        if floor_of(module) in WITHOUT_TORCH:
            assert not roots & {"torch", "torchdata"}, module
        if module != "torchdata_wds.workers.service":
            assert "torchdata" not in roots, module


def test_torch_is_imported_by_codecs_only_when_needed() -> None:
    """Codecs import torch inside functions."""
    for module in FILES:
        tree = tree_of(module)
        names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert floor_of(module) != "codecs" or "torch" not in {name.split(".")[0] for name in names}, module


def test_only_the_program_prints_and_only_environment_reads_the_environment() -> None:
    """Everything else logs, and every variable is listed in environment.py."""
    for module in FILES:
        nodes = nodes_of(module)
        if floor_of(module) != "cli":
            calls = [dotted(node.func) for node in nodes if isinstance(node, ast.Call)]
            assert not {"print", "sys.stdout.write", "sys.stderr.write"} & set(calls), module
        if floor_of(module) != "environment":
            names = {dotted(node) for node in nodes} | set(imports_of(module))
            assert not {"os.environ", "os.environb", "os.getenv", "os.putenv"} & names, module


def test_files_have_names_that_say_something() -> None:
    """No file is a place for leftovers."""
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in FILES.values() if path.stem in vague]
