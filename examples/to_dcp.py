"""Write a snapshot, with all that is registered, as a directory of torch.distributed.checkpoint.

The last line of its output names what dcp.load() can be asked for.

    python to_dcp.py SNAPSHOT_DIR OUT
"""

import sys

from torch.distributed import checkpoint

import ddpjob_trainer as ddp

directory, out = sys.argv[1:]
found = ddp.read_snapshot(directory)
state = {name: found.state(name) for name in found.registered}
state["model"] = {name: found.model[name] for name in found.model if name not in found.caches}
checkpoint.save(state, checkpoint_id=out, no_dist=True)
print(f"{out}: step {found.step}, {', '.join(state)}")
