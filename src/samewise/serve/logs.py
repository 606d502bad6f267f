"""The server's log: plain lines, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

LOGGERS = ("samewise", "uvicorn.error")


class Lines(logging.Formatter):
    """`12:00:00 info    message seconds=… request_id=…`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by a traceback if there is one."""
        facts = getattr(record, "facts", {})
        shown = "".join(f" {name}={facts[name]}" for name in ("seconds", "request_id") if name in facts)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():8}{record.getMessage()}{shown}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """One object."""
        when = time.gmtime(record.created)
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", when) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | getattr(record, "facts", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Send the package's log, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Lines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level != "debug":
        # The process logs its own start and end.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


__all__ = ["LOGGERS", "JsonLines", "Lines", "set_up"]
