"""The life of a diffusers pipeline around linearize: generate, save, load, offload, checkpoint, change processors."""

import contextlib

import accelerate
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from toys import assert_same_state, louder, run, state
from zoo import build

import t5fx

SD3_PARTS = [f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")]
ABSENT = dict.fromkeys(SD3_PARTS)  # the prompt comes embedded
CPU = torch.device("cpu")


def filled(model):
    """Gates that start at zero would hide the attention behind them."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def vae():
    return AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=32, shift_factor=0.0,
    ).eval()  # fmt: skip


def dit_pipeline():
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    return DiTPipeline(transformer=filled(transformer), vae=vae(), scheduler=DDIMScheduler())


def sd3_pipeline():
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler()
    return StableDiffusion3Pipeline(transformer=filled(transformer), vae=vae(), scheduler=scheduler, **ABSENT)


def generate(pipeline, **size):
    """The picture of two steps, as a tensor."""
    pipeline.set_progress_bar_config(disable=True)
    if isinstance(pipeline, DiTPipeline):
        conditions = {"class_labels": [1, 2]}
    else:
        draw = torch.Generator().manual_seed(5)
        prompt = {"prompt_embeds": (1, 7, 32), "pooled_prompt_embeds": (1, 32)}
        conditions = {n + k: torch.randn(s, generator=draw) for k, s in prompt.items() for n in ("", "negative_")}
    generator = torch.Generator().manual_seed(0)
    out = pipeline(**conditions, **size, num_inference_steps=2, generator=generator, output_type="np")
    return torch.from_numpy(out.images)


def converted(name):
    """A converted zoo model with loud new weights, its inputs, its softmax output and its own."""
    model, args, kwargs = build(name)
    softmax = run(model, args, kwargs)
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)))
    out = run(model, args, kwargs)
    assert not torch.allclose(out, softmax, atol=1e-3)
    return model, args, kwargs, softmax, out


def same(model, args, kwargs, wanted):
    torch.testing.assert_close(run(model, args, kwargs), wanted, rtol=0, atol=0)


# -- pipelines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dit_pipeline, sd3_pipeline])
def test_generate_save_load_revert(make, tmp_path):
    pipeline = make()
    before = generate(pipeline)
    t5fx.linearize(pipeline.transformer, t5fx.everything)
    louder(pipeline.transformer)
    after = generate(pipeline)
    assert after.shape == before.shape
    assert after.isfinite().all()
    assert (after - before).abs().max() > 1e-3
    assert type(pipeline.transformer).__name__ in ("DiTTransformer2DModel", "SD3Transformer2DModel")

    pipeline.save_pretrained(tmp_path / "pipeline")
    t5fx.save(pipeline.transformer, tmp_path / "ttt")
    absent = ABSENT if make is sd3_pipeline else {}
    loaded = type(pipeline).from_pretrained(tmp_path / "pipeline", **absent)
    torch.testing.assert_close(generate(loaded), before, rtol=0, atol=0)  # without the recipe: the softmax model
    t5fx.load(loaded.transformer, tmp_path / "ttt")
    torch.testing.assert_close(generate(loaded), after, rtol=0, atol=0)

    t5fx.revert(pipeline.transformer)
    torch.testing.assert_close(generate(pipeline), before, rtol=0, atol=0)


def test_another_shape():
    """The grid follows the latents; a grid turned on its side is another one."""
    pipeline = sd3_pipeline()
    t5fx.linearize(pipeline.transformer, t5fx.everything)
    louder(pipeline.transformer)
    small = generate(pipeline)
    wide, high = generate(pipeline, height=16, width=32), generate(pipeline, height=32, width=16)
    assert wide.shape[1:3] == (16, 32)
    assert high.shape[1:3] == (32, 16)
    torch.testing.assert_close(generate(pipeline), small, rtol=0, atol=0)
    torch.testing.assert_close(generate(pipeline, height=16, width=32), wide, rtol=0, atol=0)


# -- offloading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diffusers/DiT", "diffusers/SD3"])
def test_sequential_offload(name):
    """Between the calls there is no weight in the model, new ones included."""
    model, args, kwargs, softmax, out = converted(name)
    accelerate.cpu_offload(model, execution_device=CPU)
    assert all(p.is_meta for n, p in model.named_parameters() if ".ttt." in n)
    same(model, args, kwargs, out)
    assert all(p.is_meta for n, p in model.named_parameters() if ".ttt." in n)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    same(model, args, kwargs, out)
    same(t5fx.revert(model), args, kwargs, softmax)


@pytest.mark.parametrize("when", ["before", "after"])
def test_model_offload(when):
    """The hook of enable_model_cpu_offload moves the whole model: it may come first."""
    model, args, kwargs, softmax, out = converted("diffusers/SD3")
    if when == "before":
        weights = model.state_dict()
        t5fx.revert(model)
        _, hook = accelerate.cpu_offload_with_hook(model, execution_device=CPU)
        t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
        model.load_state_dict(weights)
    else:
        _, hook = accelerate.cpu_offload_with_hook(model, execution_device=CPU)
    same(model, args, kwargs, out)
    hook.offload()
    same(model, args, kwargs, out)
    hook.remove()
    same(t5fx.revert(model), args, kwargs, softmax)


def test_group_offload_and_layerwise_casting():
    model, args, kwargs, _, out = converted("diffusers/SD3")
    model.enable_group_offload(onload_device=CPU, offload_type="leaf_level")
    same(model, args, kwargs, out)
    model, args, kwargs, _, out = converted("diffusers/DiT")
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    low = run(model, args, kwargs)
    assert 0 < (low - out).norm() < 0.05 * out.norm()


def accelerate_offload(model):
    accelerate.cpu_offload(model, execution_device=CPU)


def group_offload(model):
    model.enable_group_offload(onload_device=CPU, offload_type="leaf_level")


@pytest.mark.parametrize("offload", [accelerate_offload, group_offload])
def test_offloaded_models_are_refused(offload):
    model, args, kwargs = build("diffusers/SD3")
    offload(model)
    before = state(model)
    for verb in (t5fx.linearize, t5fx.inspect):
        with pytest.raises(t5fx.T5fxError, match=r"offloading hooks .* Linearize first"):
            verb(model, example_inputs=(args, kwargs))
    assert_same_state(before, state(model))


def test_owners_with_hooks_are_refused():
    model, args, kwargs = build("diffusers/DiT")
    for module in model.modules():
        if isinstance(module, Attention):
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    with pytest.raises(t5fx.SelectionError, match="accelerate's hooks"):
        t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))


# -- checkpointing and processors -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dit_pipeline, sd3_pipeline])
def test_gradient_checkpointing(make):
    transformer = make().transformer
    args, kwargs = t5fx.capture.inputs.infer(transformer)
    torch.nn.init.normal_(next(iter((*args, *kwargs.values()))))
    louder(t5fx.linearize(transformer.train(), t5fx.everything))
    gradients = []
    for context in (contextlib.nullcontext, transformer.enable_gradient_checkpointing):
        context()
        transformer.zero_grad()
        torch.manual_seed(2)
        transformer(*args, **kwargs)[0].square().sum().backward()
        gradients.append({n: p.grad for n, p in transformer.named_parameters() if p.grad is not None})
    assert transformer.is_gradient_checkpointing
    assert sum(".ttt." in n for n in gradients[0]) == 14
    assert all(gradient.any() for n, gradient in gradients[0].items() if ".ttt." in n)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def set_everywhere(model, processor):
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(processor)


class Doubling:
    """Makes no attention call."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **_):
        return hidden_states * 2 if encoder_hidden_states is None else (hidden_states * 2, encoder_hidden_states * 2)


class ModuleProcessor(Doubling, torch.nn.Module):
    """As IP-Adapter's are: kept among the submodules."""

    __call__ = Doubling.__call__


OTHERS = [
    ("diffusers/DiT", processors.AttnProcessor()),
    ("diffusers/DiT", processors.SlicedAttnProcessor(2)),
    ("diffusers/DiT", Doubling()),
    ("diffusers/DiT", ModuleProcessor()),
    ("diffusers/SD3", processors.AttnProcessor2_0()),
    ("diffusers/SD3", processors.XFormersAttnProcessor()),
    ("diffusers/SD3", processors.FusedJointAttnProcessor2_0()),
]


@pytest.mark.parametrize(("name", "processor"), OTHERS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_another_processor_is_refused(name, processor):
    model, args, kwargs, _, out = converted(name)
    usual = type(next(m for m in model.modules() if isinstance(m, Attention)).processor)
    if hasattr(model, "set_attn_processor"):
        model.set_attn_processor(processor)
    else:
        set_everywhere(model, processor)
    for _ in range(2):
        with pytest.raises(t5fx.CaptureError, match=f"was {usual.__name__} .* is {type(processor).__name__} now"):
            run(model, args, kwargs)
    set_everywhere(model, usual())
    same(model, args, kwargs, out)


@pytest.mark.parametrize("name", ["diffusers/DiT", "diffusers/SD3"])
def test_a_processor_set_before(name):
    """Fused projections are other Linears under another processor: the converted site uses them."""
    model, args, kwargs, softmax, out = converted(name)
    fused, *_ = build(name)
    for module in fused.modules():
        if isinstance(module, Attention):
            module.fuse_projections(fuse=True)
    if hasattr(fused, "fuse_qkv_projections"):
        fused.fuse_qkv_projections()
    else:
        set_everywhere(fused, processors.FusedAttnProcessor2_0())
    same(fused, args, kwargs, softmax)
    t5fx.linearize(fused, t5fx.everything, example_inputs=(args, kwargs))
    fused.load_state_dict({k: v for k, v in model.state_dict().items() if ".ttt." in k}, strict=False)
    torch.testing.assert_close(run(fused, args, kwargs), out, rtol=1e-4, atol=1e-5)
    projection = next(m for m in fused.modules() if isinstance(m, Attention)).to_qkv
    with torch.no_grad():
        projection.weight.zero_()
    assert not torch.allclose(run(fused, args, kwargs), out, atol=1e-3)
