"""The dashboard's files and the addresses of its pages."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from scheduler_service.api import errors, site


@pytest.fixture
def client(tmp_path):
    (tmp_path / "index.html").write_text("<title>HyDra-CP</title>")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "main-1a2b.js").write_text("export {}")
    (tmp_path.parent / "secret.txt").write_text("not for the world")
    app = FastAPI()
    errors.install(app)
    site.mount(app, tmp_path)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", "/jobs", "/jobs/llm.sft-1", "/jobs/llm.sft-1/iterations/3", "/index.html"])
def test_pages_of_the_client_get_the_index(client, path):
    answer = client.get(path)
    assert (answer.status_code, answer.text) == (200, "<title>HyDra-CP</title>")
    assert answer.headers["cache-control"] == "no-cache"


def test_hashed_files_may_be_kept_for_ever(client):
    answer = client.get("/assets/main-1a2b.js")
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize(
    "path", ["/assets/other.js", "/favicon.ico", "/api/v1/nothing", "/../secret.txt", "/%2e%2e/secret.txt"]
)
def test_what_is_not_there_is_no_page(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["reason"] == "NOT_FOUND"


def test_without_a_built_dashboard_the_start_page_says_how_to_get_it(tmp_path):
    app = FastAPI()
    site.mount(app, tmp_path / "nothing")
    answer = TestClient(app).get("/")
    assert answer.status_code == 200
    assert "make ui" in answer.text
