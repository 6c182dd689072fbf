"""Which device a process takes, and when it must not make do with the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpjob_trainer import accelerator
from ddpjob_trainer.comm.rendezvous import _misfit
from ddpjob_trainer.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A machine with so many GPUs, or whose driver complains."""

    def have(count: int, complaint: Exception | None = None) -> list[torch.device]:
        taken: list[torch.device] = []

        def init() -> None:
            if complaint is not None:
                raise complaint

        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(torch.cuda, "init", init)
        return taken

    return have


def test_by_the_local_rank_or_the_one_that_is_visible(gpus):  # type: ignore[no-untyped-def]
    taken = gpus(4)
    assert accelerator.choose("auto", 3, {}) == torch.device("cuda", 3)
    assert accelerator.choose("cuda", 0, {}) == torch.device("cuda", 0)
    assert taken == [torch.device("cuda", 3), torch.device("cuda", 0)]
    with pytest.raises(ConfigError, match="LOCAL_RANK=4, but this machine shows 4 GPUs"):
        accelerator.choose("auto", 4, {})
    assert accelerator.choose("cpu", 4, {}) == CPU, "hidden GPUs are nobody's business"
    gpus(1)
    assert accelerator.choose("auto", 7, {}) == torch.device("cuda", 0), "as Slurm has it"


def test_no_gpu_is_fine_where_none_was_given(gpus, monkeypatch):  # type: ignore[no-untyped-def]
    gpus(0, AssertionError("Torch not compiled with CUDA enabled"))
    monkeypatch.setattr(accelerator, "was_given_gpus", lambda env: False)
    assert accelerator.choose("auto", 0, {}) == CPU
    with pytest.raises(ConfigError, match=r"start\(\) asks for one: Torch not compiled"):
        accelerator.choose("cuda", 0, {})


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found 470)."), ConfigError),
        (RuntimeError("Found no NVIDIA driver on your system. Please\ncheck"), ConfigError),
        (None, ConfigError),
        # Another node may do better.
        (RuntimeError("CUDA unknown error - this may be due to ..."), RuntimeError),
        (RuntimeError("No CUDA GPUs are available"), RuntimeError),
    ],
)
def test_a_gpu_that_cannot_be_used_is_no_reason_to_train_on_the_cpu(  # type: ignore[no-untyped-def]
    gpus, monkeypatch, complaint, kind
):
    gpus(0, complaint)
    monkeypatch.setattr(accelerator, "was_given_gpus", lambda env: True)
    with pytest.raises(kind) as error:
        accelerator.choose("auto", 0, {})
    assert type(error.value) is kind
    words = str(complaint or "torch sees none").splitlines()[0].rstrip(".")
    assert f"no GPU can be used, though there is one: {words}. " in str(error.value)
    assert "start(device='cpu')" in str(error.value)


def test_a_gpu_that_is_counted_and_cannot_be_used(gpus, monkeypatch):  # type: ignore[no-untyped-def]
    """NVML tells their number without a look at the driver's version."""
    old = RuntimeError("The NVIDIA driver on your system is too old (found 470).")
    gpus(1, old)

    def refuse(_: torch.device) -> None:
        raise old

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(ConfigError, match="no GPU can be used, though there is one: The NVIDIA"):
        accelerator.choose("auto", 0, {})


def test_what_a_container_was_given(tmp_path: Path) -> None:
    given = accelerator.was_given_gpus
    assert not given({}, tmp_path)
    assert not given({}, tmp_path / "no such folder")
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert not given({}, tmp_path), "a driver alone is no GPU"
    assert not given({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path), "NVIDIA's images say so always"
    assert given({"NVIDIA_VISIBLE_DEVICES": "GPU-8f7a"}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert given({}, tmp_path)
    assert given({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    for hidden in ("", "-1"):
        assert not given({"CUDA_VISIBLE_DEVICES": hidden}, tmp_path)


def test_ranks_that_cannot_train_together() -> None:
    assert _misfit(["cpu "] * 3) == ""
    assert _misfit(["cuda GPU-a", "cuda GPU-b"]) == ""
    assert "rank 1 trains on cpu and rank 0 on cuda" in _misfit(["cuda GPU-a", "cpu "])
    assert "ranks 0 and 2 have the same GPU, GPU-a" in _misfit([f"cuda GPU-{n}" for n in "aba"])
