"""examples/recipes: each file as its reader starts it, and what it is there to show."""

import re

import pytest

from support.scripts import numbers, show

pytestmark = pytest.mark.tier("all")


def test_bf16_computes_in_16_bits_and_keeps_32():
    out = show("recipes/mixed_precision.py", "--total-steps", "20", nproc=2)
    assert "layers give torch.bfloat16" in out
    assert "outputs torch.float32, parameters torch.float32" in out
    assert numbers("accuracy=", out)[0] > 0.8


def test_fp16_leaves_an_update_out_that_overflowed_on_one_rank():
    arguments = ("--precision", "fp16", "--overflow-at", "5", "--total-steps", "20")
    out = show("recipes/mixed_precision.py", *arguments, nproc=2)
    assert "overflow on the last rank: update left out: True, scale now 2048" in out
    assert "layers give torch.float16" in out
    assert numbers("accuracy=", out)[0] > 0.8


def test_images_from_folders(tmp_path):
    data = tmp_path / "images"
    out = show("recipes/images.py", "--data", str(data), "--epochs", "4", nproc=2)
    epochs = re.findall(r"^epoch (\d)/4 top1=([\d.]+) top5=([\d.]+)( best)?$", out, re.MULTILINE)
    assert [int(number) for number, *_ in epochs] == [1, 2, 3, 4]
    top1 = [float(one) for _, one, _, _ in epochs]
    assert top1[-1] > 0.8, "0.1 is chance"
    assert all(float(five) >= float(one) for _, one, five, _ in epochs)
    best = [bool(mark) for *_, mark in epochs]
    assert best == [one > max(top1[:n], default=-1) for n, one in enumerate(top1)]
    assert (data / "best.safetensors").stat().st_size > 0
    assert len(list((data / "train").iterdir())) == 10


def test_whose_batchnorm_buffers_count():
    out = show("recipes/batchnorm.py", nproc=3)
    first = numbers("DDP, broadcast_buffers=True : running means", out)
    assert first == pytest.approx([0, 0.1, 0.2], abs=0.08), "rank 0's, and one batch of one's own"
    own = numbers("DDP, broadcast_buffers=False: running means", out)
    assert own == pytest.approx([0, 0.65, 1.3], abs=0.08), "each rank's own"
    assert len(set(numbers("ours, after the last step  : running means", out))) > 1
    assert len(set(numbers("ours, after evaluate\\(\\)     : running means", out))) == 1
    assert "SyncBatchNorm refuses      : SyncBatchNorm expected input tensor to be on GPU" in out
    assert "ours, sync_batchnorm=True  : SyncBatchNorm and training on the CPU do not go" in out


def test_uneven_inputs_are_exact_with_weights_and_not_with_join():
    out = show("recipes/uneven.py", nproc=3)
    words = ": off the one process's weights by"
    assert numbers(f"weight 0{words}", out)[0] < 1e-6
    for ranks in ("all", "present"):
        assert numbers(f"Join, divided by {ranks} ranks{words}", out)[0] > 1e-3


def test_a_model_on_two_devices():
    out = show("recipes/two_devices.py", nproc=2)
    assert "device_ids=[0]: DistributedDataParallel device_ids and output_device arguments" in out
    assert numbers("last loss", out)[0] < 0.1 * numbers("first loss", out)[0]
    assert "2 ranks have equal weights" in out


def test_compressing_hooks_halve_the_bytes_and_round():
    out = show("recipes/comm_hooks.py", nproc=3)
    for scale in ("1", "1e-05"):
        full, bf16, fp16 = (
            numbers(rf"{hook}_hook +gradients x {scale} *:", out)
            for hook in ("allreduce", "bf16_compress", "fp16_compress")
        )
        assert (full[1], bf16[0], fp16[0]) == (0, full[0] / 2, full[0] / 2)
        assert 0 < bf16[1] < 0.01
        assert 0 < fp16[1] < 0.01 if scale == "1" else fp16[2] > 10, "too small for fp16"


def test_many_small_layers_travel_in_few_all_reduces():
    out = show("recipes/rnn.py", nproc=2)
    assert numbers("35 parameters, default buckets:", out) == [1]
    assert numbers("35 parameters, one per parameter:", out) == [35]
    last, nothing = numbers("last_loss=", out)
    assert last < 0.5 * nothing


def test_backends_and_interfaces():
    out = show("recipes/network.py", nproc=2, env={"GLOO_SOCKET_IFNAME": "lo,lo"})
    assert "gloo" in re.findall("^backends in this PyTorch: (.*)$", out, re.MULTILINE)[0].split()
    assert "chosen: gloo over lo,lo" in out
