"""Server-sent events: live, and again what was missed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx

from scheduler_service.api.schemas import Event
from tests.support.planner_client import planner, register
from tests.support.rest import TIMEOUT_S, get


def events(answer: httpx.Response) -> Iterator[tuple[str, Event]]:
    """(id, event) of every message of the stream."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line == "":
            if "data" in fields:
                yield fields["id"], Event.model_validate(json.loads(fields["data"]))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def stream(service, **headers: str):  # type: ignore[no-untyped-def]
    return httpx.stream(
        "GET",
        f"http://{service.http}/api/v1/events/stream",
        headers=headers,
        timeout=TIMEOUT_S,
        trust_env=False,
    )


def test_events_arrive_as_they_happen(service):
    with planner(service.grpc) as stub, stream(service) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        register(stub, "streamed")
        identity, event = next(one for one in events(answer) if one[1].job == "streamed")
    assert identity == str(event.id)
    assert event.kind == "job_registered"
    assert "4 ranks × 4,096 tokens" in event.message


def test_a_client_that_comes_back_gets_what_it_missed(service):
    with planner(service.grpc) as stub:
        register(stub, "before")
        last = get(service, "/api/v1/events", params={"limit": 1})["events"][0]["id"]
        register(stub, "missed")
        with stream(service, **{"Last-Event-ID": str(last)}) as answer:
            assert next(events(answer))[1].job == "missed"
