"""Logs: one JSON object a line where a machine reads them, coloured lines where a person does.

Both structlog's loggers and the standard library's go the same way, to standard error.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str = "info", form: str = "auto", output: TextIO | None = None) -> None:
    """Send all logs to `output` (standard error by default). `form`: json, console, or auto: console on a terminal."""
    output = output or sys.stderr
    console = form == "console" or (form == "auto" and output.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        renderers: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer(colors=output.isatty())]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn says at INFO what the service says itself.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
