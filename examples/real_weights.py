"""Convert a pretrained ViT-S/14, calibrate it, distill its features, and compare linear probes on CIFAR-10.

    python examples/real_weights.py --weights vit_small_patch14_dinov2.safetensors --out runs/real-all
    python examples/real_weights.py --weights ... --out runs/real-half --select every_other
    python examples/real_weights.py --weights ... --out runs/real-all --resume      # go on where it stopped

No labels are used but by the probe: a logistic regression on the class token's features, each standardised.  The
images that calibrate and distill are CIFAR-10's training images that the probe does not see, made ``--size`` pixels
wide.
``--weights`` is a safetensors file in timm's names for vit_small_patch14_dinov2 at 518 pixels.  In ``--out`` are the
converted models (for t5fx.load), log.csv, probe.csv and curves.png.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import data
import loop
import plots
import timm
import torch
from safetensors.torch import load_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import t5fx

NAME = "vit_small_patch14_dinov2"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Stages, and the models that they make.
STAGES = {"original": "original", "convert": "converted", "calibrate": "calibrated", "distill": "distilled"}
FIELDS = ("stage", "step", "loss", "seconds", "cpu_seconds")
TABLE = ("model", "accuracy", "cosine", "error", "seconds", "cpu_seconds")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pretrained(weights: Path, size: int, **sizes: int) -> nn.Module:
    """The model of the file, for images of ``size`` pixels.  ``sizes``: of another than ViT-S."""
    state = load_file(weights)
    whole = timm.create_model(NAME, img_size=518, num_classes=0, **sizes)
    whole.load_state_dict({k: v.float() for k, v in state.items()})  # strict: every tensor fits
    state = whole.state_dict()
    model = timm.create_model(NAME, img_size=size, num_classes=0, **sizes)
    state["pos_embed"] = resized(state["pos_embed"], model.patch_embed.grid_size)
    model.load_state_dict(state)
    return model.eval().to(DEVICE)


def resized(embedding: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position embedding [1, 1 + N * N, width] of a class token and a square, for another grid; plain bicubic."""
    token, square = embedding[:, :1], embedding[:, 1:]
    side = round(square.shape[1] ** 0.5)
    square = square.unflatten(1, (side, side)).movedim(-1, 1)
    square = nn.functional.interpolate(square, grid, mode="bicubic")
    return torch.cat([token, square.flatten(2).mT], dim=1)


def pixels(images: Tensor, size: int) -> Tensor:
    """uint8 [B, 3, 32, 32] -> float32 [B, 3, size, size] as the model takes them."""
    large = nn.functional.interpolate(images.float() / 255, size=(size, size), mode="bicubic")
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return ((large - mean) / std).to(DEVICE)


def feature_loss(got: Tensor, wanted: Tensor, std: Tensor) -> Tensor:
    """Relative squared difference of final tokens [B, 1 + N, width]: the class token counts as much as all patches.

    In units of ``std`` [width] every channel counts alike, as it does for a probe on standardised features.
    """
    student, teacher = got.float() / std, wanted.float() / std
    return t5fx.distill_loss(features=((student[:, 0], student[:, 1:]), (teacher[:, 0], teacher[:, 1:])))


class Run:
    """What the stages share.  Each stage is a method, leaves its model in the folder and adds a row to the table."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        train, test = data.load("cifar10")
        self.probe_train, self.probe_test = train.first(args.probe_train), test.first(args.probe_test)
        self.pool = train.images[args.probe_train :]
        self.log = loop.Log(self.out / "log.csv", FIELDS)
        self.table = loop.Log(self.out / "probe.csv", TABLE)
        self.clock = loop.Clock()
        if args.resume:
            for log in (self.log, self.table):
                log.read()
            if self.log.rows:
                last = self.log.rows[-1]
                self.clock = loop.Clock(float(last["seconds"]), float(last["cpu_seconds"]))
        self.order = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(args.seed))

    def autocast(self) -> torch.autocast:
        return torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.args.amp == "bf16")

    def batch(self, step: int, count: int) -> Tensor:
        """Images [count, 3, size, size]: others at every step, begun again when all are used."""
        at = torch.arange(step * count, (step + 1) * count) % len(self.order)
        return pixels(self.pool[self.order[at]], self.args.size)

    def model(self, name: str | None = None) -> nn.Module:
        """The original, or the converted model of that name in the folder."""
        model = pretrained(self.args.weights, self.args.size, **self.args.sizes)
        return t5fx.load(model, self.out / name) if name else model

    @torch.no_grad()
    def features(self, model: nn.Module, images: data.Images) -> Tensor:
        """Class tokens after the last norm, [N, width]."""
        model.eval()
        done = []
        with loop.bar(len(images), "features") as tick:
            for some in torch.arange(len(images)).split(50):
                with self.autocast():
                    tokens = model.forward_features(pixels(images.batch(some), self.args.size))
                done.append(tokens[:, 0].float().cpu())
                tick(int(some[-1]) + 1, "features")
        return torch.cat(done)

    def probe(self, model: nn.Module, name: str) -> None:
        """A row: test accuracy in %; cosine and relative squared error of the test features to the original's."""
        train, test = self.features(model, self.probe_train), self.features(model, self.probe_test)
        kept = self.out / "original.pt"
        if name == "original":
            torch.save(test, kept)
        wanted = torch.load(kept)
        cosine = nn.functional.cosine_similarity(test, wanted).mean()
        error = (test - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
        regression = make_pipeline(StandardScaler(), LogisticRegression(C=self.args.probe_c, max_iter=300))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            regression.fit(train.numpy(), self.probe_train.labels.numpy())
        accuracy = 100 * regression.score(test.numpy(), self.probe_test.labels.numpy())
        self.table.keep([row for row in self.table.rows if row["model"] != name])
        self.table.add(model=name, accuracy=accuracy, cosine=float(cosine), error=float(error),
                       seconds=self.clock.wall, cpu_seconds=self.clock.cpu)  # fmt: skip
        print(f"{name}: linear probe {accuracy:.1f} %, cosine {float(cosine):.3f}, error {float(error):.3f}")

    # -- the stages -------------------------------------------------------------------------------------------

    def original(self) -> None:
        self.probe(self.model(), "original")

    def convert(self) -> None:
        torch.manual_seed(self.args.seed)
        model = t5fx.linearize(self.model(), selector(self.args.select), config=t5fx.CALIBRATED)
        print(t5fx.report(model))
        self.probe(model, "converted")
        t5fx.save(model, self.out / "converted")

    def calibrate(self) -> None:
        model, steps, count = self.model("converted"), self.args.calibrate_steps, self.args.calibrate_batch
        with self.clock.running(), self.autocast():
            batches = (self.batch(step, count) for step in range(steps))
            done = t5fx.calibrate(model, batches, steps=steps, lr=self.args.calibrate_lr)
        loop.log_calibration(self.log, done, self.clock, len(self.pool) / count)
        print(done)
        self.probe(model, "calibrated")
        t5fx.save(model, self.out / "calibrated")

    def distill(self) -> None:
        """The original teaches the calibrated model its final tokens."""
        args, teacher, model = self.args, self.model(), self.model("calibrated")
        with torch.no_grad(), self.autocast():
            std = teacher.forward_features(self.batch(0, args.batch)).float().std((0, 1))
        groups = t5fx.param_groups(model, args.lr, new_lr_scale=args.new_lr_scale, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups, fused=True, betas=(0.9, 0.99))
        peaks = [group["lr"] for group in optimizer.param_groups]
        path, first, total, count = self.out / "checkpoint.pt", 0, 0.0, 0
        seen = args.calibrate_steps * args.calibrate_batch // args.batch
        if args.resume and path.exists():
            state = torch.load(path, map_location="cpu", weights_only=False)
            loop.restore(state, model, optimizer)
            first, self.clock = state["step"], loop.Clock(state["wall"], state["cpu"])
            self.log.keep(state["rows"])
        with loop.bar(args.distill_steps, "distill") as tick, t5fx.TrainingGuard(model) as guard:
            for step in range(first, args.distill_steps):
                with self.clock.running():
                    factor = loop.rate((step + 1) / args.distill_steps, 0.05)
                    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                        group["lr"] = peak * factor
                    images = self.batch(seen + step, args.batch)
                    with self.autocast():
                        with torch.no_grad():
                            wanted = teacher.forward_features(images)
                        loss = feature_loss(model.forward_features(images), wanted, std)
                    optimizer.zero_grad()
                    loss.backward()
                    guard.check(loss)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                total, count = total + float(loss.detach()), count + 1
                tick(step + 1, f"distill loss {total / count:.3f}")
                if (step + 1) % args.every == 0 or step + 1 == args.distill_steps:
                    self.log.add(stage="distill", step=step + 1, loss=total / count, seconds=self.clock.wall,
                                 cpu_seconds=self.clock.cpu)  # fmt: skip
                    total, count = 0.0, 0
                    loop.save_checkpoint(path, model, optimizer, step=step + 1, wall=self.clock.wall,
                                         cpu=self.clock.cpu, rows=self.log.rows)  # fmt: skip
                if step + 1 == args.stop_after:
                    raise SystemExit(f"stopped after {step + 1} steps; --resume goes on")
        t5fx.save(model, self.out / "distilled")
        self.probe(model, "distilled")

    def finished(self, stage: str) -> bool:
        return any(row["model"] == STAGES[stage] for row in self.table.rows)


def selector(name: str):
    """A selector by its name in t5fx, or a glob of site names."""
    return getattr(t5fx, name, None) or t5fx.names(name)


def plot(run: Run) -> None:
    losses = {stage: [(float(row["cpu_seconds"]), float(row["loss"])) for row in run.log.rows if row["stage"] == stage]
              for stage in ("calibrate", "distill")}  # fmt: skip
    results = {row["model"]: float(row["accuracy"]) for row in run.table.rows}
    plots.losses_and_results(run.out / "curves.png", losses, results, across="CPU seconds", loss="squared error",
                             result="linear probe, % of the test images")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="safetensors file")
    parser.add_argument("--out", type=Path, required=True, help="folder for models, logs and the plot")
    parser.add_argument("--resume", action="store_true", help="skip finished stages, go on with the one cut short")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--select", default="everything", help="a selector of t5fx by name, or a glob of site names")
    parser.add_argument("--size", type=int, default=112, help="pixels, a multiple of 14; 224 takes five times as long")
    parser.add_argument("--batch", type=int, default=16, help="images a step of distillation")
    parser.add_argument("--calibrate-steps", type=int, default=400)
    parser.add_argument("--calibrate-batch", type=int, default=8)
    parser.add_argument("--calibrate-lr", type=float, default=1e-2)
    parser.add_argument("--distill-steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-5, help="of the inherited weights in distillation")
    parser.add_argument("--new-lr-scale", type=float, default=20.0, help="the new weights learn so much faster")
    parser.add_argument("--amp", choices=("none", "bf16"), default="none")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints and rows of the log")
    parser.add_argument("--stop-after", type=int, help="stop the distillation after so many steps, as if cut off")
    parser.add_argument("--probe-train", type=int, default=3000)
    parser.add_argument("--probe-test", type=int, default=2000)
    parser.add_argument("--probe-c", type=float, default=0.01, help="inverse of the regression's L2 penalty")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(sizes={})
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    run = Run(args)
    for stage in args.stages.split(","):
        if stage not in STAGES:
            raise SystemExit(f"--stages: {stage!r} is none of {', '.join(STAGES)}")
        if not (args.resume and run.finished(stage)):
            getattr(run, stage)()
    plot(run)


if __name__ == "__main__":
    sys.exit(main())
