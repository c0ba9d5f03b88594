"""Telemetry never holds up a step: it waits, is dropped oldest first, and is counted."""

from __future__ import annotations

import socket
import threading
import time

from scheduler_service.domain import Pool
from scheduler_service.planning import warm_up
from worker_agent.client import AgentConfig, PlanAgent, PlannerClient, Timing
from worker_agent.client.session import Session
from worker_agent.client.telemetry import Reporter

POOL = Pool(ranks=1, token_budget=64)


def timing(iteration: int) -> Timing:
    return Timing(iteration=iteration, rank=0, iteration_s=1.0)


def test_a_service_that_takes_nothing_costs_the_oldest_timings_and_no_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, answers nothing
        config = AgentConfig(
            target=f"127.0.0.1:{silent.getsockname()[1]}", job="job", pool=POOL, call_timeout_s=0.2, report_queue=10
        )
        client = PlannerClient(config.target)
        reporter = Reporter(Session(client, config), config.report_queue)
        for iteration in range(100_000):
            reporter.put(timing(iteration))
        assert 100_000 - 256 - 10 <= reporter.dropped <= 100_000 - 10
        reporter.close(timeout_s=0.3)
        client.close()
        assert reporter.sent == 0
        assert reporter.dropped == 100_000


def test_closing_an_agent_whose_service_is_silent_ends_its_threads() -> None:
    warm_up()  # no closing interrupts a compiler
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = AgentConfig(target=f"127.0.0.1:{silent.getsockname()[1]}", job="job", pool=POOL, call_timeout_s=1.0)
        agent = PlanAgent(config, 0)
        agent.submit(0, [5])  # its fetch is under way when the agent closes
        agent.report(timing(0))
        time.sleep(0.2)
        agent.close(timeout_s=0.2)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hydracp")]
    assert names == []
