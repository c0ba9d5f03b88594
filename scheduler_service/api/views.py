"""From the service's records, and from plans, to the JSON of the REST API. Pure functions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler_service import planning
from scheduler_service.api.schemas import (
    CostModelModel,
    ErrorBody,
    Event,
    IterationSummary,
    Job,
    LoadMap,
    PlacedSequence,
    PlanPage,
    PoolModel,
    ServiceStatistics,
    Timeline,
    TimelineOp,
)
from scheduler_service.app import EventRecord, IterationRecord, JobRecord, PlannedBatch
from scheduler_service.app.records import ServiceFigures
from scheduler_service.domain import InvalidInputError, Reason
from scheduler_service.simulation import forecast, rank_loads


class Order(StrEnum):
    """How the sequences of a page are ordered; ids break ties."""

    LENGTH = "length"
    ID = "id"
    MICROBATCH = "microbatch"


@dataclass(frozen=True)
class Selection:
    """Which sequences of a plan a page shows."""

    offset: int
    limit: int
    order: Order
    microbatch: int | None = None
    rank: int | None = None


def job(record: JobRecord) -> Job:
    """A job as JSON."""
    config = record.config
    return Job(
        job=record.job,
        attempt=record.attempt,
        policy=config.policy,
        pool=PoolModel(**{**asdict(config.pool), "speeds": dict(config.pool.speeds)}),
        cost=CostModelModel(**asdict(config.cost)),
        loader_shards=config.loader_shards,
        registered_at=record.registered_at,
        last_seen_at=record.last_seen_at,
        newest_planned=record.newest_planned,
        newest_executed=record.newest_executed,
        fallbacks=record.fallbacks,
        verdict=record.verdict,
    )


def summary(record: IterationRecord) -> IterationSummary:
    """An iteration as JSON."""
    values = {name: getattr(record, name) for name in IterationSummary.model_fields if hasattr(record, name)}
    if record.failure is not None:
        values["failure"] = ErrorBody(**asdict(record.failure))
    return IterationSummary(**values, imbalance=record.load_max / record.load_mean if record.load_mean else 0.0)


def event(record: EventRecord) -> Event:
    """An event as JSON."""
    return Event(**asdict(record))


def statistics(figures: ServiceFigures) -> ServiceStatistics:
    """The service as JSON."""
    return ServiceStatistics(**asdict(figures))


def load_map(planned: PlannedBatch) -> LoadMap:
    """The rank × microbatch matrices of a plan."""
    header = planned.plan.header
    loads = rank_loads(planned.plan, planned.batch)
    return LoadMap.model_construct(  # rows come from typed arrays: validating 40,000 numbers again buys nothing
        ranks=header.pool.ranks,
        microbatches=header.microbatches,
        load=loads.load.tolist(),
        tokens=loads.tokens.tolist(),
        degree=loads.degree.tolist(),
        start=loads.start.tolist(),
    )


def timeline(planned: PlannedBatch, pipeline: int | None) -> Timeline:
    """The predicted schedule of `pipeline`, or of the one that ends last."""
    replay = forecast(planned.plan, planned.batch).replay
    pipelines, stages = replay.stage_end.shape
    if pipeline is None:
        pipeline = int(replay.span.argmax())
    if pipeline >= pipelines:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"pipeline {pipeline} is not one of the plan's {pipelines} (one per EP group)"
        )
    done = replay.operations(pipeline)
    columns = (done.stage, done.microbatch, done.backward, done.start_s, done.end_s)
    operations = [
        TimelineOp(stage=stage, microbatch=microbatch, kind="B" if backward else "F", start_s=begin, end_s=end)
        for stage, microbatch, backward, begin, end in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return Timeline(
        pipeline=pipeline,
        pipelines=pipelines,
        stages=stages,
        span_s=float(replay.span[pipeline]),
        pp_bubble=float(replay.pp_bubble[pipeline]),
        operations=operations,
    )


def plan_page(iteration: int, planned: PlannedBatch, selection: Selection) -> PlanPage:
    """The selected sequences of a plan, each with the reason for its place."""
    plan, batch = planned.plan, planned.batch
    ids = _selected(planned, selection)
    shard_end = np.cumsum(planned.shard_sizes)
    shown = ids[selection.offset : selection.offset + selection.limit]
    return PlanPage(
        iteration=iteration,
        digest=plan.digest,
        total=len(ids),
        offset=selection.offset,
        sequences=[
            PlacedSequence(
                id=sequence,
                length=int(batch.lengths[sequence]),
                shard=int(np.searchsorted(shard_end, sequence, side="right")),
                microbatch=int(plan.microbatch[sequence]),
                start=int(plan.start[sequence]),
                degree=int(plan.degree[sequence]),
                load=float(batch.lengths[sequence]) ** 2 / int(plan.degree[sequence]),
                memory_degree=planning.memory_degree(int(batch.lengths[sequence]), plan.header.pool) or 0,
                why=planning.explain(plan, batch, sequence),
            )
            for sequence in shown.tolist()
        ],
    )


def _selected(planned: PlannedBatch, selection: Selection) -> npt.NDArray[np.int64]:
    plan = planned.plan
    keep = np.ones(len(plan), bool)
    if selection.microbatch is not None:
        keep &= plan.microbatch == selection.microbatch
    if selection.rank is not None:
        keep &= (plan.start <= selection.rank) & (selection.rank < plan.start + plan.degree)
    ids = np.flatnonzero(keep)
    if selection.order is Order.LENGTH:
        ids = ids[np.argsort(-planned.batch.lengths[ids], kind="stable")]
    elif selection.order is Order.MICROBATCH:
        ids = ids[np.lexsort((plan.start[ids], plan.microbatch[ids]))]
    return ids
