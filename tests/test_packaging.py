"""What the package says about itself to installers: its requirements, and the systems that it runs on."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import torchdata_wds

FOLDER = Path(torchdata_wds.__file__).parent
PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENTS = {
    (extra, text): Requirement(text)
    for extra, texts in {"": PROJECT["dependencies"], **EXTRAS}.items()
    for text in texts
}


def test_each_requirement_has_a_lower_bound() -> None:
    """Installers take any age else: beside boto3 an s3fs of 2020. What is installed here keeps to the bounds."""
    for (extra, text), requirement in REQUIREMENTS.items():
        assert any(bound.operator in (">=", "==", "~=") for bound in requirement.specifier), (extra, text)
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert requirement.marker is not None or requirement.specifier.contains(found), (extra, text, found)


def test_requirements_have_one_bound_in_all_extras() -> None:
    """The tests run with what users get; clients of stores have the bound of fsspec, which they follow."""
    bounds: dict[str, set[str]] = {}
    for requirement in REQUIREMENTS.values():
        lowest = [str(bound) for bound in requirement.specifier if bound.operator != "<"]
        bounds.setdefault(requirement.name, set()).update(lowest)
    assert all(len(found) == 1 for found in bounds.values()), bounds
    assert bounds["s3fs"] == bounds["gcsfs"] == bounds["adlfs"] == bounds["fsspec"]


def test_project_names_the_systems_that_it_runs_on() -> None:
    """POSIX only, which the README says as well."""
    systems = {name for name in PROJECT["classifiers"] if name.startswith("Operating System")}
    assert systems
    assert all("POSIX" in name or "MacOS" in name for name in systems)
    assert "on a POSIX system" in (FOLDER.parent / "README.md").read_text()


def test_import_says_what_to_do_when_the_system_is_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is imported that is not there."""
    spec = importlib.util.spec_from_file_location("elsewhere", FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ImportError, match=r"only on POSIX systems.*WSL"):
        spec.loader.exec_module(module)


@pytest.mark.slow
def test_import_works_when_python_lacks_fcntl() -> None:
    """Caches then do without locks."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('fcntl', 'grp', 'pwd', 'resource', 'termios')));"
        "from torchdata_wds import TarWriter;"
        "import tempfile; TarWriter(tempfile.mkdtemp() + '/x.tar').close()"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
