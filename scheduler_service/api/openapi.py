"""Prints the OpenAPI schema as JSON: `python -m scheduler_service.api.openapi`. The dashboard's types come from it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from scheduler_service.api.routes import router


def schema() -> str:
    """The schema of the REST API, the same text for the same routes."""
    app = FastAPI()
    app.include_router(router, prefix="/api/v1")
    document = get_openapi(title="HyDra-CP", version=version("hydra-cp"), routes=app.routes)
    return json.dumps(document, indent=2, ensure_ascii=False, sort_keys=True)


if __name__ == "__main__":
    sys.stdout.write(schema() + "\n")
