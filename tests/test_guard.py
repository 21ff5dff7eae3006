"""TrainingGuard: the first number that is not finite stops the training, with the name of the site."""

import pytest
import torch
from toys import assert_same_state, images, state, vit

import t5fx
from t5fx.errors import T5fxError, TrainingError


def converted(**options):
    return t5fx.linearize(vit(**options), t5fx.everything, example_inputs=images())


def test_a_fast_weight_that_is_not_finite_names_its_site():
    model = converted(depth=3)
    with t5fx.TrainingGuard(model) as guard:
        guard.check(model(images()).sum())
        model.blocks[1].attn.ttt.w2.data.fill_(float("inf"))
        with pytest.raises(
            TrainingError, match=r"fast weights of site 'blocks\.1\.attn' are not finite in step 2"
        ) as e:
            guard.check(model(images()).sum())
    assert e.value.site == "blocks.1.attn"


def test_the_fast_weights_are_looked_at_even_where_the_output_is_finite():
    """Overflow in a weight whose column the queries do not use."""
    model = converted(depth=1)
    ttt = model.blocks[0].attn.ttt
    original = torch.nan_to_num
    with t5fx.TrainingGuard(model) as guard:
        ttt.w3.data[0, 0, 0] = float("inf")
        model.blocks[0].attn.proj.register_forward_pre_hook(lambda m, args: (original(args[0], 0, 0, 0),))
        output = model(images())
        assert output.isfinite().all()
        with pytest.raises(TrainingError, match="fast weights"):
            guard.check(output.sum())


def test_an_output_and_a_loss_that_are_not_finite():
    model = converted()
    guard = t5fx.TrainingGuard(model)
    model.blocks[0].attn.proj.bias.data[0] = float("nan")
    with pytest.raises(TrainingError, match=r"outputs of site 'blocks\.0\.attn'"):
        guard.check(model(images()).sum())
    model.blocks[0].attn.proj.bias.data[0] = 0
    with pytest.raises(TrainingError, match="the loss is not finite in step 1") as error:
        guard.check(model(images()).sum() * float("inf"))
    assert error.value.site is None
    guard.check(model(images()).sum())
    guard.check()
    assert guard.steps == 2


def test_training_under_guard_is_the_same_training_and_it_leaves_nothing_behind():
    weights = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = converted()
        before = state(model)
        guard = t5fx.TrainingGuard(model) if guarded else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = model(images()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if guard:
                guard.check(loss)
            optimizer.step()
        if guard:
            guard.remove()
        after = state(model)
        before.pop("tensors"), after.pop("tensors")
        assert after.pop("rng") is not None
        before.pop("rng")
        assert before == after
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_step_that_blows_up_is_found_at_its_first_site():
    config = t5fx.T5.replace(key_norm=False, inner_lr=1e30)
    model = t5fx.linearize(vit(), t5fx.everything, config=config, example_inputs=images()).float()
    with t5fx.TrainingGuard(model) as guard:
        loss = model(1e4 * images().float()).sum()
        with pytest.raises(TrainingError, match=r"blocks\.0\.attn"):
            guard.check(loss)


def test_a_compiled_model_runs_under_guard():
    model = converted()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with t5fx.TrainingGuard(model) as guard:
        guard.check(compiled(images()).sum())
        with pytest.raises(TrainingError, match="loss"):
            guard.check(torch.tensor(float("nan")))


def test_a_model_that_is_not_linearized():
    before = state(model := vit())
    with pytest.raises(T5fxError, match="not linearized"):
        t5fx.TrainingGuard(model)
    assert_same_state(before, state(model))


def test_two_hundred_steps_in_float16_with_a_gradient_scaler():
    torch.manual_seed(0)
    model = converted().float().train()
    optimizer = torch.optim.AdamW(t5fx.param_groups(model, 1e-3, new_lr_scale=2))
    scaler = torch.amp.GradScaler("cpu")
    labels, losses = torch.arange(8) % 5, []
    x = images(batch=8).float()
    with t5fx.TrainingGuard(model) as guard:
        for _ in range(200):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x).float(), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            guard.check(loss)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
    assert guard.steps == 200
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.isfinite().all() for p in model.parameters())
