"""Tracing one module's forward: what becomes nodes, what becomes expectations, what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import CORE, build

import t5fx
from t5fx.capture.dryrun import new_fake_mode, preserved, to_fake
from t5fx.capture.owner import base_class, generate
from t5fx.capture.proxy import Retrace
from t5fx.capture.trace import trace
from t5fx.errors import CaptureError


def traced(module, *args, **kwargs):
    mode = new_fake_mode()
    fake_args, fake_kwargs = to_fake((args, kwargs), mode)
    return trace(module, type(module).forward, fake_args, fake_kwargs, mode)


def run(module, *args):
    """A function that runs the code generated from the trace on other arguments."""
    entry = generate(traced(module, *args).graph, "test", ())
    return lambda *other: entry.function(module, *other)


def module(forward, **parts):
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize("name", CORE)
def test_owners_compute_the_same(name):
    """Every owner's generated code equals its forward, on the calls that the model really makes."""
    model, args, kwargs = build(name)
    names = {site.owner for site in t5fx.inspect(model, (args, kwargs))}
    calls = []
    for owner in names:
        model.get_submodule(owner).register_forward_hook(
            lambda m, a, k, out: calls.append((m, a, k, out)), with_kwargs=True
        )
    with torch.no_grad():
        model(*args, **kwargs)
    assert len(calls) == len(names)
    for owner, a, k, out in calls:
        mode = new_fake_mode()
        fake_args, fake_kwargs = to_fake((a, k), mode)
        entry = generate(trace(owner, base_class(owner).forward, fake_args, fake_kwargs, mode).graph, "test", ())
        holes = [x for x in torch.utils._pytree.tree_leaves((a, k)) if isinstance(x, torch.Tensor)]
        with torch.no_grad():
            again = entry.function(owner, *holes)
        for x, y in zip(torch.utils._pytree.tree_leaves(again), torch.utils._pytree.tree_leaves(out), strict=True):
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_sizes_stay_symbolic():
    f = run(module(lambda self, x: x.reshape(x.shape[0], x.shape[1] // 2, -1) * x.size(-1)), torch.randn(2, 4, 3))
    x = torch.randn(5, 8, 6)
    torch.testing.assert_close(f(x), x.reshape(5, 4, -1) * 6)


def test_a_branch_on_a_size_is_expected():
    f = run(module(lambda self, x: x + 1 if x.shape[0] > 2 else x - 1), torch.zeros(4, 2))
    assert f(torch.zeros(9, 2)).eq(1).all()
    with pytest.raises(Retrace):
        f(torch.zeros(2, 2))


def test_numbers_made_of_sizes():
    f = run(module(lambda self, x: x / math.sqrt(x.shape[-1])), torch.ones(2, 4))
    torch.testing.assert_close(f(torch.ones(7, 4)), torch.full((7, 4), 0.5))
    with pytest.raises(Retrace):
        f(torch.ones(2, 9))


def test_parts_are_counted():
    f = run(module(lambda self, x: sum(part * (i + 1) for i, part in enumerate(x.split(2)))), torch.ones(4, 3))
    torch.testing.assert_close(f(torch.ones(4, 3)), torch.full((2, 3), 3.0))
    with pytest.raises(Retrace):  # three parts, not two: their sum is another program
        f(torch.ones(6, 3))


def test_dtypes_follow():
    f = run(module(lambda self, x, y: (x.float() * 2).to(y.dtype)), torch.ones(2), torch.ones(2))
    assert f(torch.ones(2), torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_dtypes_that_must_be_plain():
    f = run(module(lambda self, x: x.clamp(max=torch.finfo(x.dtype).max)), torch.ones(2))
    assert f(torch.ones(2)).dtype == torch.float32
    with pytest.raises(Retrace):
        f(torch.ones(2, dtype=torch.float16))


def test_factories_are_nodes():
    f = run(module(lambda self, x: x + torch.arange(x.shape[-1], dtype=x.dtype)), torch.zeros(2, 4))
    torch.testing.assert_close(f(torch.zeros(3, 4)), torch.arange(4.0).expand(3, 4))


def test_in_place_stays_in_place():
    def forward(self, x):
        y = x.clone()
        y += 1
        y[:, 0] = 5
        return y

    x = torch.zeros(2, 3)
    torch.testing.assert_close(run(module(forward), x)(x), torch.tensor([[5.0, 1, 1]] * 2))
    assert x.eq(0).all()

    def into_the_argument(self, x):
        x *= 2
        return x

    x = torch.ones(2)
    run(module(into_the_argument), x)(x)
    assert x.eq(2).all()


def test_parameters_buffers_and_submodules_are_live():
    def forward(self, x):
        return F.linear(self.inner(x), self.inner.weight, self.inner.bias) + self.shift

    made = module(forward, inner=nn.Linear(3, 3))
    made.register_buffer("shift", torch.ones(3))
    x = torch.randn(2, 3)
    f = run(made, x)
    made.inner = nn.Linear(3, 3)
    made.shift = torch.zeros(3)
    torch.testing.assert_close(f(x), made(x), rtol=0, atol=0)


def test_other_kinds_of_outputs():
    f = run(module(lambda self, x: {"a": x, "b": [x + 1, None]}), torch.ones(2))
    out = f(torch.ones(2))
    assert set(out) == {"a", "b"}
    assert out["b"][1] is None


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, "branches on the numbers"),
        (lambda self, x: x * float(x[0]), "branches on the numbers"),
        (lambda self, x: nn.Linear(2, 2)(x), "not one of its submodules"),
        (lambda self, x: x + torch.tensor(SECRET), "neither|could not be traced|^$"),
        (lambda self, x: x.nonsense(), "nonsense"),
    ],
)
def test_refusals(forward, message):
    if "^$" in message:
        traced(module(forward), torch.ones(2))  # torch.tensor of plain numbers is a node like other factories
        return
    with pytest.raises(CaptureError, match=message):
        traced(module(forward), torch.ones(2))


SECRET = [1.0, 2.0]


def test_results_kept_on_the_module():
    def forward(self, x):
        self.kept = x + 1
        return self.kept

    made = module(forward)
    with pytest.raises(CaptureError, match=r"self\.kept"):
        traced(made, torch.ones(2))
    assert not hasattr(made, "kept")


def test_tracing_leaves_torch_alone():
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__
    with pytest.raises(CaptureError):
        traced(module(lambda self, x: x.nonsense()), torch.ones(2))
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is getattribute


def test_preserved():
    made = module(lambda self, x: x, inner=nn.BatchNorm1d(3))
    made.cache, made.seen = {"a": 1}, [1]
    mean = made.inner.running_mean
    with preserved(made):
        made.cache["b"] = 2
        made.seen.append(2)
        made.new = 3
        made.inner.running_mean = torch.ones(3)
        made.inner.training = False
        made.inner = nn.Identity()
    assert (made.cache, made.seen) == ({"a": 1}, [1])
    assert not hasattr(made, "new")
    assert made.inner.running_mean is mean
    assert made.inner.training
