"""The tables of the plan history. Column names are those of the records in `scheduler_service.app.records`."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 1
"""Changes with every change of a table; a database of another version is left alone."""

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

jobs = Table(
    "jobs",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("config", JSON, nullable=False),
    Column("registered_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("newest_planned", BigInteger),
    Column("newest_executed", BigInteger),
    Column("fallbacks", Integer, nullable=False),
    Column("verdict", Text, nullable=False),
)

iterations = Table(
    "iterations",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("job", String(128), nullable=False),
    Column("stream", String(16), nullable=False),
    Column("iteration", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("policy", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("failure", JSON),
    Column("digest", String(32)),
    Column("missing_shards", Integer, nullable=False),
    Column("sequences", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("longest_tokens", Integer, nullable=False),
    Column("microbatches", Integer, nullable=False),
    Column("target", Float, nullable=False),
    Column("cap", Integer, nullable=False),
    Column("predicted_s", Float, nullable=False),
    Column("lower_bound_s", Float, nullable=False),
    Column("baselines_s", JSON, nullable=False),
    Column("plan_s", Float, nullable=False),
    Column("lead_s", Float),
    Column("pp_bubble", Float, nullable=False),
    Column("dp_bubble", Float, nullable=False),
    Column("load_max", Float, nullable=False),
    Column("load_mean", Float, nullable=False),
    Column("padding", Float, nullable=False),
    Column("idle_share", Float, nullable=False),
    Column("degree_share", JSON, nullable=False),
    Column("degree_sequences", JSON, nullable=False),
    Column("measured_s", Float),
    Column("plan_wait_s", Float),
    Column("origin", String(16)),
    Column("fallback_reason", Text),
    Column("loss", Float),
    UniqueConstraint("job", "stream", "iteration"),
)

MEASURED = ("state", "measured_s", "plan_wait_s", "origin", "fallback_reason", "loss")
"""Columns that are known without the plan: agents may report an iteration that ran while the service was away."""

plans = Table(
    "plans",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("job", String(128), nullable=False),
    Column("stream", String(16), nullable=False),
    Column("iteration", BigInteger, nullable=False),
    Column("header", JSON, nullable=False),
    Column("shard_sizes", JSON, nullable=False),
    Column("content", LargeBinary, nullable=False),
    UniqueConstraint("job", "stream", "iteration"),
)

events = Table(
    "events",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("job", String(128)),
    Column("iteration", BigInteger),
    Column("stream", String(16)),
)
