"""The chart as a whole: helm and the published schemas take what it renders, and wrong values are refused in words."""

import copy
import json
import tomllib

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tests.deploy.manifests import CHART, NAMESPACE, ROOT, Helm, containers, job_templates, of_kind, pods

OLDEST, NEWEST = "1.29", kubernetes_validate.latest_version()


def kinds(manifests):
    return sorted(manifest["kind"] for manifest in manifests)


def test_lint_finds_nothing(helm: Helm, values):
    done = helm.run("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_install_gives_the_shared_scheduler_alone(helm: Helm):
    assert kinds(helm.render()) == ["Deployment", "NetworkPolicy", "Service", "ServiceAccount"]


def test_sidecar_mode_gives_the_training_job_alone(helm: Helm):
    assert kinds(helm.render({"mode": "sidecar"})) == ["JobSet", "NetworkPolicy", "ServiceAccount"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_valid_without_unknown_fields(helm: Helm, values, version: str):
    for manifest in helm.render(values, options=("--kube-version", version)):
        if manifest["kind"] != "JobSet":
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_jobs_of_the_jobset_are_valid_without_unknown_fields(helm: Helm, values, version: str):
    for name, template in job_templates(helm.render(values)).items():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **template}
        kubernetes_validate.validate(job, version, strict=True)


def test_jobset_survives_a_round_trip_through_the_published_models(helm: Helm, values):
    for jobset in of_kind(helm.render(values), "JobSet"):
        assert JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset)).to_dict() == jobset


def test_round_trip_does_find_unknown_fields(helm: Helm):
    (jobset,) = of_kind(helm.render({"mode": "sidecar"}), "JobSet")
    jobset["spec"]["network"]["hostNames"] = True
    assert JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset)).to_dict() != jobset


def test_names_fit_whatever_the_release_is_called(helm: Helm):
    longest = "a" * 53  # what helm allows
    manifests = helm.render({"mode": "sidecar"}, release=longest)
    assert all(len(manifest["metadata"]["name"]) <= 63 for manifest in manifests)
    (jobset,) = of_kind(manifests, "JobSet")
    for job in job_templates(manifests):
        assert len(f"{jobset['metadata']['name']}-{job}-0-4999-abcde") <= 63


def test_versions_are_those_of_the_package(helm: Helm):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    images = {c["image"] for pod in pods(helm.render({"mode": "sidecar"})).values() for c in containers(pod)}
    assert images == {f"hydra-cp-scheduler:{version}", f"hydra-cp-agent:{version}"}


def test_clusters_without_native_sidecars_are_refused(helm: Helm):
    assert "1.29" in helm.refusal({}, options=("--kube-version", "1.28"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": "cluster"}, ["/mode", "'deployment', 'sidecar'"]),
        ({"scheduler": {"replicas": 2}}, ["/scheduler", "'replicas' not allowed"]),
        ({"scheduler": {"shutdownGraceSeconds": 0}}, ["/scheduler/shutdownGraceSeconds", "got 0, want 1"]),
        ({"scheduler": {"shutdownGraceSeconds": "20s"}}, ["/scheduler/shutdownGraceSeconds", "want integer"]),
        ({"scheduler": {"history": {"sizeLimit": "much"}}}, ["/scheduler/history/sizeLimit", "'much'"]),
        ({"scheduler": {"settings": {"grpc": "0.0.0.0:1"}}}, ["scheduler.settings.grpc is set by the chart"]),
        ({"scheduler": {"settings": {"HYDRACP_X": 1}}}, ["HYDRACP_X", "lower case"]),
        ({"scheduler": {"resources": {"limit": {}}}}, ["/scheduler/resources", "'limit' not allowed"]),
        ({"trainer": {"nodes": 0}}, ["/trainer/nodes", "got 0, want 1"]),
        ({"trainer": {"args": "--iterations 3"}}, ["/trainer/args", "want array"]),
        ({"trainr": {}}, ["'trainr' not allowed"]),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, wrong, words: list[str]):
    refusal = helm.refusal(wrong)
    for word in words:
        assert word in refusal


def test_every_value_is_in_the_schema_and_has_a_default(helm: Helm):
    schema = json.loads((CHART / "values.schema.json").read_text())

    def named(node):
        """Names and sub-names of an object schema; None for what is no such object."""
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        if "properties" not in node:
            return None
        return {name: named(part) for name, part in node["properties"].items()}

    def compare(names, defaults, where):
        for name, parts in names.items():
            if where + name in {"global", "scheduler.resources", "trainer.resources"}:
                continue
            assert name in defaults, where + name
            if parts:
                compare(parts, defaults[name], f"{where}{name}.")

    compare(named(schema), yaml.safe_load((CHART / "values.yaml").read_text()), "")


def test_notes_tell_where_agents_and_people_connect(helm: Helm):
    def notes(*settings: str) -> str:
        done = helm.run("install", "demo", str(CHART), "--namespace", NAMESPACE, "--dry-run=client", *settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("NOTES:")[1]

    shared = notes()
    assert "demo-hydra-cp.ml.svc:7421" in shared
    assert "port-forward service/demo-hydra-cp 7422" in shared
    sidecar = notes("--set", "mode=sidecar,trainer.nodes=3")
    assert "6 ranks in 3 pods" in sidecar
    assert "demo-hydra-cp-train-leader-0-0.demo-hydra-cp-train:7421" in sidecar
