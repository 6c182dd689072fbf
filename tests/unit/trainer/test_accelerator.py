"""Which GPUs there are, which one a process takes, when it must not make do with the CPU."""

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ddpjob_contract import ExitCode
from ddpjob_trainer.comm.rendezvous import _misfit
from ddpjob_trainer.data import fetch
from ddpjob_trainer.errors import ConfigError, HardwareError
from ddpjob_trainer.gpu import accelerator, devices
from ddpjob_trainer.state.stateful import stateful
from ddpjob_trainer.training.shutdown import exit_code_of

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A machine with so many GPUs, or whose driver complains."""

    def have(count: int, complaint: Exception | None = None) -> list[torch.device]:
        taken: list[torch.device] = []

        def init(*device: torch.device) -> None:
            taken.extend(device)
            if complaint is not None:
                raise complaint

        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", init)
        monkeypatch.setattr(torch.cuda, "init", init)
        return taken

    return have


def test_by_the_local_rank_or_the_one_that_is_visible(gpus, monkeypatch):
    taken = gpus(4)
    assert accelerator.choose("auto", 3, {}) == torch.device("cuda", 3)
    assert accelerator.choose("cuda", 0, {}) == torch.device("cuda", 0)
    assert taken == [torch.device("cuda", 3), torch.device("cuda", 0)]
    with pytest.raises(ConfigError, match="LOCAL_RANK=4, but this machine shows 4 GPUs"):
        accelerator.choose("auto", 4, {})
    assert accelerator.choose("cpu", 4, {}) == CPU, "hidden GPUs are nobody's business"
    gpus(1)
    assert accelerator.choose("auto", 7, {}) == torch.device("cuda", 0), "as Slurm has it"
    gpus(0, AssertionError("Torch not compiled with CUDA enabled"))
    monkeypatch.setattr(devices, "given", lambda env: False)
    assert accelerator.choose("auto", 0, {}) == CPU, "none was given"
    with pytest.raises(ConfigError, match=r"start\(\) asks for one: Torch not compiled"):
        accelerator.choose("cuda", 0, {})


@pytest.mark.parametrize(("gpu", "asks"), [(False, "0"), (True, "1")])
def test_without_a_gpu_no_optimizer_looks_for_nvml_in_each_step(monkeypatch, tmp_path, gpu, asks):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as the launcher sets it
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    if gpu:  # CUDA itself would load its driver, which survives no fork
        (tmp_path / "nvidia0").touch()
    assert accelerator.choose("cpu", 0, {}) == CPU
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == asks


@pytest.mark.parametrize("count", [0, 1], ids=["none seen", "counted by NVML alone"])
@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found 470)."), ConfigError),
        (RuntimeError("Found no NVIDIA driver on your system. Please\ncheck"), ConfigError),
        (None, ConfigError),
        # Another node may do better.
        (RuntimeError("CUDA unknown error - this may be due to ..."), HardwareError),
        (RuntimeError("No CUDA GPUs are available"), HardwareError),
    ],
)
def test_a_gpu_that_cannot_be_used_is_no_reason_to_train_on_the_cpu(
    gpus, monkeypatch, complaint, kind, count
):
    gpus(count if complaint else 0, complaint)
    monkeypatch.setattr(devices, "given", lambda env: True)
    with pytest.raises(kind) as error:
        accelerator.choose("auto", 0, {})
    assert type(error.value) is kind
    codes = {ConfigError: ExitCode.BAD_CONFIG, HardwareError: ExitCode.HARDWARE}
    assert exit_code_of(error.value) == codes[kind]
    words = str(complaint or "torch sees none").splitlines()[0].rstrip(".")
    assert f"no GPU can be used, though there is one: {words}. " in str(error.value)
    assert "start(device='cpu')" in str(error.value)


def test_what_no_other_node_would_do_better_is_the_users_to_mend(gpus, monkeypatch, tmp_path):
    """CUDA has the same words for it as for a GPU that is lost."""
    gpus(0, RuntimeError("No CUDA GPUs are available"))
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    with pytest.raises(ConfigError, match=r"No CUDA GPUs are available\. Ask for nvidia\.com/gpu"):
        accelerator.choose("cuda", 0, {})
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="begins with 2, GPUs here are 0 to 1: leave it out"):
        accelerator.choose("auto", 0, {"CUDA_VISIBLE_DEVICES": "2"})
    for visible in ("1", "GPU-8f7a"):
        with pytest.raises(HardwareError):
            accelerator.choose("auto", 0, {"CUDA_VISIBLE_DEVICES": visible})


def test_ranks_that_cannot_train_together():
    assert _misfit(["cpu "] * 3) == ""
    assert _misfit(["cuda GPU-a", "cuda GPU-b"]) == ""
    assert "rank 1 trains on cpu and rank 0 on cuda" in _misfit(["cuda GPU-a", "cpu "])
    assert "ranks 0 and 2 have the same GPU, GPU-a" in _misfit([f"cuda GPU-{n}" for n in "aba"])


def test_tf32_is_known_by_whichever_words_it_was_chosen():
    """cuDNN's own fp32_precision stays "none" when allow_tf32 is taken away."""
    usual = accelerator.tf32()
    places: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    for place in places:
        before = place.allow_tf32
        place.allow_tf32 = not before
        try:
            assert accelerator.tf32() != usual
        finally:
            place.allow_tf32 = before
    assert accelerator.tf32() == usual


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Waits for a GPU's streams, of which this machine needs none."""
    found: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("waited"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    return found


def test_memory_is_not_given_back_in_the_midst_of_a_copy(waits):
    device = accelerator.Cuda(torch.device("cuda", 0))
    with pytest.raises(MemoryError), device.saving(None):
        raise MemoryError  # some of the copies are under way
    assert len(waits) == 1
    with device.saving(None):
        pass
    assert len(waits) == 2


def test_sparse_and_packed_batches_get_to_the_device(waits):
    """torch cannot tell the allocator of a sparse one, record_stream(), which others need."""
    moved = accelerator.Cuda(torch.device("meta")).loaded(torch.eye(3).to_sparse())
    assert (moved.device.type, moved.layout) == ("meta", torch.sparse_coo)
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    sent = fetch.map_tensors({"x": packed}, lambda tensor: tensor.to("meta"))["x"]
    assert type(sent) is type(packed)
    assert {sent.data.device.type, sent.unsorted_indices.device.type} == {"meta"}
    assert torch.equal(sent.batch_sizes, packed.batch_sizes), "these stay on the CPU"


def test_a_registered_dict_has_its_tensors_back_on_their_devices():
    """Snapshots are read on the CPU; a script would fail on a GPU, after a resume only."""
    meta = torch.ones(2, device="meta")
    kept: dict[str, Any] = {
        "mean": meta, "deep": {"seen": [meta, 1]}, "here": torch.zeros(1), "n": 1
    }  # fmt: skip
    one = torch.ones(2)
    stored = {"mean": one, "deep": {"seen": [one, 2]}, "here": torch.ones(1), "n": 2, "new": one}
    stateful(kept).load_state_dict({"values": stored})
    assert kept["mean"].device == kept["deep"]["seen"][0].device == meta.device
    assert kept["here"] == torch.ones(1)
    assert (kept["n"], kept["deep"]["seen"][1]) == (2, 2)
    assert kept["new"] is one


VISIBLE, OF_IMAGES = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
DRIVER = ("nvidiactl", "nvidia-uvm", "nvidia-caps", "null")  # no GPU by itself
TWO = "nvidia0 nvidia1"


@pytest.mark.parametrize(
    ("names", "env", "found"),  # how many, may there be any, visible, given, misnamed
    [
        ("", {}, (0, False, 0, False, "")),
        ("nvidia10", {}, (1, True, 1, True, "")),
        ("kfd", {}, (0, True, 0, False, "")),  # AMD's does not say what to train on
        (TWO, {}, (2, True, 2, True, "")),
        (TWO, {VISIBLE: ""}, (2, True, 0, False, "")),
        ("nvidia0", {VISIBLE: "1,3"}, (1, True, 2, True, "1")),
        (TWO, {VISIBLE: "0,-1,1"}, (2, True, 1, True, "")),
        (TWO, {VISIBLE: "-1"}, (2, True, 0, False, "")),
        (TWO, {VISIBLE: "0,7"}, (2, True, 2, True, "")),
        (TWO, {VISIBLE: "2"}, (2, True, 1, True, "2")),
        (TWO, {VISIBLE: "GPU-8f7a"}, (2, True, 1, True, "")),
        ("", {VISIBLE: "2"}, (0, False, 1, False, "")),  # a shell may say so always
        ("", {OF_IMAGES: "all"}, (0, False, 0, False, "")),  # its images say so always
        ("", {OF_IMAGES: "GPU-8f7a"}, (0, False, 0, True, "")),
    ],
)
def test_what_dev_and_the_environment_say(tmp_path, monkeypatch, names, env, found):
    monkeypatch.setattr(devices, "_DEV", tmp_path / "no such folder")
    assert not devices.any_here()
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    for name in (*DRIVER, *names.split()):
        (tmp_path / name).touch()
    assert found == (
        devices.count(), devices.any_here(), devices.visible(env), devices.given(env),
        devices.misnamed(env),
    )  # fmt: skip


def test_the_drivers_version_is_that_of_its_module(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_MODULE", tmp_path / "version")
    assert devices.driver_version() == ""
    for told, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86  Release", "570.86"),
        ("something else", ""),
    ):
        (tmp_path / "version").write_text(told)
        assert devices.driver_version() == version
