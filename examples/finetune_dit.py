"""Train a small diffusion transformer on Fashion-MNIST, convert it, calibrate, fine-tune, and compare the pictures.

    python examples/finetune_dit.py --out runs/dit               # 10 minutes of one CPU core for the softmax model
    python examples/finetune_dit.py --out runs/dit --resume      # go on where it stopped
    python examples/finetune_dit.py --out runs/dit --select every_other --stages convert,calibrate,finetune,evaluate

The model is a DiTTransformer2DModel of diffusers on pixels: 32 x 32 (28 x 28, padded), patches of 4 x 4, 64 tokens, one
label an image.  It learns the velocity of rectified flow, noise - image, at logit-normal times (Esser et al., 2024,
section 3.1).  Pictures are compared by the Frechet distance (Heusel et al., 2017) of features, here those of a small
classifier that this script trains itself: its numbers compare the rows of this table, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import data
import frechet
import loop
import plots
import torch
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import t5fx

FIELDS = ("stage", "step", "epoch", "loss", "seconds", "cpu_seconds")
TABLE = ("model", "distance", "right", "flow_loss")
SHEET = 40  # pictures of each model to look at
STAGES = ("classifier", "softmax", "control", "convert", "calibrate", "finetune", "evaluate")
#: The models that are compared, and the names that the table gives them.
ROWS = {
    "softmax": "softmax",
    "control": "softmax, fine-tuned as long",
    "converted": "converted at once",
    "calibrated": "calibrated",
    "finetuned": "calibrated, fine-tuned",
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Pictures(loop.Batches):
    """Batches of images [B, 1, 32, 32] in [-1, 1], and labels int64 [B]."""

    def _load(self, indices: Tensor, generator: torch.Generator, start: int) -> tuple[Tensor, Tensor]:
        return pictures(self.images, indices), self.images.labels[indices]


def pictures(images: data.Images, indices: Tensor) -> Tensor:
    return nn.functional.pad(images.batch(indices).float() / 127.5 - 1, (2, 2, 2, 2), value=-1)


def build(args: argparse.Namespace) -> DiTTransformer2DModel:
    torch.manual_seed(args.seed)
    model = DiTTransformer2DModel(
        num_attention_heads=args.width // 32, attention_head_dim=32, in_channels=1, out_channels=1, sample_size=32,
        patch_size=4, num_layers=args.depth, num_embeds_ada_norm=10,
    )  # fmt: skip
    with torch.no_grad():
        for block in model.transformer_blocks:
            # Blocks that begin as the identity (Peebles and Xie, 2023, section 3.2: adaLN-Zero).
            nn.init.zeros_(block.norm1.linear.weight)
            nn.init.zeros_(block.norm1.linear.bias)
            # Each block would forget labels on its own; without guidance there is no need to.
            block.norm1.emb.class_embedder.dropout_prob = 0.0
        nn.init.zeros_(model.proj_out_2.weight)
        nn.init.zeros_(model.proj_out_2.bias)
    return model.to(DEVICE)


def noisy(images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the model takes, for images at random times, and the velocity that it should give."""
    noise = torch.randn_like(images)
    time = torch.randn(len(images), device=images.device).sigmoid()
    mixed = torch.lerp(images, noise, time[:, None, None, None])
    return {"hidden_states": mixed, "timestep": 1000 * time, "class_labels": labels}, noise - images


def flow_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    inputs, velocity = noisy(images, labels)
    return nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), velocity)


@torch.no_grad()
def sample(model: nn.Module, labels: Tensor, seed: int, steps: int, batch: int = 250) -> Tensor:
    """One picture a label, [N, 1, 32, 32] in [-1, 1]; the same seed starts from the same noise."""
    model.eval()
    noise = torch.randn(len(labels), 1, 32, 32, generator=torch.Generator().manual_seed(seed))
    done = []
    for some, some_labels in zip(noise.split(batch), labels.split(batch), strict=True):
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps)
        x, some_labels = some.to(DEVICE), some_labels.to(DEVICE)
        for time in scheduler.timesteps:
            inputs = {"timestep": time.expand(len(x)).to(DEVICE), "class_labels": some_labels}
            x = scheduler.step(model(x, **inputs, return_dict=False)[0], time, x, return_dict=False)[0]
        done.append(x.clamp(-1, 1).cpu())
    return torch.cat(done)


# -- the stages -----------------------------------------------------------------------------------------------


class Run:
    """What all stages share: the data, the folder, the log; each stage reads and writes files of the folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.train, self.test = data.load("fashion", count=args.images)
        self.log = loop.Log(self.out / "log.csv", FIELDS)
        self.path = self.out / "checkpoint.pt"
        if args.resume:
            self.log.read()

    def load(self, name: str) -> nn.Module:
        """One of the models of ``ROWS`` as its stage left it."""
        model = build(self.args)
        if (self.out / f"{name}.pt").exists():
            model.load_state_dict(torch.load(self.out / f"{name}.pt", map_location=DEVICE))
            return model
        return t5fx.load(model, self.out / name)

    def fit(self, model: nn.Module, groups: list[dict], stage: str, epochs: float, loss=flow_loss) -> None:
        args = self.args
        state = torch.load(self.path, map_location="cpu", weights_only=False) if self.path.exists() else {}
        resume = state if args.resume and state.get("stage") == stage else None
        recipe = loop.Recipe(epochs, args.batch, warm_up=0.1, amp=args.amp, seed=args.seed + STAGES.index(stage))
        if stage == "control":  # the same images, noise and times as the model that it stands beside
            recipe.seed = args.seed + STAGES.index("finetune")
        optimizer = torch.optim.AdamW(groups, fused=True)
        guard = t5fx.TrainingGuard(model) if stage == "finetune" else None
        loop.fit(model, optimizer, Pictures(self.train, recipe, DEVICE), stage=stage, log=self.log, loss=loss,
                 checkpoint=self.path, resume=resume, evaluate=lambda: float("nan"),
                 guard=guard.check if guard else None)  # fmt: skip
        if guard:
            guard.remove()

    # Each stage, by its name in STAGES.

    def classifier(self) -> None:
        torch.manual_seed(self.args.seed)
        model = frechet.Classifier().to(DEVICE)
        groups = [{"params": list(model.parameters()), "lr": 2e-3}]
        self.fit(model, groups, "classifier", self.args.classifier_epochs, loss=loop.cross_entropy)
        torch.save(model.state_dict(), self.out / "classifier.pt")

    def softmax(self) -> None:
        model = build(self.args)
        self.fit(model, softmax_groups(model, self.args.lr, self.args.weight_decay), "softmax", self.args.epochs)
        torch.save(model.state_dict(), self.out / "softmax.pt")

    def control(self) -> None:
        """The softmax model, trained as long as the converted one is fine-tuned, with the same images and noise."""
        model = self.load("softmax")
        groups = softmax_groups(model, self.args.finetune_lr, self.args.weight_decay)
        self.fit(model, groups, "control", self.args.finetune * self.args.epochs)
        torch.save(model.state_dict(), self.out / "control.pt")

    def convert(self) -> None:
        model = self.load("softmax")
        torch.manual_seed(self.args.seed)
        select = getattr(t5fx, self.args.select, None) or t5fx.names(self.args.select)
        t5fx.linearize(model, select, config=t5fx.CALIBRATED)
        print(t5fx.report(model))
        t5fx.save(model, self.out / "converted")

    def calibrate(self) -> None:
        model, steps, clock = self.load("converted"), self.args.calibrate_steps, loop.Clock()
        batches = Pictures(self.train, loop.Recipe(1, self.args.calibrate_batch, seed=self.args.seed + 100), DEVICE)

        def noisy_batches() -> Iterator[dict[str, Tensor]]:
            torch.manual_seed(self.args.seed)
            for step in range(steps):
                yield {**noisy(*batches(step))[0], "return_dict": False}

        with clock.running(), batches.recipe.autocast(DEVICE):
            done = t5fx.calibrate(model, noisy_batches(), steps=steps, lr=self.args.calibrate_lr)
        print(done)
        loop.log_calibration(self.log, done, clock, len(self.train) / self.args.calibrate_batch)
        t5fx.save(model, self.out / "calibrated")

    def finetune(self) -> None:
        model, args = self.load("calibrated"), self.args
        groups = t5fx.param_groups(model, args.finetune_lr, new_lr_scale=args.new_lr_scale,
                                   weight_decay=args.weight_decay)  # fmt: skip
        self.fit(model, groups, "finetune", args.finetune * args.epochs)
        t5fx.save(model, self.out / "finetuned")

    def evaluate(self) -> None:
        """Pictures of all models from the same noise; their distance to half of the test images."""
        args, test, half = self.args, self.test, len(self.test) // 2
        classifier = frechet.Classifier().to(DEVICE).eval()
        classifier.load_state_dict(torch.load(self.out / "classifier.pt", map_location=DEVICE))
        real = pictures(test, torch.arange(len(test)))
        known = classifier.describe(real)
        count = min(args.samples, half)
        table = loop.Log(self.out / "distances.csv", TABLE)
        table.add(model="real images, the other half", right=classifier.right(known, test.labels),
                  distance=frechet.distance(known[half:][:count], known[:half]))  # fmt: skip
        labels = torch.arange(count) % 10
        sheets = {"real images": real[[int(torch.where(test.labels == i % 10)[0][i // 10]) for i in range(SHEET)]]}
        for name, title in ROWS.items():
            if not any((self.out / (name + ending)).exists() for ending in ("", ".pt")):
                continue
            kept = self.out / f"samples-{name}.pt"
            if not (args.resume and kept.exists()):
                torch.save(sample(self.load(name), labels, args.seed + 1, args.sample_steps), kept)
            images = torch.load(kept)
            made = classifier.describe(images)
            table.add(model=title, distance=frechet.distance(made, known[:half]), right=classifier.right(made, labels),
                      flow_loss=self.held_out(name))  # fmt: skip
            sheets[title] = images[:SHEET]
            print(", ".join(f"{k} {v}" for k, v in table.rows[-1].items()))
        plots.strips(self.out / "samples.png", sheets)
        losses = {stage: [(float(row["step"]), float(row["loss"])) for row in self.log.rows if row["stage"] == stage]
                  for stage in ("softmax", "control", "finetune")}  # fmt: skip
        results = {row["model"]: float(row["distance"]) for row in table.rows}
        plots.losses_and_results(self.out / "curves.png", losses, results, across="step", loss="flow-matching loss",
                                 result="Frechet distance to real images", form="%.2f", log=True)  # fmt: skip

    @torch.no_grad()
    def held_out(self, name: str) -> float:
        """Loss on test images, with the same noise and times for every model."""
        model = self.load(name).eval()
        torch.manual_seed(self.args.seed)
        losses = []
        for some in torch.arange(min(len(self.test), 2000)).split(100):
            losses.append(flow_loss(model, pictures(self.test, some).to(DEVICE), self.test.labels[some].to(DEVICE)))
        return float(torch.stack(losses).mean())

    def finished(self, stage: str) -> bool:
        if stage == "evaluate":
            return False
        name = {"convert": "converted", "calibrate": "calibrated", "finetune": "finetuned"}.get(stage, f"{stage}.pt")
        return (self.out / name).exists()


def softmax_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict]:
    """As t5fx.param_groups: biases and norms are not decayed."""
    return [{"params": [p for p in model.parameters() if (p.dim() > 1) == decayed], "lr": lr,
             "weight_decay": weight_decay if decayed else 0.0} for decayed in (True, False)]  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, checkpoints, models and pictures")
    parser.add_argument("--resume", action="store_true", help="skip finished stages, go on with the one cut short")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--width", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--epochs", type=float, default=1.5, help="of softmax training")
    parser.add_argument("--classifier-epochs", type=float, default=1)
    parser.add_argument("--finetune", type=float, default=0.2, help="share of the epochs, also for the control")
    parser.add_argument("--finetune-lr", type=float, default=5e-4)
    parser.add_argument("--new-lr-scale", type=float, default=2.0, help="the new weights learn so much faster")
    parser.add_argument("--select", default="everything", help="a selector of t5fx by name, or a glob of site names")
    parser.add_argument("--calibrate-steps", type=int, default=800)
    parser.add_argument("--calibrate-batch", type=int, default=16)
    parser.add_argument("--calibrate-lr", type=float, default=1e-2)
    parser.add_argument("--samples", type=int, default=1000, help="pictures a model, for the distance")
    parser.add_argument("--sample-steps", type=int, default=20, help="Euler steps a picture")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="use only so many of the images (to try things out)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    run = Run(args)
    for stage in args.stages.split(","):
        if stage not in STAGES:
            raise SystemExit(f"--stages: {stage!r} is none of {', '.join(STAGES)}")
        if not (args.resume and run.finished(stage)):
            getattr(run, stage)()


if __name__ == "__main__":
    sys.exit(main())
