"""The page of one iteration in a real browser, over a real scheduler."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from playwright.sync_api import Download, Locator, Page, expect

from tests.scheduler_service.dashboard.conftest import ITERATIONS, SEQUENCES, Opener, Site
from tests.scheduler_service.dashboard.job import training_job
from tests.scheduler_service.dashboard.test_overview import DRAWN

ITERATION = "#/jobs/moe/iterations/3"
PLAN = "jobs/moe/iterations/3/plan"


def cells(page: Page) -> Locator:
    """The canvas of the load map."""
    return page.locator("#load canvas")


def table_ids(page: Page) -> list[int]:
    """Ids of the sequences in the table."""
    return [int(text) for text in page.locator("#sequences tbody th button").all_inner_texts()]


def lines(download: Download, folder: Path) -> list[dict[str, str]]:
    """The rows of a downloaded CSV file."""
    path = folder / download.suggested_filename
    download.save_as(path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_latest_iteration_is_the_newest_with_a_plan(open_page: Opener) -> None:
    page = open_page("#/jobs/moe/overview")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Iteration").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Iteration {ITERATIONS - 1}")
    assert page.url.endswith(f"/iterations/{ITERATIONS - 1}")


def test_load_and_schedule_are_drawn(open_page: Opener) -> None:
    page = open_page(ITERATION)
    expect(page.locator("#timeline canvas")).to_be_visible()
    expect(cells(page)).to_be_visible()
    assert cells(page).evaluate(DRAWN) > 10
    assert page.locator("#timeline canvas").evaluate(DRAWN) > 10


def test_load_tokens_and_degree_look_different(open_page: Opener) -> None:
    page = open_page(ITERATION)
    pictures = set()
    for name in ("Load", "Tokens", "Degree"):
        page.locator("#load").get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#load").get_by_role("button", name=name, exact=True)).to_have_attribute(
            "aria-pressed", "true"
        )
        pictures.add(cells(page).evaluate("canvas => canvas.toDataURL()"))
    assert len(pictures) == 3


def test_degrees_are_those_of_the_plan(open_page: Opener, site: Site) -> None:
    summary = site.get("jobs/moe/iterations/3")
    page = open_page(ITERATION)
    expect(page.locator("#histogram tbody tr")).to_have_count(len(summary["degree_share"]))
    for row in page.locator("#histogram tbody tr").all():
        degree = row.locator("th").inner_text()
        expect(row.locator(".share")).to_contain_text(f"{100 * summary['degree_share'][degree]:.1f}")
        expect(row.locator("td").last).to_have_text(str(summary["degree_sequences"][degree]))


def test_sequences_are_paged_and_sorted_by_the_service(open_page: Opener, site: Site) -> None:
    page = open_page(ITERATION)
    expect(page.locator("#sequences tbody tr")).to_have_count(25)
    assert table_ids(page) == [one["id"] for one in site.get(PLAN, limit=25)["sequences"]]
    page.get_by_role("button", name="Sequence", exact=True).click()
    expect(page.locator("#sequences tbody th button").first).to_have_text("0")
    page.locator("#sequences").get_by_role("button", name="Next").click()
    expect(page.locator("#sequences tbody th button").first).to_have_text("25")
    expect(page.locator("#sequences .pager")).to_contain_text(f"26–50 of {SEQUENCES}")


def test_a_sequence_says_why_it_is_where_it_is(open_page: Opener, site: Site) -> None:
    longest = site.get(PLAN, limit=1)["sequences"][0]
    page = open_page(ITERATION)
    expect(page.locator("#sequences tbody tr")).to_have_count(25)
    before = cells(page).evaluate("canvas => canvas.toDataURL()")
    page.locator("#sequences tbody tr").first.click()
    why = page.get_by_role("complementary")
    expect(why).to_contain_text(longest["why"])
    assert f"seq={longest['id']}" in page.url
    assert cells(page).evaluate("canvas => canvas.toDataURL()") != before, "its group is not outlined"


def test_the_address_restores_the_view(open_page: Opener, site: Site) -> None:
    chosen = site.get(PLAN, sort="microbatch", offset=25, limit=1)["sequences"][0]
    view = f"{ITERATION}?show=tokens&ranks=8-23&sort=microbatch&offset=25&seq={chosen['id']}&tables=timeline&pipeline=2"
    page = open_page(view)
    for _ in range(2):
        expect(page.locator("#load").get_by_role("button", name="Tokens", exact=True)).to_have_attribute(
            "aria-pressed", "true"
        )
        expect(page.locator("#load .note")).to_contain_text("Ranks 8–23 of 64")
        expect(page.locator("#timeline")).to_contain_text("pipeline 2")
        expect(page.locator("#timeline tbody tr")).to_have_count(4)
        expect(page.get_by_role("complementary")).to_contain_text(chosen["why"])
        expect(page.locator("#sequences tbody tr.chosen th")).to_have_text(str(chosen["id"]))
        assert page.url == site.url + view
        page.reload()


def test_a_cell_leads_to_its_sequences_by_keyboard(open_page: Opener, site: Site) -> None:
    load = site.get("jobs/moe/iterations/3/load")
    page = open_page(ITERATION)
    cells(page).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    expect(page.locator(".readout")).to_contain_text("rank 2, microbatch 1")
    expect(page.locator(".readout")).to_contain_text(f"{load['tokens'][2][1]:,} tokens")
    page.keyboard.press("Enter")
    here = site.get(PLAN, rank=2, microbatch=1, limit=25)
    expect(page.locator("#sequences tbody tr")).to_have_count(len(here["sequences"]))
    assert table_ids(page) == [one["id"] for one in here["sequences"]]
    page.get_by_role("button", name="Remove the filter: rank 2").click()
    expect(page.locator("#sequences .pager")).to_contain_text(f"of {site.get(PLAN, microbatch=1)['total']}")


def test_a_pointer_over_a_cell_tells_its_group(open_page: Opener, site: Site) -> None:
    load = site.get("jobs/moe/iterations/3/load")
    page = open_page(ITERATION)
    box = cells(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 44 + (box["width"] - 44) * 20.5 / 64, box["y"] + 5)
    tip = page.locator(".tip")
    expect(tip).to_contain_text("Rank 20 · MB 0")
    expect(tip.locator("dl")).to_contain_text(f"Degree{load['degree'][20][0]}")


def test_dragging_over_ranks_zooms_into_them(open_page: Opener) -> None:
    page = open_page(ITERATION)
    box = cells(page).bounding_box()
    assert box is not None
    rank = (box["width"] - 44) / 64
    page.mouse.move(box["x"] + 44 + rank * 8.5, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 44 + rank * 15.5, box["y"] + 12, steps=4)
    page.mouse.up()
    expect(page.locator("#load .note")).to_contain_text("Ranks 8–15 of 64")
    page.locator("#load").get_by_role("button", name="All", exact=True).click()
    expect(page.locator("#load .note")).to_contain_text("All 64 ranks")


def test_a_map_of_40000_cells_needs_no_element_per_cell(open_page: Opener, site: Site) -> None:
    with training_job(site.grpc, "huge", ranks=5000, token_budget=8192, stages=4) as job:
        job.submit(0, 20_000)
        assert job.fetch(0).microbatches * 5000 >= 40_000
        page = open_page("#/jobs/huge/iterations/0")
        expect(cells(page)).to_be_visible()
        assert cells(page).evaluate(DRAWN) > 10
        assert page.evaluate("document.querySelectorAll('*').length") < 2000
        cells(page).focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("End")
        expect(page.locator(".readout")).to_contain_text("rank 4,999, microbatch 0")
        page.keyboard.press("+")
        expect(page.locator("#load .note")).to_contain_text("Ranks 2,500–4,999 of 5,000")


def test_downloads_hold_the_whole_plan(open_page: Opener, site: Site, tmp_path: Path) -> None:
    summary = site.get("jobs/moe/iterations/3")
    load = site.get("jobs/moe/iterations/3/load")
    page = open_page(ITERATION)
    expect(page.locator("#timeline canvas")).to_be_visible()
    expect(page.locator("#sequences tbody tr")).to_have_count(25)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    download.value.save_as(tmp_path / "iteration.json")
    whole = json.loads((tmp_path / "iteration.json").read_text())
    assert (whole["summary"], whole["load"]) == (summary, load)

    with page.expect_download() as download:
        page.locator("#load").get_by_role("button", name="Download load").click()
    matrix = lines(download.value, tmp_path)
    assert len(matrix) == 64 * summary["microbatches"]
    assert all(float(cell["load"]) == load["load"][int(cell["rank"])][int(cell["microbatch"])] for cell in matrix)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download the schedule").click()
    assert len(lines(download.value, tmp_path)) == 2 * 4 * summary["microbatches"]

    with page.expect_download() as download:
        page.locator("#sequences").get_by_role("button", name="Download all of these sequences").click()
    sequences = lines(download.value, tmp_path)
    assert len(sequences) == SEQUENCES
    assert sequences[0]["why"] == site.get(PLAN, limit=1)["sequences"][0]["why"]


def test_an_iteration_that_waits_for_shards_says_so(open_page: Opener, site: Site) -> None:
    with training_job(site.grpc, "half", ranks=4, token_budget=4096) as job:
        job.submit(0, 20, shards=1)
        page = open_page("#/jobs/half/iterations/0")
        expect(page.locator(".message")).to_contain_text("Iteration 0 is collecting")
        job.submit(0, 20)
        expect(cells(page)).to_be_visible()
