"""Write log lines to stderr: text for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime

_TEXT = "%(asctime)s.%(msecs)03d+00:00 %(levelname)-7s %(name)s: %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S"


def configure(level: str, form: str) -> None:
    """Set up the root logger. ``level``: debug ... error; ``form``: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Text(_TEXT, _TIME)
    text.converter = time.gmtime
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        handler.addFilter(_quiet)
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)


def _quiet(record: logging.LogRecord) -> bool:
    """Leave out two useless messages of kopf.

    It is in a thread on purpose, so it need not warn that it gets no signals; and the end of a
    watch is one line of kopf_thread.py, not two tracebacks.
    """
    if not record.name.startswith("kopf"):
        return True
    kind = record.exc_info[0] if record.exc_info else None
    answered = kind is not None and kind.__module__.startswith("kopf._cogs.clients.")
    return not answered and "OS signals are ignored" not in record.getMessage()


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        # Messages quote what users and servers wrote: a line break in them must not forge a line.
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
