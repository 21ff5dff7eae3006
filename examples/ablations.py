"""The papers' ablations at the size of one CPU: convert all sites, fine-tune shortly, change one thing at a time.

    python examples/finetune_timm.py --data cifar10 --out runs/cifar --stages softmax
    python examples/ablations.py --data cifar10 --base runs/cifar/softmax.pt --out runs/ablations
    python examples/ablations.py ... --only "T5" "no key norm"        # some of them; --resume skips finished ones

Every variant starts from the same softmax model and sees the same batches for --tune-epochs.  There is no calibration
unless the variant says so: this is the papers' way (T5, ICML 2026, its ablation tables).  ablations.csv has test
accuracy (%) at once and afterwards, and what stopped a run; ablations.png shows it.

"Inherit" says whose pretrained weights the blocks keep, attention's or the MLP's; the others begin anew.  Embedding,
norms and head are kept except from scratch.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
import data
import finetune_timm
import loop
import plots
import small_vit
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import t5fx

FIELDS = ("variant", "seed", "steps", "at_once", "accuracy", "loss", "stopped", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Variant:
    """One row: the configuration, factors on the learning rate, and a pattern of parameters that begin anew."""

    config: t5fx.TTTConfig = t5fx.T5
    new_lr_scale: float = 20.0
    inherited_lr_scale: float = 1.0
    anew: str = "$^"  # nothing
    calibrate: bool = False
    key_norm: str = "whole"  # see KeyNorm


VARIANTS = {
    "T5": Variant(),
    "no key norm": Variant(t5fx.T5.replace(key_norm=False)),
    "mean only": Variant(key_norm="mean"),
    "deviation only": Variant(key_norm="deviation"),
    "no convolutions": Variant(t5fx.T5.replace(dwc=None)),
    "neither": Variant(t5fx.T5.replace(key_norm=False, dwc=None)),
    "linear attention": Variant(configs.CONFIGS["linear"]),
    "new parameters x1": Variant(new_lr_scale=1.0),
    "new parameters x5": Variant(new_lr_scale=5.0),
    "inherit the MLP only": Variant(anew=r"\.attn\."),
    "inherit attention only": Variant(anew=r"\.mlp\."),
    "from scratch": Variant(anew=r"."),
    "inherited weights frozen": Variant(inherited_lr_scale=0.0),
    "inherited weights frozen, calibrated": Variant(inherited_lr_scale=0.0, new_lr_scale=2.0, calibrate=True),
}


class KeyNorm(TorchFunctionMode):
    """Within it key normalization only subtracts the tokens' mean, or only divides by their deviation; or is whole.

    For an ablation, in eager mode: no configuration offers the halves, no kernel has them.
    """

    def __init__(self, half: str) -> None:
        super().__init__()
        self.half = half

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.t5fx.key_norm.default or self.half == "whole":
            return function(*args, **(kwargs or {}))
        key, eps = args[:2]
        if self.half == "mean":
            return key - key.mean(2, keepdim=True)
        return key * torch.rsqrt(key.var(2, correction=0, keepdim=True) + eps)


def begin_anew(model: nn.Module, fresh: nn.Module, pattern: str) -> int:
    """Give parameters whose name matches the values of ``fresh``; returns how many."""
    values = dict(fresh.named_parameters())
    names = [name for name, _ in model.named_parameters() if re.search(pattern, name)]
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(values[name])
    return len(names)


class Ablations:
    """The data and the softmax model, and one method that makes a row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, loop.start_processes()
        self.train, self.test = data.load(args.data, size=args.size, count=args.images)
        self.table = loop.Log(args.out / "ablations.csv", FIELDS)
        self.log = loop.Log(args.out / "log.csv", ("variant", *finetune_timm.FIELDS))
        if args.resume:
            self.table.read()
            self.log.read()

    def softmax(self) -> nn.Module:
        model = small_vit.build(self.args, self.train)
        model.load_state_dict(torch.load(self.args.base, map_location="cpu"))
        return model.to(self.device, memory_format=torch.channels_last)

    def recipe(self, seed: int) -> loop.Recipe:
        return loop.Recipe(self.args.tune_epochs, self.args.batch, warm_up=0.1, seed=seed)

    def run(self, name: str, seed: int) -> None:
        """Convert, fine-tune and test one variant; a run that the guard stops is a row that says so."""
        args, variant = self.args, VARIANTS[name]
        model = self.softmax()
        fresh = small_vit.build(argparse.Namespace(**{**vars(args), "seed": seed + 1000}), self.train)
        begin_anew(model, fresh, variant.anew)
        torch.manual_seed(seed)
        example = data.normalise(self.train.batch(torch.tensor([0, 1]))).to(self.device)
        t5fx.linearize(model, t5fx.everything, config=variant.config, example_inputs=example)
        norm = KeyNorm(variant.key_norm)
        with norm:
            at_once = loop.accuracy(model, self.test, self.device)
        batches, clock = loop.Batches(self.train, self.recipe(seed), self.device), loop.Clock()
        if variant.calibrate:
            with clock.running():
                feed = (batches(step)[0] for step in range(args.calibrate_steps))
                t5fx.calibrate(model, feed, steps=args.calibrate_steps)
        groups = t5fx.param_groups(model, args.tune_lr, new_lr_scale=variant.new_lr_scale,
                                   inherited_lr_scale=variant.inherited_lr_scale, weight_decay=0.05)  # fmt: skip
        optimizer = torch.optim.AdamW(groups, fused=True)
        log, stopped, accuracy = loop.Log(args.out / "now.csv", finetune_timm.FIELDS), "", float("nan")
        with norm, t5fx.TrainingGuard(model) as guard:
            try:
                spent = loop.fit(model, optimizer, batches, stage=name, log=log, every=25, guard=guard.check,
                                 evaluate=lambda: loop.accuracy(model, self.test, self.device))  # fmt: skip
                clock = loop.Clock(clock.wall + spent.wall, clock.cpu + spent.cpu)
                accuracy = float(log.rows[-1]["accuracy"])
            except t5fx.TrainingError as error:
                stopped = str(error).splitlines()[0]
        for row in log.rows:
            self.log.add(variant=f"{name}, seed {seed}", **row)
        self.table.add(variant=name, seed=seed, steps=batches.recipe.steps(len(self.train)), at_once=at_once,
                       accuracy=accuracy, loss=float(log.rows[-1]["loss"]) if log.rows else float("nan"),
                       stopped=stopped, seconds=clock.wall, cpu_seconds=clock.cpu)  # fmt: skip
        print(f"{name}, seed {seed}: {at_once:.2f} % at once, {accuracy:.2f} % after {stopped or 'all steps'}")

    def plot(self) -> None:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in self.log.rows:
            lines.setdefault(row["variant"], []).append((float(row["step"]), float(row["loss"])))
        reached: dict[str, list[float]] = {}
        for row in self.table.rows:
            reached.setdefault(row["variant"], []).append(0.0 if row["stopped"] else float(row["accuracy"]))
        results = {name: sum(values) / len(values) for name, values in reached.items()}
        plots.losses_and_results(self.args.out / "ablations.png", lines, results, across="step", loss="loss",
                                 result="accuracy, % (0: stopped by the guard)", form="%.2f")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="cifar10", help="as in finetune_timm.py (default: %(default)s)")
    add("--model", default="small", help="as in finetune_timm.py (default: %(default)s)")
    add("--base", type=Path, required=True, help="softmax.pt of finetune_timm.py")
    add("--width", type=int, default=96)
    add("--depth", type=int, default=6)
    add("--size", type=int)
    add("--out", type=Path, required=True, help="folder for the table, the log and the plot")
    add("--only", nargs="*", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}")  # fmt: skip
    add("--tune-epochs", type=float, default=0.5, help="(default: %(default)s)")
    add("--tune-lr", type=float, default=3e-4, help="of inherited weights (default: %(default)s)")
    add("--calibrate-steps", type=int, default=200, help="of variants that calibrate (default: %(default)s)")
    add("--batch", type=int, default=128)
    add("--seed", type=int, default=0, help="of the softmax model")
    add("--seeds", type=int, default=1, help="how many seeds of new parameters and batches (default: %(default)s)")
    add("--resume", action="store_true", help="skip the rows that are in ablations.csv")
    add("--images", type=int, help="use only so many of the images (to try things out)")
    args = parser.parse_args(arguments)
    args.pretrained = False
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    ablations = Ablations(args)
    done = {(row["variant"], row["seed"]) for row in ablations.table.rows}
    for seed in range(args.seeds):
        for name in args.only:
            if (name, str(seed)) not in done:
                ablations.run(name, seed)
                ablations.plot()


if __name__ == "__main__":
    sys.exit(main())
