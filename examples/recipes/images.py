"""Classify images from a folder of classes, as the ImageNet scripts do: epochs, top-1, top-5, best.

    ddpjob-trainer run --nproc 2 images.py --data /tmp/images --epochs 8

The folder is DATA/{train,val}/CLASS/NAME.ppm, one folder per class. Where there is none, the script
makes one, of drawings in ten classes. Files are read with numpy alone; for JPEG put torchvision's
ImageFolder in the place of Folder, and leave the rest. Lines that use `ddp` or `run` are ddpjob's,
the rest is PyTorch.
"""

import argparse
import os
import re
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("/tmp/images"), help="folder (/tmp/images)")
parser.add_argument("--epochs", type=int, default=8, help="passes over the training set (8)")
parser.add_argument("--global-batch", type=int, default=64, help="images per step (64)")
parser.add_argument("--workers", type=int, default=0, help="processes per rank that read (0)")
args = parser.parse_args()
SIZE, CROP = 20, 16


def draw_folders(root: Path, per_class: int = 60) -> None:
    """Ten patterns in random colours, shifted and noisy: something to learn, not at once."""
    random = numpy.random.default_rng(7)
    y, x = numpy.mgrid[0:SIZE, 0:SIZE]
    for label in range(10):
        for number in range(per_class):
            dx, dy = random.integers(-3, 4, 2)
            angle, period = numpy.pi * (label % 5) / 5, 5 if label < 5 else 9
            along = numpy.cos(angle) * (x + dx) + numpy.sin(angle) * (y + dy)
            stripes = numpy.sin(2 * numpy.pi * along / period) > 0
            picture = stripes[..., None] * random.uniform(0.4, 1, 3) * 255
            picture = (picture + random.normal(0, 60, picture.shape)).clip(0, 255)
            part = "val" if number % 5 == 0 else "train"
            path = root / part / f"stripes{label}" / f"{number:03}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            head = f"P6 {SIZE} {SIZE} 255\n".encode()
            path.write_bytes(head + picture.astype(numpy.uint8).tobytes())


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """The images below a folder; classes are its subfolders, in the order of their names."""

    def __init__(self, root: Path, *, augment: bool) -> None:
        self.classes = sorted(path.name for path in root.iterdir())
        self.files = sorted(root.glob("*/*.ppm"))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.files[index]
        raw = path.read_bytes()
        head = re.match(rb"P6\s+(\d+)\s+(\d+)\s+255\s", raw)
        assert head is not None, f"{path} is no binary PPM"
        pixels = numpy.frombuffer(raw, numpy.uint8, offset=head.end())
        image = torch.from_numpy(pixels.reshape(int(head[2]), int(head[1]), 3).copy())
        image = image.permute(2, 0, 1).float() / 127.5 - 1
        room = image.shape[1] - CROP
        top = left = room // 2
        if self.augment:  # random numbers are a function of (seed, position): a resume draws these
            top, left = torch.randint(room + 1, (2,)).tolist()
            image = image * (0.8 + 0.4 * torch.rand(3, 1, 1))  # colour; a flip would be a new class
        image = image[:, top : top + CROP, left : left + CROP]
        return image, self.classes.index(path.parent.name)


if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not args.data.exists():
    unfinished = args.data.with_name(args.data.name + ".unfinished")
    draw_folders(unfinished)
    unfinished.rename(args.data)  # there whole or not at all
while not args.data.exists():  # this machine's first process draws
    time.sleep(0.05)
train_set = Folder(args.data / "train", augment=True)
val_set = Folder(args.data / "val", augment=False)

per_epoch = ddp.steps_per_epoch(train_set, args.global_batch)
total_steps = args.epochs * per_epoch
logging = ddp.Logging(every=per_epoch)
run = ddp.start(total_steps=total_steps, global_batch=args.global_batch, logging=logging)


def block(width: int, out: int) -> nn.Sequential:
    conv = nn.Conv2d(width, out, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())


classes = len(train_set.classes)
head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, classes))
model = nn.Sequential(block(3, 16), block(16, 32), block(32, 64), *head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)
model, optimizer = run.prepare(model, optimizer, scheduler=schedule)


def right(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    images, labels = batch
    hits = module(images).topk(5).indices == labels[:, None]
    return {"top1": hits[:, 0].sum(), "top5": hits.sum()}


# In a DDPJob the snapshots' volume is where files outlive the pods.
best = Path(os.environ.get("DDPJOB_SNAPSHOT_DIR", args.data), "best.safetensors")
for step in run.steps(train_set, workers=args.workers):
    for images, labels in step.batches:
        step.backward(nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1))
    step.commit()
    if (step.index + 1) % per_epoch == 0:  # the shares of all ranks, each image once
        found = {k: n / len(val_set) for k, n in run.evaluate(val_set, right).items()}
        is_best = run.keep_best(found["top1"], best, mode="max")
        if run.is_main:
            mark = " best" if is_best else ""
            top = f"top1={found['top1']:.3f} top5={found['top5']:.3f}"
            print(f"epoch {step.epoch + 1}/{args.epochs} {top}{mark}", flush=True)
run.finish()
