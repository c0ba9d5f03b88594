"""Plain HTTP to a running scheduler, and waiting for what it will say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.scheduler import Scheduler

TIMEOUT_S = 60.0


def request(service: Scheduler, path: str, **more: Any) -> httpx.Response:
    """GET; environment proxies are not asked."""
    with httpx.Client(base_url=f"http://{service.http}", timeout=TIMEOUT_S, trust_env=False) as client:
        return client.get(path, **more)


def get(service: Scheduler, path: str, **more: Any) -> Any:
    """The JSON of a successful GET."""
    answer = request(service, path, **more)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return json.loads(answer.text)


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for `condition`, or fail."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.02)
