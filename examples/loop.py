"""What the examples share: one training loop, its checkpoints, its CSV log and its plot.

The loop is the same alone, under DDP and under FSDP2: all processes draw the same random order and the same changes of
the images, each takes its rows of the batch, and gradients and losses are averaged.  A checkpoint holds plain full
tensors by name, so it can be continued by another number of processes, and continued by as many it is bit-equal.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Images, augment, normalise
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import t5fx


def world() -> tuple[int, int]:
    """(rank, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def start_processes() -> torch.device:
    """Join the processes of ``torchrun``, if it started this one; returns this process's device."""
    cuda = torch.cuda.is_available()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    return torch.device("cuda" if cuda else "cpu")


@dataclass
class Recipe:
    """How ``fit`` trains.  ``epochs`` may be a fraction, ``warm_up`` is a share of all steps, ``amp`` is none, bf16 or
    fp16."""

    epochs: float
    batch: int = 128
    warm_up: float = 0.1
    smoothing: float = 0.1
    mixup: float = 0.0
    clip: float = 1.0
    amp: str = "none"
    seed: int = 0

    def steps(self, images: int) -> int:
        return max(1, round(self.epochs * (images // self.batch)))

    def autocast(self, device: torch.device) -> torch.autocast:
        dtype = torch.float16 if self.amp == "fp16" else torch.bfloat16
        return torch.autocast(device.type, dtype, enabled=self.amp != "none")


def rate(done: float, warm_up: float) -> float:
    """Factor on the learning rate when the share ``done`` of the steps is reached: a line up, then a half cosine."""
    if done <= warm_up:
        return done / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (done - warm_up) / (1 - warm_up))


class Batches:
    """This process's rows of batch ``step``, changed at random: the same numbers whatever came before."""

    def __init__(self, images: Images, recipe: Recipe, device: torch.device) -> None:
        self.images, self.recipe, self.device = images, recipe, device
        self.rank, self.processes = world()
        if recipe.batch % self.processes:
            raise SystemExit(f"--batch {recipe.batch} can't be shared by {self.processes} processes: take a multiple")

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """normalised images [B, ...] and soft labels [B, classes]."""
        recipe, per_epoch = self.recipe, len(self.images) // self.recipe.batch
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(recipe.seed * 10007 + epoch))
        chosen = order[at * recipe.batch : (at + 1) * recipe.batch]
        generator = torch.Generator().manual_seed((recipe.seed * 10007 + step) * 2 + 1)
        rows = recipe.batch // self.processes
        start = self.rank * rows
        mine = chosen[start : start + rows]
        images, labels = self._load(mine, generator, start)
        if recipe.mixup:
            weight = random.Random(recipe.seed * 10007 + step).betavariate(recipe.mixup, recipe.mixup)
            other, other_labels = self._load(chosen.roll(1)[start : start + rows], generator, start)
            images, labels = torch.lerp(other, images, weight), torch.lerp(other_labels, labels, weight)
        return images.to(self.device, memory_format=torch.channels_last), labels.to(self.device)

    def _load(self, indices: Tensor, generator: torch.Generator, start: int) -> tuple[Tensor, Tensor]:
        images = augment(self.images.batch(indices), generator, start=start, total=self.recipe.batch)
        classes = len(self.images.classes)
        hot = nn.functional.one_hot(self.images.labels[indices], classes).float()
        smooth = self.recipe.smoothing
        return normalise(images), hot * (1 - smooth) + smooth / classes


class Log:
    """Rows of a CSV file, written by the first process only.  ``rows`` are those so far, as text."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self.path, self.fields = path, list(fields)
        self.rows: list[dict[str, str]] = []

    def add(self, **values: Any) -> None:
        shown = {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in values.items()}
        self.rows.append({name: shown.get(name, "") for name in self.fields})
        self._write()

    def keep(self, rows: Sequence[dict[str, str]]) -> None:
        """Begin again with the rows of a checkpoint."""
        self.rows = [dict(row) for row in rows]
        self._write()

    def read(self) -> None:
        """Go on with the rows that an earlier run left in the file."""
        if self.path.exists():
            with open(self.path, newline="") as file:
                self.rows = list(csv.DictReader(file))

    def _write(self) -> None:
        if world()[0]:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, self.fields)
            writer.writeheader()
            writer.writerows(self.rows)


@contextlib.contextmanager
def bar(total: int, text: str) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on the first process; ``tick(done, text)`` moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, disable=world()[0] != 0) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done, text: progress.update(task, completed=done, description=text)


_FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **rest: Any) -> None:
    """Full tensors by name, whatever the model is wrapped or sharded in; all processes must call this."""
    state, moments = dcp.get_state_dict(model, optimizer, options=_FULL)
    if world()[0] == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": state, "optimizer": moments, **rest}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # whoever looks meanwhile, or after a crash, finds a whole one
    if world()[1] > 1:
        dist.barrier()


def restore(checkpoint: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.set_state_dict(
        model, optimizer, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"], options=_FULL
    )


@dataclass
class Clock:
    """Seconds of training, without evaluation: ``wall``, and of the CPU, which others can't take away.

    The CPU's seconds are those of this process and of the compilers that it started and that have ended.
    """

    wall: float = 0.0
    cpu: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), _cpu()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += _cpu() - cpu


def _cpu() -> float:
    return sum(os.times()[:4])


def log_calibration(log: Log, done: t5fx.Calibration, clock: Clock, batches: float) -> None:
    """A row for every ten steps: the sites' mean error; ``batches`` are those of an epoch."""
    steps = len(done.errors)
    for first in range(0, steps, 10):
        rows, last = done.errors[first : first + 10], min(first + 10, steps)
        log.add(stage="calibrate", step=last, epoch=last / batches, loss=sum(map(sum, rows)) / sum(map(len, rows)),
                seconds=clock.wall * last / steps, cpu_seconds=clock.cpu * last / steps)  # fmt: skip


def cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images).float(), labels)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    stage: str,
    log: Log,
    evaluate: Callable[[], float],
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy,
    checkpoint: Path | None = None,
    resume: dict[str, Any] | None = None,
    every: int = 100,
    guard: Callable[[Tensor], None] | None = None,
) -> Clock:
    """Train for ``batches.recipe``; ``model`` may be wrapped.  Logs the mean loss of every ``every`` steps, and the
    accuracy and writes a checkpoint after every epoch.  ``resume``: such a checkpoint."""
    recipe, device = batches.recipe, batches.device
    steps, per_epoch = recipe.steps(len(batches.images)), len(batches.images) // recipe.batch
    peaks = [group.setdefault("peak", group["lr"]) for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    clock, first, total, count = Clock(), 0, 0.0, 0
    if resume is not None:
        restore(resume, model, optimizer)
        first, clock = resume["step"], Clock(resume["wall"], resume["cpu"])
        scaler.load_state_dict(resume["scaler"])
        log.keep(resume["rows"])
    with bar(steps, stage) as tick:
        for step in range(first, steps):
            with clock.running():
                model.train()
                # Dropout and the like: a function of the step, so that a checkpoint needs no random state.
                torch.manual_seed((recipe.seed * 10007 + step) * batches.processes + batches.rank)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate((step + 1) / steps, recipe.warm_up)
                images, labels = batches(step)
                with recipe.autocast(device):
                    value = loss(model, images, labels)
                optimizer.zero_grad()
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                scaler.step(optimizer)
                scaler.update()
                if guard is not None:
                    guard(value)
            total, count = total + mean(value), count + 1
            tick(step + 1, f"{stage} loss {total / count:.3f}")
            last = step + 1 == steps
            whole = (step + 1) % per_epoch == 0 or last
            if (step + 1) % every == 0 or whole:
                accuracy = evaluate() if whole else float("nan")
                log.add(stage=stage, step=step + 1, epoch=(step + 1) / per_epoch, loss=total / count,
                        accuracy=accuracy, seconds=clock.wall, cpu_seconds=clock.cpu)  # fmt: skip
                total, count = 0.0, 0
            if whole and checkpoint is not None:
                save_checkpoint(checkpoint, model, optimizer, stage=stage, step=step + 1, wall=clock.wall,
                                cpu=clock.cpu, scaler=scaler.state_dict(), rows=log.rows)  # fmt: skip
    model.eval()
    return clock


def mean(value: Tensor) -> float:
    """Of all processes."""
    value = value.detach().float().clone()
    if world()[1] > 1:
        dist.all_reduce(value)
        value /= world()[1]
    return float(value)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # the code of a compiled model is for other shapes
def accuracy(model: nn.Module, images: Images, device: torch.device, batch: int = 500) -> float:
    """In % of ``images``; each process takes its share."""
    model.eval()
    rank, processes = world()
    right = torch.zeros((), device=device)
    # As many batches in every process: a sharded model gathers its weights in each of its calls.
    rounds = math.ceil(len(images) / (batch * processes))
    for turn in range(rounds):
        start = min((turn * processes + rank) * batch, len(images))
        chosen = torch.arange(start, min(start + batch, len(images)))
        some = chosen if len(chosen) else torch.tensor([0])
        pixels = normalise(images.batch(some)).to(device, memory_format=torch.channels_last)
        hit = model(pixels).argmax(1).cpu() == images.labels[some]
        right += hit.sum().to(device) if len(chosen) else 0
    if processes > 1:
        dist.all_reduce(right)
    return 100 * float(right) / len(images)
