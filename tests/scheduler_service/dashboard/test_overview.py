"""The overview in a real browser, over a real scheduler."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.scheduler_service.dashboard.conftest import ITERATIONS, Opener, Site
from tests.scheduler_service.dashboard.job import training_job

OVERVIEW = "#/jobs/moe/overview"

DRAWN = """canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return colours.size;
}"""
"""Number of colours on a canvas; 0 on an empty one."""


def rows(page: Page) -> list[str]:
    """Numbers of the iterations in the table."""
    return page.locator("#iterations tbody th a").all_inner_texts()


def test_says_in_words_whether_the_planner_is_ahead(open_page: Opener) -> None:
    page = open_page(OVERVIEW)
    expect(page.get_by_role("heading", level=1)).to_have_text("The planner is ahead")
    # The first plan had no earlier iteration to be made behind, and is not judged.
    expect(page.locator(".verdict")).to_contain_text(f"no rank waited for any of the last {ITERATIONS - 1} plans")


def test_key_figures_are_those_of_the_service(open_page: Opener, site: Site) -> None:
    newest = site.get("jobs/moe/iterations")["iterations"]
    gains = sorted(it["baselines_s"]["megatron"] / it["predicted_s"] for it in newest)
    page = open_page(OVERVIEW)
    figure = page.locator(".figure", has_text="Gain over Megatron-style")
    expect(figure.locator(".value")).to_have_text(f"{gains[len(gains) // 2]:.2f}×")
    expect(page.locator(".figure", has_text="Fallbacks").locator(".value")).to_have_text("0")


def test_each_iteration_has_a_row_that_leads_to_its_page(open_page: Opener) -> None:
    page = open_page(OVERVIEW)
    expect(page.locator("#iterations tbody tr")).to_have_count(ITERATIONS)
    assert rows(page) == [str(n) for n in reversed(range(ITERATIONS))]
    page.locator("#iterations").get_by_role("link", name="2", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Iteration 2")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("The planner is ahead")


def test_every_chart_is_drawn_and_has_a_table(open_page: Opener) -> None:
    page = open_page(OVERVIEW)
    charts = page.locator(".charts .panel")
    expect(charts.locator("canvas")).to_have_count(6)
    for chart in charts.all():
        assert chart.locator("canvas").evaluate(DRAWN) > 10
        assert chart.get_by_role("img").get_attribute("aria-label")
        chart.get_by_role("button", name="Table").click()
        expect(chart.locator("tbody tr")).to_have_count(ITERATIONS)
        expect(chart.locator("canvas")).to_have_count(0)


def test_a_new_iteration_shows_without_a_reload(open_page: Opener, site: Site) -> None:
    with training_job(site.grpc, "live", ranks=4, token_budget=4096) as job:
        job.run(0, 1, 20)
        page = open_page("#/jobs/live/overview")
        expect(page.locator(".live")).to_have_text("Live")
        expect(page.locator("#iterations tbody tr")).to_have_count(2)
        page.evaluate("window.sameDocument = true")
        job.run(2, 3, 20)
        expect(page.locator("#iterations tbody tr")).to_have_count(4)
        expect(page.locator("#iterations tbody tr").first).to_contain_text("executed")
        assert page.evaluate("window.sameDocument") is True


def test_without_an_event_stream_the_page_asks_by_itself_and_tries_to_connect_again(
    open_page: Opener, site: Site
) -> None:
    with training_job(site.grpc, "polled", ranks=4, token_budget=4096) as job:
        job.run(0, 0, 20)
        page = open_page()
        # An answer that is no event stream, so that the console stays without an error of the network.
        page.route("**/events/stream", lambda route: route.fulfill(status=204))
        page.goto(site.url + "?again#/jobs/polled/overview")
        expect(page.locator(".live")).to_have_text("Reconnecting")
        job.run(1, 1, 20)
        expect(page.locator("#iterations tbody tr")).to_have_count(2)
        page.unroute("**/events/stream")
        expect(page.locator(".live")).to_have_text("Live")


def test_a_fallback_is_counted_and_explained(open_page: Opener, site: Site) -> None:
    with training_job(site.grpc, "lonely", ranks=4, token_budget=4096) as job:
        job.submit(0, 20)
        job.report(0, job.fetch(0), fallback_reason="no plan within 2 s")
        page = open_page("#/jobs/lonely/overview")
        expect(page.get_by_role("heading", level=1)).to_have_text("The ranks fall back to plans of their own")
        expect(page.locator(".verdict")).to_contain_text("no plan within 2 s")
        expect(page.locator(".figure", has_text="Fallbacks").locator(".value")).to_have_text("1")
        expect(page.locator("#iterations tbody tr")).to_contain_text("executed, fallback")


def test_downloads_hold_what_the_page_shows(open_page: Opener, site: Site, tmp_path: Path) -> None:
    newest = site.get("jobs/moe/iterations")["iterations"]
    page = open_page(OVERVIEW)
    expect(page.locator("#iterations tbody tr")).to_have_count(ITERATIONS)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    download.value.save_as(tmp_path / "overview.json")
    assert json.loads((tmp_path / "overview.json").read_text())["iterations"] == newest
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    download.value.save_as(tmp_path / "iterations.csv")
    with (tmp_path / "iterations.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["iteration"], line["digest"]) for line in lines] == [
        (str(n["iteration"]), n["digest"]) for n in newest
    ]
    assert float(lines[0]["megatron_s"]) == pytest.approx(newest[0]["baselines_s"]["megatron"])


def test_the_address_restores_what_was_chosen(open_page: Opener) -> None:
    page = open_page(OVERVIEW)
    page.locator("#time").get_by_role("button", name="Table").click()
    page.get_by_role("button", name="Last 100").click()
    expect(page.get_by_role("button", name="Last 100")).to_have_attribute("aria-pressed", "true")
    again = open_page(page.url.removeprefix(page.url.split("#")[0]))
    expect(again.locator("#time tbody tr")).to_have_count(ITERATIONS)
    expect(again.get_by_role("button", name="Last 100")).to_have_attribute("aria-pressed", "true")


def test_a_job_without_iterations_says_what_it_waits_for(open_page: Opener, site: Site) -> None:
    with training_job(site.grpc, "waiting", ranks=4, token_budget=4096):
        page = open_page("#/jobs/waiting/overview")
        expect(page.get_by_role("status").filter(has_text="No train iteration yet")).to_contain_text(
            "submits its lengths"
        )


def test_an_unknown_job_leads_to_the_known_ones(open_page: Opener) -> None:
    page = open_page("#/jobs/nowhere/overview")
    expect(page.locator(".message")).to_contain_text("There is no job nowhere")
    page.locator(".message").get_by_role("link", name="moe", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("The planner is ahead")


def test_an_error_is_shown_and_can_be_tried_again(open_page: Opener, site: Site) -> None:
    page = open_page()
    answer = {"error": {"reason": "SHUTTING_DOWN", "message": "the scheduler is stopping", "sequence": None}}
    broken = re.compile(r"/jobs/moe/iterations\?")
    # 200 would be data; the browser logs an error for every 5xx, so the envelope comes as a redirect's status.
    page.route(broken, lambda route: route.fulfill(status=300, json=answer))
    page.goto(site.url + "?again" + OVERVIEW)
    expect(page.get_by_role("alert")).to_contain_text("the scheduler is stopping")
    expect(page.get_by_role("alert")).to_contain_text("SHUTTING_DOWN")
    page.unroute(broken)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#iterations tbody tr")).to_have_count(ITERATIONS)


def test_works_behind_a_path_prefix(open_page: Opener, site: Site) -> None:
    page = open_page()
    outside: list[str] = []

    def proxy(route: Route) -> None:
        path = route.request.url.removeprefix(site.url)
        if not path.startswith("behind/proxy/"):
            outside.append(path)
        if path.endswith("events/stream"):
            route.fulfill(status=204)
            return
        answer = httpx.get(site.url + path.removeprefix("behind/proxy/"), timeout=30, trust_env=False)
        route.fulfill(status=answer.status_code, body=answer.content, content_type=answer.headers["content-type"])

    page.goto("about:blank")
    page.route("**/*", proxy)
    page.goto(f"{site.url}behind/proxy/{OVERVIEW}")
    expect(page.locator("#iterations tbody tr")).to_have_count(ITERATIONS)
    assert not outside
