"""A refusal ends with its message, said once, and with the line of the script."""

from dataclasses import fields

import pytest
import torch

from ddpjob_trainer import environment
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.options import Options
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training import shutdown
from ddpjob_trainer.training.models.guard import Guard


def refused(**options: object) -> BaseException:
    usual = {one.name: one.default for one in fields(Options)}
    given = {**usual, "total_steps": 0, "global_batch": 6, "level": "resume", **options}
    with pytest.raises(ConfigError) as found:
        Options.among(given).check(3)
    return found.value


@pytest.fixture
def errors(tmp_path, monkeypatch, capfd):  # type: ignore[no-untyped-def]
    monkeypatch.setenv(environment.STATE_DIR, str(tmp_path))

    def read() -> list[str]:
        return capfd.readouterr().err.splitlines()  # type: ignore[no-any-return]

    return read


def test_one_rank_says_it_for_all_that_have_the_same_to_say(errors):
    same = refused()
    other = refused(total_steps=10, global_batch=7)
    for rank, error in ((1, same), (0, same), (2, other)):
        assert shutdown.print_refusal(rank, error, error.__traceback__)
    first, second = errors()
    assert first.startswith("ddpjob: rank 1: ConfigError: total_steps=0 must be at least 1 [")
    assert f"{__file__}, line " in first
    assert "(DDPJOB_TRAINER_TRACEBACK=1 shows the traceback)" in first
    assert second.startswith("ddpjob: rank 2: ConfigError: ")


def test_without_a_launcher_or_a_writable_place_every_rank_says_it(errors, monkeypatch, tmp_path):
    error = refused()
    for directory in ("", str(tmp_path / "missing")):
        monkeypatch.setenv(environment.STATE_DIR, directory)
        assert [shutdown.print_refusal(rank, error, None) for rank in range(2)] == [True, True]
        assert len(errors()) == 2


def test_the_traceback_stays_for_who_wants_it_and_for_every_other_error(errors, monkeypatch):
    assert not shutdown.print_refusal(0, PeerLostError("gone"), None)
    assert not shutdown.print_refusal(0, ValueError("a bug"), None)
    monkeypatch.setenv(environment.TRACEBACK, "1")
    assert not shutdown.print_refusal(0, refused(), None)
    assert errors() == []


def test_the_line_is_the_scripts_though_torch_called_our_hook(errors):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    updater = Updater()
    updater.units.append(Unit(optimizer, None, Clip(None, [])))
    guard = Guard(TrainingState(torch.nn.Module()), updater)
    try:
        with pytest.raises(ConfigError) as found:
            optimizer.step()
    finally:
        guard.stop()
    assert shutdown.print_refusal(0, found.value, found.value.__traceback__)
    [line] = errors()
    assert f"[{__file__}, line " in line
