from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hydracp.v1 import planner_pb2_grpc

from tests.support.planner_client import planner
from tests.support.scheduler import Scheduler, scheduler

_NAMES = count()


@pytest.fixture(scope="session")
def service() -> Iterator[Scheduler]:
    """One real scheduler for all tests of the transport; a proxy in its way would be noticed."""
    with scheduler(environment={"HYDRACP_MAX_WAIT_S": "30", "HYDRACP_PLANNER_WORKERS": "1"}) as running:
        yield running


@pytest.fixture
def stub(service: Scheduler) -> Iterator[planner_pb2_grpc.PlannerServiceStub]:
    with planner(service.grpc) as made:
        yield made


@pytest.fixture
def job() -> str:
    """A name that no other test uses."""
    return f"job-{next(_NAMES)}"


@pytest.fixture(scope="session")
def limited() -> Iterator[Scheduler]:
    """A scheduler with the smallest message limit that may be set."""
    with scheduler(environment={"HYDRACP_MAX_MESSAGE_BYTES": str(1 << 16), "HYDRACP_PLANNER_WORKERS": "1"}) as running:
        yield running
