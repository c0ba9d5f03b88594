"""The schema that the dashboard's types are made from."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.rest import get


def test_the_module_prints_the_schema_of_the_routes():
    printed = subprocess.run(
        [sys.executable, "-m", "scheduler_service.api.openapi"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    document = json.loads(printed)
    assert set(document["paths"]) == {
        "/api/v1/jobs",
        "/api/v1/jobs/{job}",
        "/api/v1/jobs/{job}/iterations",
        "/api/v1/jobs/{job}/iterations/{iteration}",
        "/api/v1/jobs/{job}/iterations/{iteration}/load",
        "/api/v1/jobs/{job}/iterations/{iteration}/plan",
        "/api/v1/jobs/{job}/iterations/{iteration}/timeline",
        "/api/v1/statistics",
        "/api/v1/events",
        "/api/v1/events/stream",
    }
    schemas = document["components"]["schemas"]
    assert {"Job", "IterationPage", "LoadMap", "Timeline", "PlanPage", "EventPage", "ErrorEnvelope"} <= set(schemas)
    assert "HTTPValidationError" not in schemas, "there is one error envelope"
    for path, operations in document["paths"].items():
        if not path.endswith("/stream"):
            refused = operations["get"]["responses"]["422"]["content"]["application/json"]
            assert refused["schema"] == {"$ref": "#/components/schemas/ErrorEnvelope"}


def test_a_running_scheduler_serves_the_same_paths(service):
    served = get(service, "/api/v1/openapi.json")
    assert "/api/v1/jobs/{job}/iterations/{iteration}/plan" in served["paths"]
    assert all(path.startswith("/api/v1/") for path in served["paths"])
