"""Takes the documentation's pictures of a running scheduler's dashboard.

    python -m tests.scheduler_service.dashboard.screenshots http://127.0.0.1:7422 docs/images

Writes dashboard-overview.png and dashboard-iteration.png: the most recently active job, its newest planned iteration,
and in it the longest sequence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from tests.scheduler_service.dashboard.conftest import ARGUMENTS, CHROMIUM


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="HTTP address of the scheduler")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 1180}, device_scale_factor=1.5)
        page.goto(arguments.address)
        expect(page.locator("#iterations tbody tr").first).to_be_visible()
        page.wait_for_load_state("load")
        page.screenshot(path=arguments.folder / "dashboard-overview.png")
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Iteration").click()
        page.locator("#sequences tbody tr").first.click()
        expect(page.get_by_role("complementary").locator(".reason")).to_be_visible()
        expect(page.locator("#timeline canvas")).to_be_visible()
        page.screenshot(path=arguments.folder / "dashboard-iteration.png")
        browser.close()


if __name__ == "__main__":
    main()
