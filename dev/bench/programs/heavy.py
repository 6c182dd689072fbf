"""A module that takes 3 s of processor time to import, as large libraries do."""

import time

_BEGUN = time.process_time()
while time.process_time() - _BEGUN < 3.0:
    pass
