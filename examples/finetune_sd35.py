"""Convert half of the blocks of Stable Diffusion 3.5 Medium and fine-tune it on images with captions.

    accelerate launch --num_processes 8 --mixed_precision bf16 examples/finetune_sd35.py \\
        --checkpoint stable-diffusion-3.5-medium --data captions --out runs/sd35 --batch 64 --size 512
    python examples/finetune_sd35.py --tiny --out runs/tiny --steps 4        # random weights, a minute on a CPU
    accelerate launch ... --resume                                           # go on where it stopped

``--checkpoint`` is a local folder as StableDiffusion3Pipeline.save_pretrained or a download makes it; ``--data`` is a
folder of images with a .txt file each, or of webdataset shards.  The recipe is that of T5 (ICML 2026) for SD3.5: every
other block, 3,000 steps, new weights 20 times as fast; ``--calibrate-steps`` teaches the new weights first, in the
form t5fx.CALIBRATED.  The loss is rectified flow's (Esser et al., 2024): x = (1 - s) image + s noise, velocity noise -
image, and logit-normal times s (section 3.1), shifted for the resolution as the checkpoint's scheduler says (section
5.3.2).  In ``--out`` are the converted transformer (for t5fx.load), log.csv, curves.png and pictures of ``--prompts``
before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import captions
import loop
import plots
import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.utils.data import DataLoader

import t5fx

FIELDS = ("stage", "step", "loss", "lr", "seconds", "cpu_seconds")


class Encoders:
    """The frozen half of the pipeline: from images and captions to what the transformer is trained on."""

    def __init__(self, pipeline: StableDiffusion3Pipeline, args: argparse.Namespace, device: torch.device) -> None:
        self.pipeline, self.args, self.device = pipeline, args, device
        self.shift = pipeline.scheduler.config.shift if args.shift is None else args.shift

    @torch.no_grad()
    def __call__(self, images: Tensor, texts: list[str]) -> tuple[dict[str, Tensor], Tensor]:
        """The transformer's inputs at random times, and the velocity [B, channels, height / 8, width / 8].

        images: [B, 3, height, width] in [-1, 1].  A share of the captions is left out, as guidance needs.
        """
        vae = self.pipeline.vae
        latents = vae.encode(images.to(self.device, vae.dtype)).latent_dist.sample().float()
        latents = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        dropped = torch.rand(len(texts)) < self.args.drop_captions
        texts = ["" if drop else text for text, drop in zip(texts, dropped.tolist(), strict=True)]
        prompt, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, device=self.device, do_classifier_free_guidance=False,
            max_sequence_length=self.args.text_tokens,
        )  # fmt: skip
        noise = torch.randn_like(latents)
        time = torch.randn(len(latents), device=self.device).sigmoid()
        time = self.shift * time / (1 + (self.shift - 1) * time)
        inputs = {
            "hidden_states": torch.lerp(latents, noise, time[:, None, None, None]),
            "timestep": 1000 * time,
            "encoder_hidden_states": prompt.float(),
            "pooled_projections": pooled.float(),
        }
        return inputs, noise - latents


def load_pipeline(folder: Path, without_t5: bool, device: torch.device) -> StableDiffusion3Pipeline:
    """The transformer in float32, to be trained; the rest in bfloat16 where there is a GPU.  Nothing is downloaded."""
    left_out: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None} if without_t5 else {}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **left_out)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            part.requires_grad_(name == "transformer")
            part.to(device, torch.float32 if name in ("transformer", "vae") else dtype)
    return pipeline


def batches(args: argparse.Namespace, accelerator: Accelerator, first: int, seed: int) -> Iterator[tuple]:
    """(images, captions) of this process, from batch ``first`` on; batches are of ``args.batch / args.accumulate``."""
    pairs = captions.open_pairs(args.data, args.size)
    steps = captions.Steps(
        len(pairs), args.batch // args.accumulate, seed, first=first, rank=accelerator.process_index,
        processes=accelerator.num_processes,
    )  # fmt: skip
    return iter(DataLoader(pairs, batch_sampler=steps, num_workers=args.workers))


def calibrate(model: nn.Module, encode: Encoders, accelerator: Accelerator, log: loop.Log) -> None:
    args, clock = encode.args, loop.Clock()
    data = batches(args, accelerator, 0, args.seed + 1)

    def inputs() -> Iterator[dict[str, Any]]:
        for images, texts in data:
            yield {**encode(images, list(texts))[0], "return_dict": False}

    with clock.running(), accelerator.autocast():
        done = t5fx.calibrate(model, inputs(), steps=args.calibrate_steps, lr=args.calibrate_lr)
    for step, errors in enumerate(done.errors):
        share = (step + 1) / len(done.errors)
        log.add(stage="calibrate", step=step + 1, loss=sum(errors) / len(errors), seconds=share * clock.wall,
                cpu_seconds=share * clock.cpu)  # fmt: skip
    accelerator.print(done)


def train(model: nn.Module, optimizer: Any, encode: Encoders, accelerator: Accelerator, log: loop.Log) -> None:
    """``model`` and ``optimizer`` as accelerate prepared them."""
    args, clock, first = encode.args, loop.Clock(), 0
    peaks = [group.setdefault("peak", group["lr"]) for group in optimizer.param_groups]
    kept = args.out / "checkpoint"
    if args.resume and (kept / "where.json").is_file():
        accelerator.load_state(str(kept))
        where = json.loads((kept / "where.json").read_text())
        first, clock = where["step"], loop.Clock(where["wall"], where["cpu"])
        log.keep(where["rows"])
    elif args.calibrate_steps:
        calibrate(model, encode, accelerator, log)
    data = batches(args, accelerator, first * args.accumulate, args.seed)
    total, count = torch.zeros((), device=accelerator.device), 0
    model.train()
    with loop.bar(args.steps, "train") as tick, t5fx.TrainingGuard(model) as guard:
        for step in range(first, args.steps):
            with clock.running():
                # Noise and times are a function of the step and the process: a checkpoint needs no random state.
                torch.manual_seed((args.seed * 10007 + step) * accelerator.num_processes + accelerator.process_index)
                factor = min(1.0, (step + 1) / args.warm_up)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
                for part in range(args.accumulate):
                    images, texts = next(data)
                    inputs, velocity = encode(images, list(texts))
                    last = part + 1 == args.accumulate
                    with contextlib.nullcontext() if last else accelerator.no_sync(model), accelerator.autocast():
                        loss = nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), velocity)
                        accelerator.backward(loss / args.accumulate)
                    guard.check(loss)
                    total += loss.detach() / args.accumulate
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            if (step + 1) % args.every == 0 or step + 1 == args.steps:
                loss = loop.mean(total / count)
                log.add(stage="train", step=step + 1, loss=loss, lr=optimizer.param_groups[0]["lr"],
                        seconds=clock.wall, cpu_seconds=clock.cpu)  # fmt: skip
                tick(step + 1, f"train loss {loss:.3f}")
                total, count = torch.zeros_like(total), 0
            if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
                where = {"step": step + 1, "wall": clock.wall, "cpu": clock.cpu, "rows": log.rows}
                save_state(accelerator, kept, where)
            if step + 1 == args.stop_after:
                raise SystemExit(f"stopped after {step + 1} steps; --resume goes on")


def save_state(accelerator: Accelerator, folder: Path, where: dict[str, Any]) -> None:
    new = folder.with_suffix(".new")
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / "where.json").write_text(json.dumps(where))
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)
    accelerator.wait_for_everyone()


def draw(pipeline: StableDiffusion3Pipeline, args: argparse.Namespace, accelerator: Accelerator, name: str) -> None:
    """One picture a prompt, the same noise every time."""
    if not args.prompts or not accelerator.is_main_process:
        return
    pipeline.transformer.eval()
    pipeline.set_progress_bar_config(disable=True)
    for number, prompt in enumerate(args.prompts):
        with accelerator.autocast():
            picture = pipeline(
                prompt, height=args.size, width=args.size, num_inference_steps=args.sample_steps,
                max_sequence_length=args.text_tokens, generator=torch.Generator().manual_seed(args.seed),
            ).images[0]  # fmt: skip
        picture.save(args.out / f"{number}-{name}.png")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="local folder of a StableDiffusion3Pipeline")
    parser.add_argument("--data", type=Path, help="folder of images and captions, or of webdataset shards")
    parser.add_argument("--tiny", action="store_true", help="make a tiny random checkpoint and a few pairs first")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result, logs and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--select", default="every_other", help="a selector of t5fx by name, or a glob of site names")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="make a batch in so many parts")
    parser.add_argument("--size", type=int, default=512, help="pixels, a multiple of 16")
    parser.add_argument("--lr", type=float, default=5e-5, help="of the inherited weights")
    parser.add_argument("--new-lr-scale", type=float, default=20.0, help="the new weights learn so much faster")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--calibrate-steps", type=int, default=0)
    parser.add_argument("--calibrate-lr", type=float, default=1e-2)
    parser.add_argument("--shift", type=float, help="of the times; left out, the scheduler's")
    parser.add_argument("--drop-captions", type=float, default=0.1, help="share of the captions that are left out")
    parser.add_argument("--text-tokens", type=int, default=256, help="of the T5 encoder")
    parser.add_argument("--without-t5", action="store_true", help="leave out the T5 encoder, 4.7 billion weights")
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="left out: as accelerate launch says")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations: faster, more memory")
    parser.add_argument("--prompts", nargs="*", default=[], help="draw these before and after")
    parser.add_argument("--sample-steps", type=int, default=28)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--every", type=int, default=10, help="steps between rows of the log")
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--stop-after", type=int, help="stop after so many steps, as if cut off")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if not args.tiny and not (args.checkpoint and args.data):
        parser.error("--checkpoint and --data are needed, or --tiny")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    if args.tiny:
        import tiny_sd3

        args.checkpoint, args.data = args.out / "tiny-checkpoint", args.out / "tiny-pairs"
        if accelerator.is_main_process:
            tiny_sd3.make(args.checkpoint, args.data)
        accelerator.wait_for_everyone()
        args.size, args.batch, args.text_tokens, args.sample_steps = 64, 4, 16, 2
    pipeline = load_pipeline(args.checkpoint, args.without_t5, accelerator.device)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(pipeline, args, accelerator, "softmax")
    transformer = pipeline.transformer
    torch.manual_seed(args.seed)
    select = getattr(t5fx, args.select, None) or t5fx.names(args.select)
    t5fx.linearize(transformer, select, config=t5fx.CALIBRATED if args.calibrate_steps else t5fx.T5)
    accelerator.print(t5fx.report(transformer))
    draw(pipeline, args, accelerator, "converted")
    if not args.no_checkpointing:
        transformer.enable_gradient_checkpointing()
    groups = t5fx.param_groups(transformer, args.lr, new_lr_scale=args.new_lr_scale, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(transformer, torch.optim.AdamW(groups))
    log = loop.Log(args.out / "log.csv", FIELDS)
    train(model, optimizer, Encoders(pipeline, args, accelerator.device), accelerator, log)
    transformer = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if accelerator.is_main_process:
        t5fx.save(transformer, args.out / "linear")
        draw(pipeline, args, accelerator, "finetuned")
        losses = {stage: [(float(row["step"]), float(row["loss"])) for row in log.rows if row["stage"] == stage]
                  for stage in ("calibrate", "train")}  # fmt: skip
        plots.losses(args.out / "curves.png", losses, across="step", loss="loss")


if __name__ == "__main__":
    sys.exit(main())
