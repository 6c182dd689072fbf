"""Ask a machine with torch alone for its GPUs, its collectives and its memory.

`environment` prints one JSON object. `collectives` runs under a launcher, and each process writes
what it found to rank-N.json; with `--fill` a process is then killed while memory is full.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Bytes of the tensors that are added up; the last only where there are GPUs.
SIZES = (1 << 10, 1 << 20, 1 << 24, 1 << 28)
_FULL = 0.9


def environment() -> dict[str, Any]:
    """Name what a result depends on. ``error``: the driver's own words where there is no GPU."""
    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as found:
        error = str(found).splitlines()[0]
    gpus = []
    for index in range(torch.cuda.device_count() if not error else 0):
        it = torch.cuda.get_device_properties(index)
        gpus.append(
            {"name": it.name, "uuid": str(getattr(it, "uuid", "")), "bytes": it.total_memory}
        )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": _nccl(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver": _smi("--query-gpu=driver_version").partition("\n")[0],
        "gpus": gpus,
        "error": error,
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
        "variables": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "CUDA_"))
        },
    }


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def _smi(query: str) -> str:
    """Return nvidia-smi's answer, "" where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _join() -> torch.device:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    dist.barrier()
    return device


def collectives() -> dict[str, Any]:
    """Add up tensors of several sizes; return a hash of the sums' bits."""
    device = _join()
    cpu = device.type == "cpu"
    digest = hashlib.sha256()
    torch.manual_seed(dist.get_rank())
    for size in SIZES[:3] if cpu else SIZES:
        tensor = torch.randn(size // 4, device=device)
        dist.all_reduce(tensor)
        digest.update(tensor.cpu().numpy().tobytes())
    found: dict[str, Any] = {"sha256": digest.hexdigest(), "uuid": ""}
    if not cpu:
        found["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        dist.barrier()
        # The pids are the host's; how many there are on each GPU is what counts.
        found["processes"] = _smi("--query-compute-apps=gpu_uuid").splitlines()
        dist.barrier()
    return found


def _free() -> int:
    return torch.cuda.mem_get_info(int(os.environ["LOCAL_RANK"]))[0]


def fill(found: dict[str, Any]) -> None:
    """Fill the GPU; the last rank then dies, and the launcher ends the others."""
    torch.cuda.empty_cache()
    found["held"] = torch.empty(int(_free() * _FULL), dtype=torch.uint8, device="cuda").zero_()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def main() -> None:
    """Do as the module says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("environment", "collectives"))
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "environment":
        print(json.dumps(environment()))
        return
    path = options.out / f"rank-{os.environ['RANK']}.json"
    if os.environ["DDPJOB_ROUND"] != "0":  # after fill()
        path.write_text(json.dumps({**json.loads(path.read_text()), "free": _free()}))
        return
    # A context of CUDA's and other programs take their part before and after alike.
    before = {"before": _free()} if options.fill else {}
    found = collectives() | before
    path.write_text(json.dumps(found))
    if options.fill:
        fill(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
