"""What holds of every page: width, themes, keyboard, names for screen readers."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.scheduler_service.dashboard.conftest import Opener, Site

PAGES = {
    "overview": ("#/jobs/moe/overview", "#iterations tbody tr"),
    "tables": ("#/jobs/moe/overview?tables=time.ahead.bubbles.imbalance.degrees.loss", "#time tbody tr"),
    "iteration": ("#/jobs/moe/iterations/3?seq=1", "#sequences tbody tr"),
    "iteration tables": ("#/jobs/moe/iterations/3?tables=load.timeline", "#timeline tbody tr"),
}

NAMELESS = """() => [...document.querySelectorAll('a, button, select, canvas[tabindex], [role=img], [role=region]')]
  .filter(e => e.checkVisibility())
  .filter(e => !(e.getAttribute('aria-label') || e.innerText || e.title || e.labels?.[0]?.innerText || '').trim())
  .map(e => e.outerHTML)"""


def background(page: Page) -> str:
    """Colour behind the page."""
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_fits_the_width_and_names_everything(open_page: Opener, name: str, width: int) -> None:
    address, ready = PAGES[name]
    page = open_page(address, width=width)
    expect(page.locator(ready).first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(NAMELESS) == []


def test_follows_the_system_theme_and_remembers_a_choice(open_page: Opener) -> None:
    light = open_page(PAGES["overview"][0])
    page = open_page(PAGES["overview"][0], dark=True)
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert background(page) != background(light)
    page.get_by_role("button", name="Theme: system").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert background(page) == background(light)
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Theme: light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


@pytest.mark.parametrize("name", ["overview", "iteration"])
def test_every_control_is_reached_by_tab(open_page: Opener, name: str) -> None:
    address, ready = PAGES[name]
    page = open_page(address)
    expect(page.locator(ready).first).to_be_visible()
    wanted = page.evaluate(
        """() => {
          const all = [...document.querySelectorAll('a[href], button:not(:disabled), select, canvas[tabindex]')];
          all.filter(e => e.checkVisibility()).forEach((e, k) => { e.dataset.k = k; });
          return all.filter(e => e.dataset.k).length;
        }"""
    )
    reached = set()
    for _ in range(2 * wanted):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement?.dataset.k ?? null"))
    assert len(reached - {None}) == wanted


def test_a_keyboard_alone_gets_from_the_overview_to_a_reason(open_page: Opener, site: Site) -> None:
    page = open_page(PAGES["overview"][0])
    link = page.locator("#iterations").get_by_role("link", name="3", exact=True)
    link.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Iteration 3")
    expect(page.locator("#sequences tbody tr")).to_have_count(25)
    page.locator("#sequences tbody th button").first.focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("complementary")).to_contain_text(
        site.get("jobs/moe/iterations/3/plan", limit=1)["sequences"][0]["why"]
    )


def test_the_skip_link_comes_first_and_leads_to_the_content(open_page: Opener) -> None:
    page = open_page(PAGES["overview"][0])
    expect(page.locator(".verdict")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
