"""Start the operator: `python -m ddpjob_operator`, also installed as `ddpjob-operator`.

It lets signals end it before it imports the rest: it is PID 1 in a pod, and the kernel drops
signals to PID 1 that have no handler. The app replaces these handlers with its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys


def _end(signum: int, frame: object) -> None:
    os._exit(0)  # nothing has begun


def main() -> None:
    """Run the operator; never return."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    # After the handlers, for this takes a while.
    from ddpjob_operator.shell import logs, settings
    from ddpjob_operator.shell.api.credentials import Credentials, NoCredentialsError
    from ddpjob_operator.shell.app import App

    options = settings.parse()
    logs.configure(options.log_level, options.log_format)
    try:
        credentials = Credentials.load(options.kubeconfig, options.context)
        # asyncio.run would wait for a name that is being looked up, however long it takes.
        status = asyncio.new_event_loop().run_until_complete(App(options, credentials).run())
    except (NoCredentialsError, OSError) as error:
        logging.getLogger(__name__).error("cannot start: %s", error)
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    # Threads may still wait for the network; everything that matters has ended.
    os._exit(status)


if __name__ == "__main__":
    main()
