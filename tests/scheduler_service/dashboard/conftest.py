"""A scheduler with jobs that have run, and pages of a real browser that fail on errors and on foreign requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.scheduler_service.dashboard.job import TrainingJob, training_job
from tests.support.scheduler import scheduler

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip

expect.set_options(timeout=30_000)

SEQUENCES = 600  # more than one page of the largest size
ITERATIONS = 5


@dataclass(frozen=True)
class Site:
    """A running scheduler: its pages, its REST API, and the job `moe` that has run `ITERATIONS` iterations."""

    url: str
    grpc: str
    job: TrainingJob

    def get(self, path: str, **parameters: Any) -> Any:
        """JSON from the REST API."""
        answer = httpx.get(f"{self.url}api/v1/{path}", params=parameters, timeout=30, trust_env=False)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with scheduler() as process, training_job(process.grpc, "moe", ranks=64, token_budget=8192, stages=4, ep=8) as job:
        job.run(0, ITERATIONS - 1, SEQUENCES)
        yield Site(f"http://{process.http}/", process.grpc, job)


# Of the module, not of the session: while it lives, Playwright's loop keeps asyncio tests from running theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        message = f"{CHROMIUM} is missing: `make browser` installs it where that is allowed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


Opener = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[Opener]:
    """Opens `#…` addresses. At the end: no error on any console, no request to another origin."""
    contexts: list[BrowserContext] = []
    errors: list[str] = []
    foreign: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith((site.url, "blob:" + site.url, "data:")):
            foreign.append(request.url)

    def open_page(fragment: str = "", *, width: int = 1440, height: int = 900, dark: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", on_console)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", on_request)
        page.goto(site.url + fragment)
        return page

    site.job.fetch(ITERATIONS - 1)  # a job whose agents are silent for two minutes counts as silent
    yield open_page
    for context in contexts:
        context.close()
    assert not errors
    assert not foreign
