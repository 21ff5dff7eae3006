"""sensitivity, and the selectors that are built on it; distill_loss."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from toys import assert_same_state, images, state, vit

import t5fx
from t5fx.errors import ConfigError, SelectionError, T5fxError
from t5fx.select import choose, lightest


def test_each_site_is_scored_as_if_it_alone_were_converted_and_calibrated():
    model, batches = vit(depth=3), [images(), images()]
    torch.manual_seed(5)
    scores = t5fx.sensitivity(model, batches, steps=15)
    assert list(scores) == [f"blocks.{i}.attn" for i in range(3)]
    torch.manual_seed(5)
    t5fx.linearize(model, t5fx.everything, example_inputs=batches[0])
    whole = t5fx.calibrate(model, batches, steps=15)
    assert dict(scores) == whole.last
    t5fx.revert(model)
    t5fx.linearize(model, t5fx.names("blocks.1.attn"), example_inputs=images())
    alone = t5fx.calibrate(model, batches, steps=15)
    assert alone.last["blocks.1.attn"] == pytest.approx(scores["blocks.1.attn"], rel=0.3)  # another start


def test_the_order_is_that_of_what_ttt_can_do():
    """A block whose attention is uniform (queries of zero) is a mean over the tokens, which is easily learned."""
    model = vit(depth=3)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:16] = 0
        model.blocks[1].attn.qkv.bias[:16] = 0
        for i in (0, 2):
            model.blocks[i].attn.qkv.weight[:32] *= 12
    scores = t5fx.sensitivity(model, [images(24, 24, batch=8) for _ in range(8)], steps=60, example_inputs=images())
    assert min(scores, key=scores.get) == "blocks.1.attn"
    first = str(scores).splitlines()[2]
    assert first.split() == ["blocks.1.attn", f"{scores['blocks.1.attn']:.4f}"]


class Stop(Exception):
    pass


@pytest.mark.parametrize("ending", [None, Stop, KeyboardInterrupt])
def test_the_model_is_left_as_it_was(ending):
    model = vit().train()
    x = images()

    def batches():
        yield x
        if ending:
            raise ending
        yield from [x] * 9

    before = state(model)
    if ending:
        with pytest.raises(ending):
            t5fx.sensitivity(model, batches(), steps=3, example_inputs=x)
    else:
        t5fx.sensitivity(model, batches(), steps=3, example_inputs=x)
    assert_same_state(before, state(model))
    t5fx.linearize(model, example_inputs=x)
    with pytest.raises(T5fxError, match="linearized"):
        t5fx.sensitivity(model, [x])


# ---- selectors ----------------------------------------------------------------------------------------------


def sites(depth=4):
    return t5fx.inspect(vit(depth=depth), images(32, 32)).sites


def scores_of(found, *values):
    return {site.name: value for site, value in zip(found, values, strict=True)}


def test_easiest():
    found = sites()
    scores = scores_of(found, 0.4, 0.1, 0.3, 0.2)
    assert [s.name for s in choose(found, t5fx.easiest(0.5, scores))] == ["blocks.1.attn", "blocks.3.attn"]
    assert len(choose(found, t5fx.easiest(1, scores))) == 4
    assert len(choose(found, t5fx.easiest(0.01, scores))) == 1
    both = choose(found, t5fx.easiest(0.5, scores) & ~t5fx.first(2))
    assert [s.name for s in both] == ["blocks.3.attn"]
    assert repr(t5fx.easiest(0.5, scores)) == "easiest(0.5)"
    model = t5fx.linearize(vit(depth=4), t5fx.easiest(0.25, scores), example_inputs=images(32, 32))
    assert [s.name for s in t5fx.report(model).selected] == ["blocks.1.attn"]


def test_budget_reaches_the_speed_up_with_the_least_harm():
    found = t5fx.inspect(vit(depth=4), images(256, 256)).sites
    assert all(s.ttt_flops < s.softmax_flops for s in found)
    scores = scores_of(found, 0.5, 0.1, 0.3, 0.2)
    report = t5fx.Report("toy", found, t5fx.T5)
    for speedup in (1.1, 1.5, 2.0, 3.0):
        chosen = choose(found, t5fx.budget(speedup, scores))
        totals = report.totals(chosen)
        assert totals["softmax_flops"] / totals["flops"] >= speedup
        harm = sum(scores[s.name] for s in chosen)
        for count in range(5):
            for other in itertools.combinations(found, count):
                reached = report.totals(other)
                if reached["softmax_flops"] / reached["flops"] >= speedup:
                    assert harm <= sum(scores[s.name] for s in other) + 1e-12
    with pytest.raises(SelectionError, match=r"budget\(1000\.0\).*all 4 sites.*x faster"):
        choose(found, t5fx.budget(1000.0, scores))


def test_budget_leaves_sites_alone_that_would_be_dearer():
    found = t5fx.inspect(vit(depth=2), images(8, 8)).sites
    assert all(s.ttt_flops > s.softmax_flops for s in found)
    with pytest.raises(SelectionError, match="all 0 sites that gain"):
        choose(found, t5fx.budget(1.1, scores_of(found, 0.1, 0.2)))


@pytest.mark.parametrize("alike", [True, False])
def test_the_knapsack_is_exact(alike):
    rng = random.Random(1)
    for _ in range(40):
        n = rng.randint(1, 9)
        gains = [rng.choice((600, 1000)) if alike else rng.randint(1, 900) for _ in range(n)]
        weights = [rng.random() for _ in range(n)]
        needed = rng.randint(1, sum(gains))
        chosen = lightest(weights, gains, needed)
        assert sum(gains[i] for i in chosen) >= needed
        subsets = [s for k in range(n + 1) for s in itertools.combinations(range(n), k)]
        best = min(sum(weights[i] for i in s) for s in subsets if sum(gains[i] for i in s) >= needed)
        assert sum(weights[i] for i in chosen) == pytest.approx(best)


def test_the_knapsack_of_many_large_gains_is_near_the_best_and_soon_done():
    rng = random.Random(2)
    gains = [rng.randint(10**9, 10**11) for _ in range(60)]
    weights = [g * rng.uniform(0.5, 1.5) / 10**11 for g in gains]
    needed = sum(gains) // 2
    chosen = lightest(weights, gains, needed)
    assert sum(gains[i] for i in chosen) >= needed
    order = sorted(range(60), key=lambda i: weights[i] / gains[i])  # greedy by weight per gain
    greedy, total = [], 0
    for i in order:
        if total < needed:
            greedy.append(i)
            total += gains[i]
    assert sum(weights[i] for i in chosen) <= 1.001 * sum(weights[i] for i in greedy)


@pytest.mark.parametrize("make", [lambda s: t5fx.easiest(0, s), lambda s: t5fx.easiest(1.5, s),
                                  lambda s: t5fx.budget(1, s), lambda s: t5fx.budget(float("nan"), s),
                                  lambda s: t5fx.easiest(0.5, {"x": float("nan")}),
                                  lambda s: t5fx.budget(2, {"x": -1.0})])  # fmt: skip
def test_numbers_that_make_no_sense(make):
    with pytest.raises(SelectionError, match=r"easiest|budget"):
        make({"x": 0.1})


def test_scores_of_another_model_and_a_site_on_its_own():
    found = sites()
    with pytest.raises(SelectionError, match=r"no score for 'blocks\.3\.attn'.*sensitivity"):
        choose(found, t5fx.easiest(0.5, scores_of(found[:3], 0.1, 0.2, 0.3)))
    with pytest.raises(SelectionError, match="weighs all sites"):
        t5fx.easiest(0.5, scores_of(found, 1, 2, 3, 4))(found[0])


# ---- distillation -------------------------------------------------------------------------------------------


def test_logits_are_pulled_by_the_divergence():
    student, teacher = torch.randn(4, 3, 7, requires_grad=True), torch.randn(4, 3, 7, requires_grad=True)
    temperature = 2.5
    p = torch.softmax(teacher / temperature, -1)
    by_hand = (p * (p.log() - torch.log_softmax(student / temperature, -1))).sum(-1).mean() * temperature**2
    loss = t5fx.distill_loss(student, teacher, temperature=temperature)
    torch.testing.assert_close(loss, by_hand)
    loss.backward()
    assert teacher.grad is None
    assert student.grad.abs().max() > 0
    assert float(t5fx.distill_loss(teacher, teacher)) == pytest.approx(0, abs=1e-6)


def test_features_are_pulled_by_the_relative_error():
    student, teacher = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(2)], [torch.randn(2, 5, 8) + 3] * 2
    expected = sum(F.mse_loss(s, t) / t.var(correction=0) for s, t in zip(student, teacher, strict=True)) / 2
    torch.testing.assert_close(t5fx.distill_loss(features=(student, teacher)), expected)
    constant = t5fx.distill_loss(features=(teacher[0].mean().expand_as(teacher[0]), teacher[0]))
    assert float(constant) == pytest.approx(1.0, rel=1e-5)
    logits = torch.randn(2, 4), torch.randn(2, 4)
    both = t5fx.distill_loss(*logits, features=(student, teacher), feature_weight=3.0)
    torch.testing.assert_close(both, t5fx.distill_loss(*logits) + 3 * expected)


def test_half_precision_is_compared_in_float32():
    student, teacher = torch.randn(4, 9).half(), torch.randn(4, 9).half()
    loss = t5fx.distill_loss(student, teacher, features=(student, teacher))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, t5fx.distill_loss(student.float(), teacher.float(), features=(student.float(), teacher.float()))
    )


@pytest.mark.parametrize("arguments", [
    {}, {"student": torch.zeros(2, 3)}, {"student": torch.zeros(2, 3), "teacher": torch.zeros(2, 4)},
    {"features": ([torch.zeros(2)], [])}, {"features": (torch.zeros(2), torch.zeros(3))},
    {"student": torch.zeros(2, 3), "teacher": torch.zeros(2, 3), "temperature": 0},
])  # fmt: skip
def test_what_can_not_be_compared(arguments):
    with pytest.raises(ConfigError, match="distill_loss"):
        t5fx.distill_loss(**arguments)
