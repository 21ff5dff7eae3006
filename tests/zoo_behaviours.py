"""What a model must go on doing once it is linearized: one function a column of docs/zoo.md.

Each takes an :class:`Entry` and ``convert``, which linearizes a fresh instance, or leaves it alone: what the original
model can't do either is "n/a", so the same function is run on both.  A function that returns has passed.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from test_zoo import cast, equal, tensors
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from zoo import EXPECTED, build, image_ids

import t5fx

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Convert = Callable[[nn.Module, tuple, dict], nn.Module]


class NotApplicable(Exception):
    """The behaviour makes no sense for this model, with or without t5fx."""


@dataclass
class Entry:
    """A row: a model of the zoo, and the config it is converted with."""

    name: str
    config: t5fx.TTTConfig = t5fx.T5

    def linearize(self, model: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        return t5fx.linearize(model, t5fx.everything, config=self.config, example_inputs=(args, kwargs))

    def fresh(self, convert: Convert, **options: Any) -> tuple[nn.Module, tuple, dict]:
        model, args, kwargs = build(self.name, **options)
        return convert(model, args, kwargs), args, kwargs


def as_it_is(model: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
    return model


def outputs(model: nn.Module, args: tuple, kwargs: dict) -> list[Tensor]:
    """The output, and all tokens where the head reads only the class token."""
    found = tensors(model(*args, **kwargs))
    if hasattr(model, "forward_features"):
        found.append(model.forward_features(*args))
    if hasattr(model, "class_token"):  # torchvision
        tokens = model._process_input(*args)
        found.append(model.encoder(torch.cat([model.class_token.expand(len(tokens), -1, -1), tokens], 1)))
    return [x for x in found if x.is_floating_point()]


def sites(entry: Entry, convert: Convert) -> None:
    """As many as known, with the known layout."""
    model, args, kwargs = build(entry.name)
    found = t5fx.inspect(model, (args, kwargs), entry.config)
    assert len(found) == EXPECTED[entry.name][0]
    assert str(found[0].layout or "?") == EXPECTED[entry.name][2]


def refusals(entry: Entry, convert: Convert) -> None:
    """The known ones, each with a reason that is a sentence; drop_bias leaves no float mask among them."""
    model, args, kwargs = build(entry.name)
    refused = [s.refusal for s in t5fx.inspect(model, (args, kwargs), entry.config) if s.refusal]
    known = [c for c in EXPECTED[entry.name][1] if not (entry.config.drop_bias and c == "float-mask")]
    assert [r.code for r in refused] == known
    assert all(len(r.reason) > 20 for r in refused)


def forward(entry: Entry, convert: Convert) -> None:
    """Same structure, shapes and dtypes; finite; another result than softmax."""
    model, args, kwargs = build(entry.name)
    with torch.no_grad():
        before, whole = outputs(model, args, kwargs), model(*args, **kwargs)
        convert(model, args, kwargs)
        after, now = outputs(model, args, kwargs), model(*args, **kwargs)
    assert type(now) is type(whole)
    for old, new in zip(before, after, strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert torch.isfinite(new).all()
    if convert is not as_it_is:
        assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def _loss(found: list[Tensor]) -> Tensor:
    return sum((x.float() ** 2).sum() for x in found if x.requires_grad)


def gradients(entry: Entry, convert: Convert) -> None:
    """Every parameter that softmax trains, and every new one, gets a finite gradient; a dropped bias gets none."""
    model, args, kwargs = build(entry.name)
    _loss(outputs(model, args, kwargs)).backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    if entry.config.drop_bias:
        silent |= {n for n, _ in model.named_parameters() if "rel_pos" in n or "relative_position" in n}
        silent |= {n for n, _ in model.named_parameters() if "rel_bias" in n or n.endswith("k_bias")}
    model.zero_grad()
    convert(model, args, kwargs)
    _loss(outputs(model, args, kwargs)).backward()
    for name, parameter in model.named_parameters():
        if name not in silent:
            assert parameter.grad is not None, f"{name} got no gradient"
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), f"the gradient of {name} is zero"


def train_eval(entry: Entry, convert: Convert) -> None:
    """Trains in train mode; back in eval mode it computes what it did before."""
    model, args, kwargs = entry.fresh(convert)
    with torch.no_grad():
        before = outputs(model, args, kwargs)
    state = copy.deepcopy(model.state_dict())
    model.train()
    found = outputs(model, args, kwargs)
    assert all(torch.isfinite(x).all() for x in found)
    _loss(found).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(m.training for m in model.modules())
    model.load_state_dict(state)  # the running statistics of batch norms
    model.eval()
    with torch.no_grad():
        equal(outputs(model, args, kwargs), before)


def batch_x2(entry: Entry, convert: Convert) -> None:
    """Rows do not see each other."""
    model, args, kwargs = entry.fresh(convert)
    rows = tensors((args, kwargs))[0].shape[0]

    def double(x: Any) -> Any:
        return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

    with torch.no_grad():
        once, twice = outputs(model, args, kwargs), outputs(model, *tree_map(double, (args, kwargs)))
    equal(twice, [torch.cat([x, x]) for x in once], **CLOSE)


def _resized(name: str, args: tuple, kwargs: dict, down: int, right: int) -> tuple[tuple, dict]:
    """Inputs whose grid is ``down`` times as high and ``right`` times as wide (text: as long)."""
    torch.manual_seed(1)
    if name == "diffusers/Flux":
        ids = image_ids(8 * down, 8 * right)
        return args, {**kwargs, "hidden_states": torch.randn(2, len(ids), 4), "img_ids": ids}

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if name.startswith("torch/"):
            return torch.randn(2, 16 * down * right, 32)
        if x.is_floating_point() and x.dim() in (4, 5):
            return torch.randn(*x.shape[:-2], down * x.shape[-2], right * x.shape[-1])
        return torch.cat([x] * down, 1) if not x.is_floating_point() and x.dim() == 2 else x

    more = {"interpolate_pos_encoding": True} if name in ("transformers/ViT", "transformers/CLIPVision") else {}
    args, kwargs = tree_map(one, (args, kwargs))
    return args, {**kwargs, **more}


@contextlib.contextmanager
def _grid(entry: Entry, model: nn.Module, convert: Convert, down: int, right: int) -> Iterator[None]:
    """Bare layers are given tokens, and nothing says how they lie."""
    said = entry.name.startswith("torch/") and convert is not as_it_is
    with t5fx.grid(model, (4 * down, 4 * right)) if said else contextlib.nullcontext():
        yield


def _at_another_size(entry: Entry, convert: Convert, down: int, right: int) -> None:
    """The converted model at another size is the model converted there: same weights, same numbers."""
    model, args, kwargs = entry.fresh(convert)
    outputs(model, args, kwargs)  # what is remembered of this size must not be used at the next
    args, kwargs = _resized(entry.name, args, kwargs, down, right)
    _set_size(model, args)
    with torch.no_grad(), _grid(entry, model, convert, down, right):
        found = outputs(model, args, kwargs)
    assert all(torch.isfinite(x).all() for x in found)
    other, *_ = build(entry.name)
    _set_size(other, args)
    if down == right or not entry.name.startswith("torch/"):
        convert(other, args, kwargs)
    elif convert is not as_it_is:
        layout = t5fx.TokenLayout(grid=(4 * down, 4 * right))
        t5fx.linearize(other, t5fx.everything, config=entry.config, example_inputs=(args, kwargs), layout=layout)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        equal(found, outputs(other, args, kwargs), **CLOSE)


def _set_size(model: nn.Module, args: tuple) -> None:
    """timm models of a fixed size have a method that changes it."""
    embedding = getattr(model, "patch_embed", None)  # MaxViT has none, and takes what its windows divide
    if hasattr(model, "set_input_size") and embedding is not None and not getattr(embedding, "dynamic_img_pad", False):
        model.set_input_size(img_size=tuple(args[0].shape[-2:]))


def new_resolution(entry: Entry, convert: Convert) -> None:
    _at_another_size(entry, convert, 2, 2)


def non_square(entry: Entry, convert: Convert) -> None:
    """At run time, or where a model is made for one size, made for a non-square one."""
    if entry.name in ("transformers/Bert", "transformers/Llama"):
        raise NotApplicable("text has no grid")
    try:
        _at_another_size(entry, as_it_is, 1, 2)
    except Exception:
        model, args, kwargs = entry.fresh(as_it_is)
        if not entry.name.startswith("timm/"):
            raise
        height, width = args[0].shape[-2:]
        model, args, kwargs = entry.fresh(convert, size=(height, 2 * width))
        with torch.no_grad():
            assert all(torch.isfinite(x).all() for x in outputs(model, args, kwargs))
        if convert is not as_it_is:
            for site in t5fx.report(model).selected:
                assert site.kind == "window" or site.layout.grid[1] == 2 * site.layout.grid[0], site.layout
    else:
        _at_another_size(entry, convert, 1, 2)


def bf16(entry: Entry, convert: Convert) -> None:
    """As close to float32 as softmax is, or within 3 %."""
    errors = []
    for way in (as_it_is, convert):
        model, args, kwargs = entry.fresh(way)
        with torch.no_grad():
            exact = outputs(model, args, kwargs)
            low = outputs(model.bfloat16(), *cast((args, kwargs), torch.bfloat16))
        assert all(x.dtype == torch.bfloat16 for x in low)
        errors.append(max(float((x.float() - y).norm() / y.norm()) for x, y in zip(low, exact, strict=True)))
    assert errors[1] < max(0.03, 1.5 * errors[0]), errors


def _copies(entry: Entry, convert: Convert, copied: Callable[[nn.Module], nn.Module]) -> None:
    model, args, kwargs = entry.fresh(convert)
    with torch.no_grad():
        expected = outputs(model, args, kwargs)
        twin = copied(model)
        for parameter in model.parameters():  # the copy shares nothing with the model
            parameter.zero_()
        equal(outputs(twin, args, kwargs), expected)


def deep_copy(entry: Entry, convert: Convert) -> None:
    _copies(entry, convert, copy.deepcopy)


def pickled(entry: Entry, convert: Convert) -> None:
    _copies(entry, convert, lambda model: pickle.loads(pickle.dumps(model)))


def state_dict(entry: Entry, convert: Convert) -> None:
    """Inherited keys stay; another model takes it and computes the same."""
    model, args, kwargs = entry.fresh(convert)
    other = entry.fresh(convert, seed=1)[0]
    assert set(build(entry.name)[0].state_dict()) <= set(model.state_dict())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        equal(outputs(other, args, kwargs), outputs(model, args, kwargs))


_SWITCHES = ("enable_gradient_checkpointing", "gradient_checkpointing_enable", "set_grad_checkpointing")


def checkpointing(entry: Entry, convert: Convert) -> None:
    """Recomputed blocks give the gradients of kept ones; without a switch, the whole model is recomputed."""
    found = []
    for again in (False, True):
        model, args, kwargs = entry.fresh(convert)
        model.train()
        run: Callable = model
        switch = next((s for s in _SWITCHES if hasattr(model, s)), None)
        if again and switch is not None:
            getattr(model, switch)()
        elif again:
            run = partial(checkpoint, model, use_reentrant=False)
        torch.manual_seed(1)
        _loss(tensors(run(*args, **kwargs))).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, float(gradient.abs().max()))
        )


def fullgraph(entry: Entry, convert: Convert) -> None:
    torch._dynamo.reset()
    model, args, kwargs = entry.fresh(convert)
    with torch.no_grad():
        expected = tensors(model(*args, **kwargs))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        equal(tensors(compiled(*args, **kwargs)), expected, **CLOSE)
    torch._dynamo.reset()


def export(entry: Entry, convert: Convert) -> None:
    """The exported program computes the same, and holds one inner_apply for each converted site."""
    model, args, kwargs = entry.fresh(convert)
    with torch.no_grad():
        expected = tensors(model(*args, **kwargs))
        program = torch.export.export(model, *copy.deepcopy((args, kwargs)), strict=False)
        equal(tensors(program.module()(*args, **kwargs)), expected, **CLOSE)
    count = sum(str(n.target).startswith("t5fx.inner_apply") for n in program.graph.nodes)
    assert count == (len(t5fx.report(model).selected) if convert is not as_it_is else 0)


def reverted(entry: Entry, convert: Convert) -> None:
    """Bit-equal outputs, the same state and the same classes."""
    model, args, kwargs = build(entry.name)
    classes, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = outputs(model, args, kwargs)
        convert(model, args, kwargs)
        if convert is not as_it_is:
            outputs(model, args, kwargs)
            t5fx.revert(model)
        equal(outputs(model, args, kwargs), before)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == list(state)
    equal(model.state_dict(), state)


COLUMNS: dict[str, Callable[[Entry, Convert], None]] = {
    "sites": sites, "refusals": refusals, "forward": forward, "gradients": gradients, "train/eval": train_eval,
    "batch x2": batch_x2, "new resolution": new_resolution, "non-square": non_square, "bf16": bf16,
    "deepcopy": deep_copy, "pickle": pickled, "state_dict": state_dict, "checkpointing": checkpointing,
    "fullgraph": fullgraph, "export": export, "revert": reverted,
}  # fmt: skip
