from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from scheduler_service.observability.logging import configure


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_machine_gets_one_json_object_a_line_from_either_logger():
    output = io.StringIO()
    configure("info", "auto", output)
    logging.getLogger("a.b").warning("job %r has expired", "x")
    structlog.get_logger("c").info("planned", sequences=7)
    logging.getLogger("a.b").debug("not shown")
    try:
        raise ValueError("seven")
    except ValueError:
        logging.getLogger("a.b").exception("it failed")
    first, second, third = map(json.loads, output.getvalue().splitlines())
    assert (first["event"], first["logger"], first["level"]) == ("job 'x' has expired", "a.b", "warning")
    assert (second["event"], second["sequences"]) == ("planned", 7)
    assert "ValueError: seven" in third["exception"]
    assert first["timestamp"].endswith("Z")


def test_a_person_at_a_terminal_gets_lines_to_read():
    output = Terminal()
    configure("info", "auto", output)
    logging.getLogger("a").info("ready: gRPC on somewhere")
    (line,) = output.getvalue().splitlines()
    assert "ready: gRPC on somewhere" in line
    assert not line.startswith("{")
