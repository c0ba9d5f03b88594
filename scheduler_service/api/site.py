"""Serves the built dashboard: files as they are, and index.html for the addresses of its pages."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path, PurePosixPath

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Scope


class Site(StaticFiles):
    """Static files; addresses that are no file belong to the client's router."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file at `path`, or index.html for a page of the dashboard."""
        try:
            response = await super().get_response(path, scope)
        except HTTPException as error:
            if error.status_code != HTTPStatus.NOT_FOUND or not _is_page(path):
                raise
            path, response = "index.html", await super().get_response("index.html", scope)
        # Built files carry a hash in their names; the page that names them must be asked for again.
        hashed = path.startswith("assets/")
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if hashed else "no-cache"
        return response


def _is_page(path: str) -> bool:
    """Whether the client's router may know `path`. Names of jobs may look like those of files, so the place decides."""
    top, _, rest = path.partition("/")
    return top not in ("api", "assets", "..") and (bool(rest) or not PurePosixPath(top).suffix)


def mount(app: FastAPI, folder: Path) -> None:
    """Serve `folder` at /, or say how to build it."""
    if (folder / "index.html").is_file():
        app.mount("/", Site(directory=folder, html=True), name="dashboard")
        return

    @app.get("/", include_in_schema=False, response_class=PlainTextResponse)
    async def not_built() -> str:
        return (
            "HyDra-CP is running; its dashboard is not part of this installation.\n"
            "Run `make ui` in a source tree, or install the released wheel. The REST API is under /api/v1\n"
            "(schema: /api/v1/openapi.json).\n"
        )
