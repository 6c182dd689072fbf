"""`python -m ddpjob_trainer` is the `ddpjob-trainer` command."""

import sys

from ddpjob_trainer.entry import main

sys.exit(main())
