"""What the checks ask of a machine with torch alone: its GPUs, its collectives, its memory.

`environment` prints one JSON object. The others run under a launcher, and each process writes what
it found to rank-N.json.
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
_REPEATS = 5
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
        "memory_bytes": _memory_limit(),
        "variables": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "CUDA_"))
        },
    }


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def _memory_limit() -> int | None:
    """Of this container, bytes; None: none."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdigit() else None


def _smi(query: str) -> str:
    """nvidia-smi's answer, "" where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _join() -> tuple[torch.device, float]:
    """Join the process group; return this process's device, and the seconds that it took."""
    began = time.monotonic()
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    dist.barrier()
    return device, time.monotonic() - began


def collectives() -> dict[str, Any]:
    """Add up tensors of several sizes: seconds, and a hash of the sums' bits."""
    device, seconds = _join()
    cpu = device.type == "cpu"
    digest = hashlib.sha256()
    took: dict[int, float] = {}
    torch.manual_seed(dist.get_rank())
    for size in SIZES[:3] if cpu else SIZES:
        given = torch.randn(size // 4, device=device)
        tensor = given.clone()
        dist.all_reduce(tensor)
        digest.update(tensor.cpu().numpy().tobytes())
        times = []
        for _ in range(_REPEATS):
            tensor = given.clone()
            _wait(device)
            began = time.monotonic()
            dist.all_reduce(tensor)
            _wait(device)
            times.append(time.monotonic() - began)
        took[size] = min(times)
    found = {"init_seconds": seconds, "seconds": took, "sha256": digest.hexdigest(), "uuid": ""}
    if not cpu:
        found["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        dist.barrier()
        # The pids are the host's; how many there are on each GPU is what counts.
        found["processes"] = _smi("--query-compute-apps=gpu_uuid").splitlines()
        dist.barrier()
    dist.destroy_process_group()
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fill(first: Path) -> dict[str, Any]:
    """Fill the GPU in round 0 and be killed; say in round 1 how much of it is free again.

    ``first``: a file for what was free in round 0, a context of CUDA's and other programs apart.
    """
    free, _ = torch.cuda.mem_get_info(int(os.environ["LOCAL_RANK"]))
    if os.environ["DDPJOB_ROUND"] != "0":
        return {"free": free, "before": int(first.read_text())}
    first.write_text(str(free))
    device, _ = _join()
    held = torch.empty(int(free * _FULL), dtype=torch.uint8, device=device).zero_()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return {"held": held.numel()}


def main() -> None:
    """See the module's own words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("environment", "collectives", "fill"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "environment":
        print(json.dumps(environment()))
        return
    rank = os.environ["RANK"]
    fills = options.what == "fill"
    found = fill(options.out / f"free-{rank}") if fills else collectives()
    (options.out / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
