"""What each of two processes runs for test_distributed.py: calibrate and fine-tune, wrapped in some way."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from toys import images, vit

import t5fx

STEPS = 4


def batches(count: int, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [images(8, 8, batch=4).float() for _ in range(count)]


def converted() -> nn.Module:
    torch.manual_seed(3)
    config = t5fx.T5.replace(learn_inner_lr=True)
    return t5fx.linearize(vit().float(), t5fx.everything, config=config, example_inputs=images(8, 8).float())


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if how == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(model)
    return model


def train(model: nn.Module, how: str, rows: slice) -> dict:
    """Calibrate on ``rows`` of each batch, then two steps of fine-tuning; what became of the model and its losses."""
    base = model
    inherited = {n for n, _ in model.named_parameters() if ".ttt" not in n}
    run = wrapped(model, how)
    before = whole(run)
    result = t5fx.calibrate(run, [x[rows] for x in batches(STEPS, 1)], steps=STEPS)
    after = whole(run)
    untouched = all(torch.equal(before[n], after[n]) for n in inherited)
    # From the same start, and by SGD: Adam's first steps turn the least difference of a gradient into a sign.
    set_model_state_dict(run, before, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.SGD(t5fx.param_groups(base, 1e-2, new_lr_scale=2), momentum=0.9)
    losses = []
    with t5fx.TrainingGuard(base) as guard:
        for x in batches(3, 2):
            loss = run(x[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            unused = [n for n, p in base.named_parameters() if p.grad is None]
            guard.check(loss)
            optimizer.step()
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(float(mean))
    return {"errors": result.errors, "calibrated": after, "untouched": untouched, "losses": losses, "unused": unused,
            "tuned": whole(run)}  # fmt: skip


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full tensors by the model's own names."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def main(how: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = train(converted(), how, slice(2 * rank, 2 * rank + 2))
    torch.save(found, Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
