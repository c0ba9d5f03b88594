"""The HTTP side of the service: REST under /api/v1, probes, and the dashboard at /."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse

import scheduler_service
from scheduler_service.api import errors, site
from scheduler_service.api.routes import router
from scheduler_service.app.scheduler import Scheduler

DASHBOARD = Path(scheduler_service.__file__).parent / "dashboard" / "static"


def create_app(scheduler: Scheduler, dashboard: Path = DASHBOARD) -> FastAPI:
    """The application over `scheduler`; `dashboard` is the folder of its built pages, which may be missing."""
    app = FastAPI(
        title="HyDra-CP",
        version=scheduler.version,
        description="Plans of training jobs, their history, and how they ran. Read-only.",
        docs_url=None,  # FastAPI's own page loads scripts from a CDN
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
    )
    app.state.scheduler = scheduler
    app.include_router(router, prefix="/api/v1")
    app.add_api_route("/healthz", _alive, include_in_schema=False)
    app.add_api_route("/readyz", lambda: _ready(scheduler), include_in_schema=False)
    errors.install(app)
    site.mount(app, dashboard)
    return app


async def _alive() -> dict[str, str]:
    return {"status": "ok"}


def _ready(scheduler: Scheduler) -> JSONResponse:
    if scheduler.ready:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "stopping" if scheduler.stopping else "warming up"}, status_code=503)
