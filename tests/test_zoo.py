"""Sites found and refused across architectures, and the whole life of the core ones after linearize."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from zoo import CORE, EXPECTED, ZOO, build

import t5fx


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def equal(a, b, **tolerance):
    for x, y in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(x, y, **{"rtol": 0, "atol": 0, **tolerance})


def cast(tree, dtype):
    def one(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(one, tree)


def doubled(tree):
    def one(x):
        return torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == 2 else x

    return tree_map(one, tree)


def linearized(name):
    model, args, kwargs = build(name)
    return t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)), args, kwargs


def loss(model, args, kwargs):
    """Over the output and, where the head reads only the class token, over all tokens."""
    out = tensors(model(*args, **kwargs))
    if hasattr(model, "forward_features"):
        out.append(model.forward_features(*args))
    return sum((x.float() ** 2).sum() for x in out if x.requires_grad)


@pytest.mark.parametrize("name", ZOO)
def test_sites(name):
    model, args, kwargs = build(name)
    report = t5fx.inspect(model, (args, kwargs))
    count, refused, layout = EXPECTED[name]
    assert len(report) == count
    assert tuple(s.refusal.code for s in report if s.refusal) == refused
    assert str(report[0].layout or "?") == layout
    for site in report:
        assert site.softmax_flops > 0
        assert site.ttt_flops > 0
        assert site.break_even_tokens > 0


@pytest.mark.parametrize("name", CORE)
def test_forward_and_revert(name):
    model, args, kwargs = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    with torch.no_grad():
        before = model(*args, **kwargs)
        assert t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)) is model
        after = model(*args, **kwargs)
    assert type(after) is type(before)
    for old, new in zip(tensors(before), tensors(after), strict=True):
        assert new.shape == old.shape
        assert new.dtype == old.dtype
        assert torch.isfinite(new).all()
    assert any(not torch.equal(old, new) for old, new in zip(tensors(before), tensors(after), strict=True))
    assert set(state) < set(model.state_dict())
    added = set(model.state_dict()) - set(state)
    owners = {site.owner for site in t5fx.report(model).selected}
    assert {key.rsplit(".ttt.", 1)[0] for key in added} == owners

    t5fx.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert list(model.state_dict()) == list(state)
    equal(model.state_dict(), state)
    with torch.no_grad():
        equal(model(*args, **kwargs), before)


@pytest.mark.parametrize("name", CORE)
def test_gradients(name):
    model, args, kwargs = build(name)
    loss(model, args, kwargs).backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    model.zero_grad()
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    for training in (False, True):
        model.train(training)
        model.zero_grad()
        loss(model, args, kwargs).backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name not in silent:  # silent in the softmax model too: a mask token, a dropped text output
                assert parameter.grad is not None, parameter_name
                assert torch.isfinite(parameter.grad).all(), parameter_name
                assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", CORE)
def test_doubled_batch_and_bfloat16(name):
    model, args, kwargs = linearized(name)
    with torch.no_grad():
        out = tensors(model(*args, **kwargs))
        twice = tensors(model(*doubled(args), **doubled(kwargs)))
        for one, two in zip(out, twice, strict=True):
            torch.testing.assert_close(two, torch.cat([one, one]), rtol=1e-4, atol=1e-5)
        low = tensors(model.bfloat16()(*cast(args, torch.bfloat16), **cast(kwargs, torch.bfloat16)))
        for one, half in zip(out, low, strict=True):
            assert half.dtype == torch.bfloat16
            assert (half.float() - one).norm() < 0.03 * one.norm()


@pytest.mark.parametrize("name", CORE)
def test_copies(name):
    model, args, kwargs = linearized(name)
    with torch.no_grad():
        out = model(*args, **kwargs)
        twin = copy.deepcopy(model)
        equal(twin(*args, **kwargs), out)
        pickled = pickle.loads(pickle.dumps(model))
        equal(pickled(*args, **kwargs), out)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        equal(torch.load(buffer, weights_only=False)(*args, **kwargs), out)
        other, *_ = build(name, seed=1)
        t5fx.linearize(other, t5fx.everything, example_inputs=(args, kwargs))
        assert not torch.equal(tensors(other(*args, **kwargs))[0], tensors(out)[0])
        other.load_state_dict(model.state_dict())
        equal(other(*args, **kwargs), out)
        for parameter in model.parameters():  # the copies share nothing with the model
            parameter.zero_()
        equal(twin(*args, **kwargs), out)
    t5fx.revert(twin)
    assert not any(key.count(".ttt.") for key in twin.state_dict())


@pytest.mark.parametrize("name", CORE)
def test_gradient_checkpointing(name):
    model, args, kwargs = linearized(name)
    model.train()
    torch.manual_seed(1)
    loss(model, args, kwargs).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    methods = ("enable_gradient_checkpointing", "gradient_checkpointing_enable", "set_grad_checkpointing")
    getattr(model, next(m for m in methods if hasattr(model, m)))()
    torch.manual_seed(1)
    loss(model, args, kwargs).backward()
    checkpointed = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(checkpointed) == set(plain)
    for key in plain:
        torch.testing.assert_close(checkpointed[key], plain[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CORE)
def test_fullgraph(name):
    """Compiles whole at once: in eval and in training mode, at another batch size and dtype, and as a copy."""
    model, args, kwargs = linearized(name)
    with torch.no_grad():
        out = model(*args, **kwargs)
        equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*args, **kwargs), out, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(*args, **kwargs)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    sites = len(t5fx.report(model).selected)
    for operator, per_site in (("key_norm", 1), ("dwc", 2), ("inner_step", 1), ("inner_apply", 1)):
        nodes = [n for g in found.graphs for n in g.graph.nodes if str(n.target).startswith(f"t5fx.{operator}")]
        assert len(nodes) == per_site * sites
    torch._dynamo.reset()
    twin = copy.deepcopy(model).bfloat16().train()
    low = doubled(cast((args, kwargs), torch.bfloat16))
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)(*low[0], **low[1])
    sum((x.float() ** 2).sum() for x in tensors(compiled)).backward()
    assert all(p.grad is not None for n, p in twin.named_parameters() if n.endswith("ttt.w1"))
