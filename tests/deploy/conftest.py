import pytest

from tests.deploy.manifests import Helm, helm_binary


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = helm_binary()
    if binary is None:
        pytest.skip("no helm for this machine: the packaged one is for Linux on x86-64, and none is on the PATH")
    return Helm(binary)


EVERYTHING = {
    "mode": "deployment",
    "imagePullSecrets": ["registry-key"],
    "serviceAccount": {"create": False, "name": "trainer"},
    "scheduler": {
        "image": {"repository": "registry.example/hydra-cp-scheduler", "tag": "0.1.0-2", "pullPolicy": "Always"},
        "settings": {"baseline_max_sequences": 10_000_000},
        "shutdownGraceSeconds": 45,
        "history": {"existingClaim": "plans"},
        "resources": {"requests": {"cpu": 0.5}, "limits": {"cpu": "2", "memory": "4Gi"}},
        "podLabels": {"team": "llm"},
        "podAnnotations": {"example.com/scrape": "true"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "cpu-only", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["cpu"]}]}
        ]}}},
        "priorityClassName": "high",
    },
    "trainer": {
        "enabled": True,
        "nodes": 16,
        "processesPerNode": 8,
        "args": ["--iterations", "7"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "output": {"existingClaim": "runs"},
        "maxRestarts": 0,
        "shutdownGraceSeconds": 90,
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "labels": {"kueue.x-k8s.io/queue-name": "llm"},
        "podLabels": {"team": "llm"},
        "podAnnotations": {"example.com/scrape": "true"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "rack", "labelSelector": {"matchLabels": {"team": "llm"}}}
        ]}},
        "priorityClassName": "high",
    },
    "podDisruptionBudget": {"enabled": True},
}  # fmt: skip
"""Every value set to something else than its default."""

VALUE_SETS = {
    "defaults": {},
    "sidecar": {"mode": "sidecar"},
    "sidecar, one pod": {"mode": "sidecar", "trainer": {"nodes": 1, "processesPerNode": 4}},
    "shared scheduler and trainer": {"trainer": {"enabled": True}},
    "everything": EVERYTHING,
    "everything, sidecar": {**EVERYTHING, "mode": "sidecar"},
    "no policies, default account": {"networkPolicy": {"enabled": False}, "serviceAccount": {"create": False}},
}


@pytest.fixture(params=VALUE_SETS.values(), ids=VALUE_SETS.keys())
def values(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param
