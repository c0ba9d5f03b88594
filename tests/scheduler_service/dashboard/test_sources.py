"""What the dashboard is built from."""

from __future__ import annotations

import json
from pathlib import Path

from scheduler_service.api import openapi

UI = Path(openapi.__file__).parents[1] / "dashboard" / "ui"


def test_types_are_generated_from_the_schema_that_the_service_has() -> None:
    committed = (UI / "openapi.json").read_text()
    assert json.loads(committed) == json.loads(openapi.schema()), (
        "run: python -m scheduler_service.api.openapi > scheduler_service/dashboard/ui/openapi.json"
    )


def test_the_lock_file_names_no_registry_and_pins_every_package() -> None:
    packages = json.loads((UI / "package-lock.json").read_text())["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert not [name for name, package in installed.items() if "resolved" in package]
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())


def test_pages_name_no_other_origin() -> None:
    static = UI.parent / "static"
    index = (static / "index.html").read_text()
    assert "http:" not in index
    assert "https:" not in index
    assert 'src="./assets/' in index
    for style in (static / "assets").glob("*.css"):
        assert "url(" not in style.read_text()
