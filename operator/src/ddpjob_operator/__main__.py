"""`python -m ddpjob_operator`, also installed as `ddpjob-operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from ddpjob_operator.shell import logs, settings
from ddpjob_operator.shell.app import App
from ddpjob_operator.shell.credentials import Credentials, NoCredentialsError


def main() -> None:
    """Run the operator; never returns."""
    options = settings.parse()
    logs.configure(options.log_level, options.log_format)
    try:
        credentials = Credentials.load(options.kubeconfig, options.context)
        status = asyncio.run(App(options, credentials).run())
    except (NoCredentialsError, OSError) as error:
        logging.getLogger(__name__).error("cannot start: %s", error)
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    # kopf's thread may still wait for the network; everything that matters has ended.
    os._exit(status)


if __name__ == "__main__":
    main()
