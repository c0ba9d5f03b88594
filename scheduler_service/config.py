"""Settings of `hydra-cp serve`: flags over environment (HYDRACP_*) over a YAML file over defaults.

No setting is called like one of the variables that Kubernetes injects for a Service named hydracp or
hydracp-grpc (HYDRACP_PORT=tcp://…, HYDRACP_GRPC_PORT, HYDRACP_GRPC_SERVICE_HOST): those are not ours to read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from scheduler_service.domain import InvalidInputError, Reason


def _default_workers() -> int:
    """Half the cores, at most 4: the other half plans baselines and answers."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 2))


class Settings(BaseSettings):
    """What can be set. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="HYDRACP_", extra="forbid", frozen=True)

    grpc: str = Field("127.0.0.1:7421", description="gRPC address, HOST:PORT; port 0 takes a free one")
    http: str = Field("127.0.0.1:7422", description="REST and dashboard, HOST:PORT; port 0 takes a free one")
    store: str = Field("sqlite:///hydracp.sqlite3", description="plan history, sqlite:///FILE, or 'off'")
    ready_file: Path | None = Field(None, description="write the bound addresses here as JSON, once plans can be had")
    planner_workers: int = Field(default_factory=_default_workers, ge=1, le=64, description="processes that plan")
    window: int = Field(8, ge=1, le=1024, description="iterations before and after the newest that stay in memory")
    max_wait_s: float = Field(60.0, gt=0, description="longest time that a fetch may park")
    job_expiry_s: float = Field(3600.0, gt=0, description="a job without a call for longer is forgotten")
    max_message_bytes: int = Field(64 << 20, ge=1 << 16, le=1 << 30, description="largest gRPC message, both ways")
    baseline_policies: Annotated[tuple[str, ...], NoDecode] = Field(
        ("static_cp", "megatron"), description="policies whose predicted time is shown beside each plan"
    )
    baseline_max_sequences: int = Field(4096, ge=0, description="batches with more sequences get no baselines")
    history_iterations: int = Field(10_000, ge=1, description="iterations kept in the store")
    history_plans: int = Field(1_000, ge=1, description="whole plans kept in the store")
    history_events: int = Field(10_000, ge=1, description="events kept in the store")
    grace_s: float = Field(10.0, gt=0, description="longest time from SIGTERM to the end")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else JSON")

    @field_validator("grpc", "http")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{value!r} is no HOST:PORT, such as 127.0.0.1:7421")
        return value

    @field_validator("baseline_policies", mode="before")
    @classmethod
    def _comma_separated(cls, value: Any) -> Any:
        """HYDRACP_BASELINE_POLICIES=static_cp,megatron"""
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the YAML file."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


def load(file: Path | None = None, **flags: Any) -> Settings:
    """The settings; a flag that is None was not given. Raises `InvalidInputError` that names the setting."""

    class FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=file)

    if file is not None and not file.is_file():
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"configuration file {file} is not there")
    try:
        return FromFile(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"configuration: {wrong}") from error
