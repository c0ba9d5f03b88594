"""The environment of the rendered schedulers, read by the service's own settings."""

import os

import pytest
import yaml

from scheduler_service.config import Settings, load
from tests.deploy.manifests import CHART, Helm, containers, environment, of_kind, pods, schedulers

OURS = "HYDRACP_"


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)


def test_every_variable_of_ours_is_a_setting(helm: Helm, values):
    for pod in pods(helm.render(values)).values():
        for container in containers(pod):
            ours = {name for name in environment(container) if name.startswith(OURS)}
            assert {name.removeprefix(OURS).lower() for name in ours} <= Settings.model_fields.keys()
            assert container["name"] == "scheduler" or not ours, "the trainer is set by arguments alone"


def test_the_service_reads_the_values_as_they_were_given(helm: Helm, monkeypatch: pytest.MonkeyPatch):
    given = {
        "baseline_max_sequences": 10_000_000,  # as a float it would be written 1e+07
        "baseline_policies": "static_cp",
        "max_wait_s": 2.5,
        "log_format": "json",
    }
    manifests = helm.render({"scheduler": {"settings": given, "shutdownGraceSeconds": 45}})
    for _, scheduler in schedulers(manifests):
        for name, value in environment(scheduler).items():
            monkeypatch.setenv(name, value)
    settings = load()
    assert settings.baseline_max_sequences == 10_000_000
    assert settings.baseline_policies == ("static_cp",)
    assert (settings.max_wait_s, settings.log_format, settings.grace_s) == (2.5, "json", 45)
    assert (settings.grpc, settings.http) == ("0.0.0.0:7421", "0.0.0.0:7422")
    assert settings.store == "sqlite:////var/lib/hydra-cp/history.sqlite3"


@pytest.mark.parametrize("name", ["grpc", "http", "store", "grace_s"])
def test_settings_of_the_chart_cannot_be_set_twice(helm: Helm, name: str):
    assert name in Settings.model_fields
    assert f"scheduler.settings.{name} is set by the chart" in helm.refusal({"scheduler": {"settings": {name: "x"}}})


def test_variables_that_kubernetes_injects_for_our_service_are_no_settings(helm: Helm, monkeypatch: pytest.MonkeyPatch):
    """Pods of other owners get them, whatever enableServiceLinks says in ours."""
    (service,) = of_kind(helm.render({"fullnameOverride": "hydracp"}), "Service")
    assert service["metadata"]["name"] == "hydracp"
    without = load().model_dump()
    for name, value in service_links(service).items():
        assert name.startswith(OURS)
        monkeypatch.setenv(name, value)
    assert load().model_dump() == without


def service_links(service: dict) -> dict[str, str]:
    """https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables"""
    prefix, address = service["metadata"]["name"].upper().replace("-", "_"), "10.0.0.11"
    ports = service["spec"]["ports"]
    links = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0]["port"])}
    links[f"{prefix}_PORT"] = f"tcp://{address}:{ports[0]['port']}"
    for port in ports:
        number, stem = port["port"], f"{prefix}_PORT_{port['port']}_TCP"
        links[f"{prefix}_SERVICE_PORT_{port['name'].upper()}"] = str(number)
        links |= {stem: f"tcp://{address}:{number}", f"{stem}_PROTO": "tcp"}
        links |= {f"{stem}_PORT": str(number), f"{stem}_ADDR": address}
    return links


def test_readme_names_the_defaults_of_the_chart():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    readme = (CHART.parents[1] / "README.md").read_text()
    assert f"| `mode` | `{values['mode']}` |" in readme
    assert f"| `scheduler.shutdownGraceSeconds` | {values['scheduler']['shutdownGraceSeconds']} |" in readme
