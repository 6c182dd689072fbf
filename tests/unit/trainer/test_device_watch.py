"""What a rank is said to do while its loop stands still: what its own device does."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.liveness.hang import WAITING
from ddpjob_trainer.telemetry.progress import DeviceWatch
from support.patience import PATIENCE
from support.queued import Queued


class Progress:
    def __init__(self) -> None:
        self.since = 100.0
        self.told: list[str] = []
        self.of_device: dict[str, float] = {}

    def device_at(self, activity: str) -> None:
        self.told.append(activity)


@pytest.fixture
def watch() -> Any:
    device, progress = Queued(torch.device("cpu")), Progress()
    found = DeviceWatch(device, progress)  # type: ignore[arg-type]
    for _ in range(2):
        for activity in ("forward", "backward", "update"):
            found.queued(activity)  # type: ignore[arg-type]
    return SimpleNamespace(device=device, progress=progress, look=found.look, watch=found)


def test_a_gpu_that_hangs_in_its_own_work_is_told_from_one_that_waits(watch):
    for now in (200.0, 201.0, 260.0):
        watch.look(now)
    assert watch.progress.told == ["forward"], "once, wherever its host stands"
    watch.device.run(1)
    watch.look(261.0)
    assert watch.progress.told == ["forward", "backward"]
    assert "backward" in WAITING, "for gradients of others"
    watch.device.run(2)
    watch.look(262.0)
    assert watch.progress.told[-1] == "update"
    watch.progress.since = 263.0
    watch.look(263.5)
    assert len(watch.progress.told) == 3, "the loop moves: it speaks for itself"
    watch.look(300.0)
    assert watch.progress.told[2:] == ["update"] * 2
    assert not {"forward", "update"} & WAITING


def test_seconds_are_the_devices_own():
    """Those in which it waits for its batch or evaluates are told from those of its computing."""
    device, progress = Queued(torch.device("cpu")), Progress()
    watch = DeviceWatch(device, progress)  # type: ignore[arg-type]
    watch.start()
    watch.stop()
    for activity, length in (("update", 1), ("body", 50), ("data", 7), ("forward", 2)):
        for _ in range(length - 1):
            device.mark()
        watch.queued(activity)  # type: ignore[arg-type]
    device.run(device.mark().place)
    watch.look(200.0)
    assert progress.of_device == {"data": 7.0, "forward": 2.0, "backward": 0.0, "update": 0.0}
    assert progress.told == [], "a host that hangs speaks for itself"
    nothing = Progress()
    watch = DeviceWatch(accelerator.of(torch.device("cpu")), nothing)  # type: ignore[arg-type]
    watch.queued("forward")  # where a device has no queue nothing is watched
    watch.start()
    watch.look(1e9)
    assert (nothing.told, nothing.of_device) == ([], {})


def test_its_thread_asks_its_own_gpu():
    """CUDA's device belongs to the thread: each rank's would ask, and wake, the first."""
    entered = threading.Event()

    class Device(Queued):
        def enter(self) -> None:
            entered.set()

    watch = DeviceWatch(Device(torch.device("cpu")), Progress())  # type: ignore[arg-type]
    watch.start()
    try:
        assert entered.wait(PATIENCE)
    finally:
        watch.stop()
