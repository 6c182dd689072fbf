"""Python imports this by itself when it starts: tells each new longest step of the main loop.

In processor time of the loop's own thread, so that what else the machine does counts for nothing.
"""

from __future__ import annotations

import asyncio.events
import sys
import threading
import time

_run = asyncio.events.Handle._run
_longest = 0.005


def _timed(self: asyncio.events.Handle) -> None:
    global _longest
    began = time.thread_time()
    _run(self)
    took = time.thread_time() - began
    if took > _longest and threading.current_thread() is threading.main_thread():
        _longest = took
        what = getattr(self._callback, "__self__", self._callback)
        name = what.get_name() if isinstance(what, asyncio.Task) else repr(what)[:80]
        print(f"longest step: {1000 * took:.0f} ms, {name}", file=sys.stderr, flush=True)


asyncio.events.Handle._run = _timed  # type: ignore[method-assign]
