"""The manual's page on clusters: its signatures are the real ones, its manifest is valid, and its program trains."""

import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

import torchdata_wds
from tests.kits.torchdata import needs_torchdata
from tests.test_readme import SIZES, TEXTS, Workplace, shards

__all__ = ["shards"]  # a fixture

yaml = pytest.importorskip("yaml")
PAGE = TEXTS["cluster"]

#: Of the custom resource RayJob of KubeRay 1.7, version ray.io/v1: what it must have, and what it may have.
REQUIRED = {
    "job": {"rayClusterSpec"},  # or a clusterSelector
    "cluster": {"headGroupSpec"},
    "head": {"template"},
    "group": {"groupName", "minReplicas", "maxReplicas", "template"},
}
ALLOWED = {
    "job": {"entrypoint", "shutdownAfterJobFinishes"},
    "cluster": {"rayVersion", "authOptions", "workerGroupSpecs"},
    "head": {"rayStartParams"},
    "group": {"replicas", "rayStartParams"},
}


@needs_torchdata
@pytest.mark.parametrize(("name", "first"), [("RayPool", "address=None"), ("RayReadingService", "num_workers")])
def test_signature_is_the_real_one(name: str, first: str) -> None:
    """Names and defaults."""
    shown = re.search(rf"`{name}\(({first}, \*.*?)\)`", PAGE, re.DOTALL)
    assert shown is not None
    real = inspect.signature(getattr(torchdata_wds, name).__init__).parameters.values()
    written = [f"{option.name}={option.default!r}" for option in real if option.kind is option.KEYWORD_ONLY]
    assert " ".join(shown[1].split()) == ", ".join([first, "*", *written])


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The manifest."""
    (source,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    job: dict[str, Any] = yaml.safe_load(source)
    return job


def test_manifest_has_the_fields_that_kuberay_requires(job: dict[str, Any]) -> None:
    """And no others but those that it knows, in groups of pods with named containers."""
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    parts = [("job", job["spec"]), ("cluster", cluster), ("head", cluster["headGroupSpec"])]
    for kind, part in [*parts, *(("group", group) for group in groups)]:
        assert REQUIRED[kind] <= part.keys() <= REQUIRED[kind] | ALLOWED[kind], kind
    assert cluster["authOptions"] == {"mode": "token"}
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups)
    for group in (cluster["headGroupSpec"], *groups):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", container["name"])
        # Ray counts the limits; a pod whose requests are lower may be put where it does not get them.
        assert container["resources"]["limits"] == container["resources"]["requests"]
        quantities = container["resources"]["limits"].values()
        assert all(re.fullmatch(r"\d+(Mi|Gi)?", quantity) for quantity in quantities)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_manifest_starts_nodes_as_the_shell_does(job: dict[str, Any]) -> None:
    """All values are strings, custom resources are JSON in quotes for a shell, and versions agree."""
    cluster = job["spec"]["rayClusterSpec"]
    head, (data,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    quoted = data["rayStartParams"]["resources"]
    resources = json.loads(json.loads(quoted))
    assert f"--resources='{json.dumps(resources)}'" in PAGE
    assert f"--num-cpus={data['template']['spec']['containers'][0]['resources']['limits']['cpu']}" in PAGE
    images = {group["template"]["spec"]["containers"][0]["image"] for group in (head, data)}
    assert len(images) == 1
    assert cluster["rayVersion"] in images.pop()
    assert f"`rayproject/ray:{cluster['rayVersion']}-py311`" in PAGE


@pytest.mark.slow
def test_program_of_the_page_trains_on_a_cluster_that_it_starts(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first function, with shards of the names that it uses; its lambda travels."""
    pytest.importorskip("ray")
    place = Workplace("cluster", tmp_path)
    train = place["train"]
    place.module.SHARDS = str(shards / "train-{000000..000007}.tar")  # type: ignore[attr-defined]
    # Ray's sockets have paths, of at most 107 bytes, in the temporary folder.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        assert train(torchdata_wds.RayPool(), 2) == sum(SIZES)
