"""The routes of /api/v1: read-only, paged, and off the planning path.

What costs time in proportion to a plan (matrices, pages of sequences, the timeline) is built in a thread, so
that long polls and probes are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from scheduler_service.api import views
from scheduler_service.api.errors import DOCUMENTED
from scheduler_service.api.schemas import (
    Event,
    EventPage,
    IterationPage,
    IterationSummary,
    Job,
    LoadMap,
    PlanPage,
    ServiceStatistics,
    Timeline,
)
from scheduler_service.app import Stream
from scheduler_service.app.scheduler import Scheduler

router = APIRouter(responses=DOCUMENTED)

MAX_NUMBER = 2**53 - 1
"""Largest integer that JSON's readers keep exactly."""


def _scheduler(request: Request) -> Scheduler:
    scheduler: Scheduler = request.app.state.scheduler
    return scheduler


Service = Annotated[Scheduler, Depends(_scheduler)]
JobName = Annotated[str, Path(max_length=128)]
Iteration = Annotated[int, Path(ge=0, le=MAX_NUMBER)]
OfStream = Annotated[Stream, Query(description="Which count of iterations is meant")]
Limit = Annotated[int, Query(ge=1, le=500)]
Before = Annotated[int | None, Query(ge=0, le=MAX_NUMBER, description="Only what lies before this number")]


async def _in_thread(build: Callable[..., BaseModel], *arguments: Any) -> Response:
    """Build and write an answer away from the loop. The model has been validated when it was built."""
    text = await asyncio.to_thread(lambda: build(*arguments).model_dump_json())
    return Response(text, media_type="application/json")


@router.get("/jobs")
async def list_jobs(service: Service) -> list[Job]:
    """Jobs that are registered or remembered, the most recently active first."""
    return [views.job(record) for record in await service.jobs()]


@router.get("/jobs/{job}")
async def get_job(service: Service, job: JobName) -> Job:
    """One job."""
    return views.job(await service.job(job))


@router.get("/jobs/{job}/iterations")
async def list_iterations(
    service: Service, job: JobName, stream: OfStream = Stream.TRAIN, limit: Limit = 50, before: Before = None
) -> IterationPage:
    """Iterations of one stream, newest first."""
    records = await service.iterations(job, stream, limit + 1, before)
    more = len(records) > limit
    shown = [views.summary(record) for record in records[:limit]]
    return IterationPage(iterations=shown, next_before=shown[-1].iteration if more else None)


@router.get("/jobs/{job}/iterations/{iteration}")
async def get_iteration(
    service: Service, job: JobName, iteration: Iteration, stream: OfStream = Stream.TRAIN
) -> IterationSummary:
    """One iteration in figures."""
    return views.summary(await service.iteration(job, stream, iteration))


@router.get("/jobs/{job}/iterations/{iteration}/load", response_model=LoadMap)
async def get_load(service: Service, job: JobName, iteration: Iteration, stream: OfStream = Stream.TRAIN) -> Response:
    """Attention load, tokens and groups of every rank in every microbatch."""
    return await _in_thread(views.load_map, await service.planned(job, stream, iteration))


@router.get("/jobs/{job}/iterations/{iteration}/timeline", response_model=Timeline)
async def get_timeline(
    service: Service,
    job: JobName,
    iteration: Iteration,
    stream: OfStream = Stream.TRAIN,
    pipeline: Annotated[int | None, Query(ge=0, description="EP group; the slowest if not given")] = None,
) -> Response:
    """The predicted 1F1B schedule of one pipeline."""
    return await _in_thread(views.timeline, await service.planned(job, stream, iteration), pipeline)


@router.get("/jobs/{job}/iterations/{iteration}/plan", response_model=PlanPage)
async def get_plan(
    service: Service,
    job: JobName,
    iteration: Iteration,
    stream: OfStream = Stream.TRAIN,
    offset: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0,
    limit: Limit = 50,
    sort: Annotated[views.Order, Query(description="`length`: longest first")] = views.Order.LENGTH,
    microbatch: Annotated[int | None, Query(ge=0, description="Only this microbatch")] = None,
    rank: Annotated[int | None, Query(ge=0, description="Only sequences that run on this pool rank")] = None,
) -> Response:
    """Sequences of the plan, and why each is where it is."""
    planned = await service.planned(job, stream, iteration)
    selection = views.Selection(offset=offset, limit=limit, order=sort, microbatch=microbatch, rank=rank)
    return await _in_thread(views.plan_page, iteration, planned, selection)


@router.get("/statistics")
async def get_statistics(service: Service) -> ServiceStatistics:
    """The service as a whole."""
    return views.statistics(service.statistics())


@router.get("/events")
async def list_events(service: Service, limit: Limit = 100, before: Before = None) -> EventPage:
    """Events, newest first."""
    return EventPage(events=[views.event(record) for record in await service.recent_events(limit, before)])


@router.get("/events/stream", response_class=EventSourceResponse)
async def stream_events(
    service: Service, last_event_id: Annotated[int | None, Header()] = None
) -> AsyncIterable[Event]:
    """Events as they happen (server-sent). A client that reconnects gets those it missed, as far as they are kept."""
    async for record in service.events.listen(last_event_id):
        # FastAPI documents the event by the return type, and wants it wrapped so that its id can be told.
        yield ServerSentEvent(data=views.event(record), id=str(record.id))  # type: ignore[misc]
