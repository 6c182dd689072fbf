"""The event log: exact losses, whole lines, the last word of a step."""

import json
import math
import random
import struct
from pathlib import Path

import pytest

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.event_log import EventLog, exact, read_events, read_losses


def test_losses_come_back_bit_for_bit(tmp_path):
    drawn = random.Random(1)
    losses = [struct.unpack("<d", drawn.randbytes(8))[0] for _ in range(2000)]
    losses += [0.0, -0.0, 5e-324, math.inf, -math.inf, math.nan]
    log = EventLog(tmp_path / "events")
    for step, loss in enumerate(losses):
        assert log.write("step", step=step, loss=exact(loss)) == ""
    found = read_losses(tmp_path / "events")
    assert len(found) == len(losses)
    for step, loss in enumerate(losses):
        assert str(found[step]) == str(loss)
        assert math.copysign(1, found[step]) == math.copysign(1, loss) or math.isnan(loss)
    for line in (tmp_path / "events").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_replayed_step_counts_once_with_its_last_value(tmp_path):
    path = tmp_path / "deep/events"
    log = EventLog(path)
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.5)):
        log.write("step", step=step, loss=loss)
    log = EventLog(path)
    log.write("resume", step=1)
    log.write("step", step=2, loss=3.5)
    assert read_losses(path) == {1: 4.0, 2: 3.5, 3: 2.5}
    kinds = [event["event"] for event in read_events(path)]
    assert kinds == ["step", "step", "step", "resume", "step"]


@pytest.mark.parametrize("torn", [b'{"event":"step","st', b"x" * 10_000])
def test_a_torn_last_line_is_cut_off_at_the_next_start(tmp_path, torn):
    for before in ({}, {1: 0.5}):
        path = tmp_path / f"events-{len(before)}"
        for step, loss in before.items():
            EventLog(path).write("step", step=step, loss=loss)
        with path.open("ab") as file:
            file.write(torn)
        assert read_losses(path) == before  # readers do not mind it either
        EventLog(path).write("step", step=2, loss=0.25)
        assert read_losses(path) == before | {2: 0.25}


def test_a_full_disk_ends_the_log_and_an_unwritable_path_is_refused(tmp_path):
    log = EventLog(Path("/dev/full"))
    assert "ends here: No space left on device" in log.write("step")
    assert log.write("step") == ""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--events or DDPJOB_TRAINER_EVENTS"):
        EventLog(tmp_path / "file/events")
