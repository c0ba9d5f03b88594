"""Where settings come from, and what must not confuse them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import load
from scheduler_service.domain import InvalidInputError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "hydra-cp.yaml"
    path.write_text("grpc: 0.0.0.0:1\nhttp: 0.0.0.0:1\nwindow: 3\nbaseline_policies: [megatron]\n")
    return path


def test_flags_over_environment_over_file_over_defaults(file, monkeypatch):
    monkeypatch.setenv("HYDRACP_HTTP", "0.0.0.0:2")
    monkeypatch.setenv("HYDRACP_GRPC", "0.0.0.0:2")
    settings = load(file, grpc="0.0.0.0:3", http=None)
    assert (settings.grpc, settings.http, settings.window) == ("0.0.0.0:3", "0.0.0.0:2", 3)
    assert settings.baseline_policies == ("megatron",)
    assert settings.max_message_bytes == 64 << 20
    assert load().grpc == "0.0.0.0:2"


def test_without_anything_it_listens_on_loopback_only(monkeypatch):
    monkeypatch.delenv("HYDRACP_GRPC", raising=False)
    settings = load()
    assert (settings.grpc, settings.http) == ("127.0.0.1:7421", "127.0.0.1:7422")


def test_service_link_variables_are_not_settings(monkeypatch):
    """Kubernetes injects these for Services called hydracp, hydracp-scheduler, hydracp-grpc and hydracp-store."""
    for service in ("HYDRACP", "HYDRACP_SCHEDULER", "HYDRACP_GRPC", "HYDRACP_HTTP", "HYDRACP_STORE"):
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.7:7421")
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.7")
        monkeypatch.setenv(f"{service}_SERVICE_PORT", "7421")
        monkeypatch.setenv(f"{service}_PORT_7421_TCP", "tcp://10.0.0.7:7421")
        monkeypatch.setenv(f"{service}_PORT_7421_TCP_PROTO", "tcp")
    assert load().grpc == "127.0.0.1:7421"


def test_lists_may_be_separated_by_commas(monkeypatch):
    monkeypatch.setenv("HYDRACP_BASELINE_POLICIES", "static_cp,megatron")
    assert load().baseline_policies == ("static_cp", "megatron")
    monkeypatch.setenv("HYDRACP_BASELINE_POLICIES", "")
    assert load().baseline_policies == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("windw: 3", "windw"),
        ("window: 0", "window"),
        ("grpc: '7421'", "no HOST:PORT"),
        ("grpc: host:99999", "no HOST:PORT"),
        ("max_message_bytes: 10", "max_message_bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path, text, words):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        load(file)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(InvalidInputError, match=r"/nowhere/hydra-cp.yaml is not there"):
        load(Path("/nowhere/hydra-cp.yaml"))
