"""Train, convert, calibrate and fine-tune an image classifier of timm.

    python examples/finetune_timm.py --data cifar10 --out runs/cifar            # a small ViT, from nothing
    python examples/finetune_timm.py --model vit_small_patch16_224 --pretrained --data my/folder --out runs/mine
    torchrun --nproc_per_node 2 examples/finetune_timm.py --fsdp --out ...      # the same on two processes
    python examples/finetune_timm.py --out runs/cifar --resume                  # go on where it stopped

Stages, in order (``--stages`` names those to run, each needs what those before it left in ``--out``):

    softmax      train the model as it is                                       -> softmax.pt
    control      train it on for --tune-epochs, to compare                      -> control.pt
    convert      attention of --select becomes TTT, or --config linear: no TTT   -> converted/
    calibrate    the new weights learn what softmax attention gave; no labels   -> calibrated/
    finetune     all weights, for --tune-epochs                                 -> finetuned/
    presets      calibrate each of some configurations on each of --seeds       -> presets.csv

Folders are for ``t5fx.load``.  log.csv has losses, accuracies (%) and seconds; log.png shows them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import loop
import torch
from configs import CANDIDATES, CONFIGS, NAMED
from plots import losses_and_results
from safetensors.torch import load_file
from small_vit import build
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import t5fx

FIELDS = ("stage", "step", "epoch", "loss", "accuracy", "seconds", "cpu_seconds")
STAGES = ("softmax", "control", "convert", "calibrate", "finetune", "presets")


def softmax_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """As t5fx.param_groups: biases and norms are not decayed."""
    groups = []
    for decayed in (True, False):
        chosen = [p for p in model.parameters() if p.requires_grad and (p.dim() > 1) == decayed]
        groups.append({"params": chosen, "lr": lr, "weight_decay": weight_decay if decayed else 0.0})
    return groups


class Run:
    """The stages.  Between them a model is plain and whole; within one it may be wrapped or sharded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, loop.start_processes()
        self.train, self.test = data.load(args.data, size=args.size, count=args.images)
        self.log = loop.Log(args.out / "log.csv", FIELDS)
        self.checkpoint = args.out / "checkpoint.pt"
        self.resume: dict[str, Any] | None = None
        if args.resume and self.checkpoint.exists():
            self.resume = torch.load(self.checkpoint, map_location="cpu", weights_only=False)
        elif args.resume:
            self.log.read()

    # -- models -----------------------------------------------------------------------------------------------

    def base(self) -> nn.Module:
        """The softmax model, as trained if it was."""
        model = build(self.args, self.train)
        path = self.args.base or self.args.out / "softmax.pt"
        if path.suffix == ".safetensors":
            state = checkpoint_filter_fn({k: v.float() for k, v in load_file(path).items()}, model)
            missing = model.load_state_dict(state, strict=False).missing_keys
            if any(not name.startswith("head.") for name in missing):
                raise SystemExit(f"{path} does not fit --model {self.args.model}: it lacks {missing[0]}")
        elif path.exists():
            model.load_state_dict(torch.load(path, map_location="cpu"))
        elif not self.args.pretrained:
            raise SystemExit(f"{path} is missing: run the stage softmax first, or pass --base or --pretrained")
        return model.to(self.device, memory_format=torch.channels_last)

    def load(self, *names: str) -> nn.Module:
        """The first of the converted models of these names that is there."""
        for name in names:
            if (self.args.out / name).is_dir():
                inner = NAMED[self.args.config].inner
                inner = None if isinstance(inner, str) else inner  # the recipe knows those by name
                return t5fx.load(build(self.args, self.train), self.args.out / name, inner=inner).to(self.device)
        raise SystemExit(f"{self.args.out} holds none of {', '.join(names)}: run the stage convert first")

    def select(self, model: nn.Module) -> Any:
        """--select as a selector: all, half, easiest (the half that measures best), or a glob of site names."""
        if self.args.select == "easiest":
            batches = self.unlabelled(loop.Recipe(1, self.args.calibrate_batch, seed=self.args.seed + 200))
            scores = t5fx.sensitivity(model, batches, steps=self.args.calibrate_steps, lr=self.args.calibrate_lr,
                                      config=NAMED[self.args.config], example_inputs=self.example())  # fmt: skip
            if loop.world()[0] == 0:
                print(scores)
            return t5fx.easiest(0.5, scores)
        known = {"all": t5fx.everything, "half": t5fx.every_other}
        return known.get(self.args.select) or t5fx.names(self.args.select)

    def example(self) -> Tensor:
        return data.normalise(self.train.batch(torch.tensor([0, 1]))).to(self.device)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """For several processes: sharded block by block, or a copy in each."""
        if loop.world()[1] == 1:
            return model
        if not self.args.fsdp:
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        model.to(memory_format=torch.contiguous_format)  # it shards no others
        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        return fully_shard(model)

    def save(self, model: nn.Module, name: str) -> None:
        """As a file of weights, or a folder for t5fx.load; the first process writes it, whatever the model is in."""
        whole = dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True, cpu_offload=True))
        if loop.world()[0] == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            if name.endswith(".pt"):
                torch.save(whole, self.args.out / name)
            else:
                plain = self.load("converted") if name != "converted" else model
                plain.load_state_dict(whole)
                t5fx.save(plain, self.args.out / name)
        if loop.world()[1] > 1:
            torch.distributed.barrier()

    # -- stages -----------------------------------------------------------------------------------------------

    def softmax(self) -> None:
        model = build(self.args, self.train).to(self.device, memory_format=torch.channels_last)
        self.fit(model, "softmax", self.args.epochs, self.args.lr)
        # Written by fit.

    def control(self) -> None:
        self.fit(self.base(), "control", self.args.tune_epochs, self.args.tune_lr)

    def convert(self) -> None:
        model = self.base()
        torch.manual_seed(self.args.seed)
        t5fx.linearize(model, self.select(model), config=NAMED[self.args.config], example_inputs=self.example())
        self.save(model, "converted")
        self.note("convert", model)

    def calibrate(self) -> None:
        args, clock = self.args, loop.Clock()
        model = self.load("converted")
        recipe = loop.Recipe(1, args.calibrate_batch, amp=args.amp, seed=args.seed + 100)
        run = self.wrapped(model)
        with clock.running(), recipe.autocast(self.device):
            done = t5fx.calibrate(run, self.unlabelled(recipe), steps=args.calibrate_steps, lr=args.calibrate_lr)
        loop.log_calibration(self.log, done, clock, len(self.train) / args.calibrate_batch)
        if loop.world()[0] == 0:
            print(done)
        self.save(run, "calibrated")
        self.note("calibrated", run, clock)

    def finetune(self) -> None:
        self.fit(self.load("calibrated", "converted"), "finetune", self.args.tune_epochs, self.args.tune_lr)

    def presets(self) -> None:
        """Mean over the sites of the relative error after calibration, for each configuration and seed."""
        args = self.args
        table = loop.Log(args.out / "presets.csv", ("config", "seed", "steps", "batch", "error", "worst", "accuracy"))
        model = self.base()
        for seed in range(args.seeds):
            for name, config in CANDIDATES.items():
                if args.only and not any(word == name for word in args.only):
                    continue
                torch.manual_seed(seed)
                t5fx.linearize(model, t5fx.everything, config=config, example_inputs=self.example())
                batches = self.unlabelled(loop.Recipe(1, args.batch, seed=seed))
                try:
                    done = t5fx.calibrate(model, batches, steps=args.calibrate_steps, lr=args.calibrate_lr)
                    # Weights of a backbone alone come without a head.
                    headless = args.base is not None and args.base.suffix == ".safetensors"
                    accuracy = "" if headless else loop.accuracy(model, self.test, self.device)
                    table.add(config=name, seed=seed, steps=args.calibrate_steps, batch=args.batch, error=done.mean,
                              worst=max(done.last.values()), accuracy=accuracy)  # fmt: skip
                except t5fx.TrainingError as error:
                    print(f"{name}: {error}")
                    table.add(config=name, seed=seed, steps=args.calibrate_steps, batch=args.batch)
                t5fx.revert(model)

    # -- parts of stages --------------------------------------------------------------------------------------

    def unlabelled(self, recipe: loop.Recipe) -> Iterator[Tensor]:
        batches, step = loop.Batches(self.train, recipe, self.device), 0
        while True:
            yield batches(step)[0]
            step += 1

    def fit(self, model: nn.Module, stage: str, epochs: float, lr: float) -> None:
        args = self.args
        run = self.wrapped(model)
        if args.compile:
            run.compile(backend="t5")  # in place: names of parameters stay; without sites it is Inductor
        converted = stage == "finetune"
        if converted:
            groups = t5fx.param_groups(model, lr, new_lr_scale=args.new_lr_scale, weight_decay=args.weight_decay)
        else:
            groups = softmax_groups(model, lr, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, fused=not args.fsdp)
        recipe = loop.Recipe(epochs, args.batch, args.warm_up, mixup=args.mixup, amp=args.amp,
                             seed=args.seed + 100 * STAGES.index(stage))  # fmt: skip
        guard = t5fx.TrainingGuard(model) if converted else None
        resume = self.resume if self.resume is not None and self.resume["stage"] == stage else None
        self.resume = None if resume is not None else self.resume
        loss = self.distilled if converted and args.distill else loop.cross_entropy
        loop.fit(run, optimizer, loop.Batches(self.train, recipe, self.device), stage=stage, log=self.log, loss=loss,
                 checkpoint=self.checkpoint, resume=resume, evaluate=lambda: loop.accuracy(run, self.test, self.device),
                 guard=guard.check if guard is not None else None)  # fmt: skip
        if guard is not None:
            guard.remove()
        self.save(run, "finetuned" if converted else f"{stage}.pt")

    def distilled(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, and the distance of the last features from those of the softmax model."""
        if not hasattr(self, "teacher"):
            self.teacher = self.base().eval().requires_grad_(False)
        features = model.forward_features(images)
        with torch.no_grad():
            wanted = self.teacher.forward_features(images)
        entropy = nn.functional.cross_entropy(model.forward_head(features).float(), labels)
        return entropy + t5fx.distill_loss(features=(features, wanted), feature_weight=self.args.distill)

    def note(self, stage: str, model: nn.Module, clock: loop.Clock | None = None) -> None:
        clock = clock or loop.Clock()
        reached = loop.accuracy(model, self.test, self.device)
        self.log.add(stage=stage, accuracy=reached, seconds=clock.wall, cpu_seconds=clock.cpu)
        if loop.world()[0] == 0:
            print(f"{stage}: {reached:.2f} %")

    def plot(self) -> None:
        rows = self.log.rows
        lines: dict[str, list[tuple[float, float]]] = {}
        reached: dict[str, float] = {}
        for row in rows:
            if row["loss"]:
                lines.setdefault(row["stage"], []).append((float(row["cpu_seconds"]), float(row["loss"])))
            if row["accuracy"] not in ("", "nan"):
                reached[row["stage"]] = float(row["accuracy"])
        if loop.world()[0] == 0 and reached:
            losses_and_results(self.args.out / "log.png", lines, reached, across="CPU seconds", loss="loss",
                               result="accuracy, %", form="%.2f")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="cifar10", help="cifar10, fashion, or a folder with train/ and val/ (default: %(default)s)")
    add("--model", default="small", help='"small", or any name that timm.create_model takes (default: %(default)s)')
    add("--pretrained", action="store_true", help="timm's weights (a download)")
    add("--base", type=Path, help="weights of the softmax model, if not softmax.pt in --out; or safetensors of timm")
    add("--width", type=int, default=96, help="of the small model (default: %(default)s)")
    add("--depth", type=int, default=6, help="of the small model (default: %(default)s)")
    add("--size", type=int, help="scale images to this many pixels (default: 224 for a folder, else what they are)")
    add("--out", type=Path, required=True, help="folder for logs, checkpoints and models")
    add("--stages", default="softmax,control,convert,calibrate,finetune", help="(default: %(default)s)")
    add("--select", default="all", help="all, half (every other), easiest (half), a glob (default: %(default)s)")
    add("--config", default="calibrated", choices=NAMED, metavar="NAME",
        help=f"what a site becomes: {', '.join(CONFIGS)}, or as the stage presets calls it (default: %(default)s)"
        )  # fmt: skip
    add("--epochs", type=float, default=7, help="of softmax training (default: %(default)s)")
    add("--batch", type=int, default=128, help="of all processes together (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="of softmax training (default: %(default)s)")
    add("--calibrate-steps", type=int, default=400, help="(default: %(default)s)")
    add("--calibrate-batch", type=int, default=32, help="many small steps beat few large ones (default: %(default)s)")
    add("--calibrate-lr", type=float, default=1e-2, help="(default: %(default)s)")
    add("--tune-epochs", type=float, default=0.5, help="of fine-tuning and of the control (default: %(default)s)")
    add("--tune-lr", type=float, default=3e-4, help="(default: %(default)s)")
    add("--new-lr-scale", type=float, default=2.0, help="new parameters learn faster by this; papers: 20 "
        "(default: %(default)s)")  # fmt: skip
    add("--distill", type=float, default=0.0, help="fine-tuning: weight of the distance of the last features from the "
        "softmax model's; one process, models with forward_features (default: %(default)s)")  # fmt: skip
    add("--weight-decay", type=float, default=0.05, help="(default: %(default)s)")
    add("--warm-up", type=float, default=0.1, help="share of the steps (default: %(default)s)")
    add("--mixup", type=float, default=0.0, help="parameter of the beta distribution; 0 is none")
    add("--amp", choices=("none", "bf16", "fp16"), default="none", help="autocast (default: %(default)s)")
    add("--compile", action="store_true", help='train under torch.compile(backend="t5")')
    add("--fsdp", action="store_true", help="under torchrun: shard the model with FSDP2 instead of DDP")
    add("--seed", type=int, default=0)
    add("--seeds", type=int, default=2, help="of the stage presets (default: %(default)s)")
    add("--only", nargs="*", help="of the stage presets: these configurations")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--images", type=int, help="use only so many of the images (to try things out)")
    args = parser.parse_args(arguments)
    args.stages = args.stages.split(",")
    if args.distill and "LOCAL_RANK" in os.environ:
        parser.error("--distill calls parts of the model, which DDP and FSDP don't see: use one process")
    if unknown := [name for name in args.stages if name not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    run = Run(args)
    stages = args.stages
    if run.resume is not None and run.resume["stage"] in stages:
        stages = stages[stages.index(run.resume["stage"]) :]
    for stage in stages:
        getattr(run, stage)()
        run.plot()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
