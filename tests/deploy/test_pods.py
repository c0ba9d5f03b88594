"""What the pods are allowed, how they are probed and how they end."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

from tests.deploy.manifests import (
    Helm,
    containers,
    environment,
    job_templates,
    of_kind,
    pods,
    schedulers,
    trainers,
)

SIDECAR = {"mode": "sidecar"}


def test_pods_meet_the_restricted_security_standard(helm: Helm, values):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    for pod in pods(helm.render(values)).values():
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"emptyDir", "persistentVolumeClaim"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert not any("hostPort" in port for port in container["ports"])


def test_pods_hold_no_token_and_no_service_link_variables(helm: Helm, values):
    manifests = helm.render(values, release="hydracp")  # whose links would be called HYDRACP_…_PORT
    for pod in pods(manifests).values():
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False
    assert all(account["automountServiceAccountToken"] is False for account in of_kind(manifests, "ServiceAccount"))


def test_every_path_that_settings_write_to_is_a_writable_mount(helm: Helm, values):
    for pod in pods(helm.render(values)).values():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in containers(pod):
            mounts = container["volumeMounts"]
            assert {mount["name"] for mount in mounts} <= volumes
            assert not any(mount.get("readOnly") for mount in mounts)
            writable = {PurePosixPath(mount["mountPath"]) for mount in mounts}
            written = {PurePosixPath("/tmp"), *paths(environment(container).values()), *paths(container["args"])}
            for path in written:
                assert writable & {path, *path.parents}, (
                    f"{container['name']} writes {path}, on a read-only file system"
                )


def paths(settings: Iterable[str]) -> set[PurePosixPath]:
    """Absolute paths in settings: plain, as the path of a SQLite URL, or after an option's "="."""
    values = (re.sub(r"^(sqlite:///|--[a-z-]+=)", "", setting) for setting in settings)
    return {PurePosixPath(value) for value in values if value.startswith("/")}


def test_probes_ask_grpc_health_and_are_patient(helm: Helm, values):
    for _, scheduler in schedulers(helm.render(values)):
        grpc_port = {port["name"]: port["containerPort"] for port in scheduler["ports"]}["grpc"]
        assert environment(scheduler)["HYDRACP_GRPC"].endswith(f":{grpc_port}")
        asked = {}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = scheduler[name]
            assert probe["timeoutSeconds"] >= 5
            assert probe["timeoutSeconds"] <= probe["periodSeconds"]
            assert probe["grpc"]["port"] == grpc_port
            asked[name] = probe["grpc"]["service"]
        assert asked == {
            "startupProbe": "hydracp.v1.PlannerService",
            "readinessProbe": "hydracp.v1.PlannerService",
            "livenessProbe": "",  # a planner that is still compiling is alive
        }
        start_up = scheduler["startupProbe"]
        assert start_up["periodSeconds"] * start_up["failureThreshold"] >= 120, "time to compile"


def test_pods_get_longer_to_stop_than_the_scheduler_takes(helm: Helm, values):
    for pod, scheduler in schedulers(helm.render(values)):
        grace_s = float(environment(scheduler)["HYDRACP_GRACE_S"])
        sidecar = scheduler not in pod["spec"]["containers"]
        # The other containers of a pod are stopped before its sidecars, out of the same time.
        others_s = values.get("trainer", {}).get("shutdownGraceSeconds", 30) if sidecar else 0
        assert pod["spec"]["terminationGracePeriodSeconds"] > grace_s + others_s


def test_a_scheduler_sidecar_is_native_and_warm_before_the_trainer_starts(helm: Helm):
    """A classic sidecar would keep the Job running for ever."""
    leader = pods(helm.render(SIDECAR))["leader"]["spec"]
    (sidecar,) = leader["initContainers"]
    assert sidecar["name"] == "scheduler"
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["grpc"]["service"] == "hydracp.v1.PlannerService"
    assert [container["name"] for container in leader["containers"]] == ["trainer"]


def test_only_rank_0_carries_the_scheduler(helm: Helm):
    found = pods(helm.render(SIDECAR))
    assert "initContainers" not in found["workers"]["spec"]
    shared = pods(helm.render({"trainer": {"enabled": True}}))
    assert not any("initContainers" in shared[job]["spec"] for job in ("leader", "workers"))


def test_two_schedulers_never_share_a_job(helm: Helm, values):
    """State is in memory: a rolling update would split a job's shards between two processes."""
    for deployment in of_kind(helm.render(values), "Deployment"):
        assert deployment["spec"]["replicas"] == 1
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_service_and_policies_select_the_pods_they_are_for(helm: Helm, values):
    manifests = helm.render(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}

    def selected(selector):
        return {name for name, has in labels.items() if selector.items() <= has.items()}

    for service in of_kind(manifests, "Service"):
        assert selected(service["spec"]["selector"]) == {"Deployment"}
        named = {port["name"] for _, c in schedulers(manifests) for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"]) == {"Deployment"}
    fenced = [selected(policy["spec"]["podSelector"]["matchLabels"]) for policy in of_kind(manifests, "NetworkPolicy")]
    if values.get("networkPolicy", {}).get("enabled", True):
        assert set().union(*fenced) == labels.keys()
        assert sum(map(len, fenced)) == len(labels)


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_jobset_starts_as_many_pods_as_nodes_and_counts_no_retry(helm: Helm, nodes: int):
    jobs = job_templates(helm.render({"mode": "sidecar", "trainer": {"nodes": nodes}}))
    assert sum(job["spec"]["parallelism"] for job in jobs.values()) == nodes
    for job in jobs.values():
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["completions"] == job["spec"]["parallelism"]
        assert job["spec"]["backoffLimit"] == 0
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("mode", ["sidecar", "deployment"])
def test_all_ranks_meet_at_the_leader_and_ask_the_one_scheduler(helm: Helm, mode: str):
    manifests = helm.render({"mode": mode, "trainer": {"enabled": True, "nodes": 3}})
    (jobset,) = of_kind(manifests, "JobSet")
    name = jobset["metadata"]["name"]
    # https://jobset.sigs.k8s.io: <jobset>-<replicated job>-<job index>-<pod index>.<subdomain, by default the jobset>
    leader = f"{name}-leader-0-0.{name}"
    scheduler = leader if mode == "sidecar" else of_kind(manifests, "Service")[0]["metadata"]["name"]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    for trainer in trainers(manifests).values():
        assert f"--master-addr={leader}" in trainer["args"]
        assert f"--scheduler={scheduler}:7421" in trainer["args"]
