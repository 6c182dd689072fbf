"""Start the operator: `python -m ddpjob_operator`, also installed as `ddpjob-operator`.

It lets signals end it before it imports the rest: it is PID 1 in a pod, and the kernel drops
signals to PID 1 that have no handler. The app replaces these handlers with its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from datetime import UTC, datetime

_TEXT = "%(asctime)s.%(msecs)03d+00:00 %(levelname)-7s %(name)s: %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S"


def _end(signum: int, frame: object) -> None:
    os._exit(0)  # nothing has begun


def main() -> None:
    """Run the operator; never return."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    # After the handlers, for this takes a while.
    from ddpjob_operator import settings
    from ddpjob_operator.shell.app import App

    options = settings.parse()
    configure_logs(options.log_level, options.log_format)
    try:
        credentials = settings.Credentials.load(options.kubeconfig, options.context)
        # asyncio.run would wait for a name that is being looked up, however long it takes.
        status = asyncio.new_event_loop().run_until_complete(App(options, credentials).run())
    except (settings.NoCredentialsError, OSError) as error:
        logging.getLogger(__name__).error("cannot start: %s", error)
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    # Threads may still wait for the network; everything that matters has ended.
    os._exit(status)


def configure_logs(level: str, form: str) -> None:
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
    watch is one line of jobs.py, not two tracebacks.
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


if __name__ == "__main__":
    main()
