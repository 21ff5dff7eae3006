"""transformers models around linearize: attention maps, return_dict, save_pretrained; and what one process does."""

import copy
import threading

import pytest
import torch
import transformers
from toys import first_tensor, louder, run
from transformers import VideoMAEConfig, VideoMAEModel, ViTConfig, ViTForImageClassification, ViTModel
from zoo import build

import t5fx

SIZES = {
    "image_size": 64, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def vit(attention="sdpa", kind=ViTModel):
    torch.manual_seed(0)
    return kind(ViTConfig(**SIZES, attn_implementation=attention)).eval()


def converted(model, select=t5fx.everything, x=IMAGES):
    return louder(t5fx.linearize(model, select, example_inputs=(x,)))


# -- attention maps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [t5fx.everything, t5fx.first(1)], ids=["all", "one"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_maps_are_refused(attention, select):
    model = vit(attention)
    maps = model(IMAGES, output_attentions=True).attentions
    if attention == "eager":
        assert [m.shape for m in maps] == [(2, 2, 17, 17)] * 2
    converted(model, select)
    out = run(model, (IMAGES,), {})
    with pytest.raises(t5fx.CaptureError, match="output_attentions=True"):
        model(IMAGES, output_attentions=True)
    torch.testing.assert_close(run(model, (IMAGES,), {"output_attentions": False}), out, rtol=0, atol=0)
    hidden = model(IMAGES, output_hidden_states=True).hidden_states
    assert [h.shape for h in hidden] == [(2, 17, 32)] * 3
    if attention == "eager":
        model.config.output_attentions = True
        with pytest.raises(t5fx.CaptureError, match="output_attentions=True"):
            model(IMAGES)
        model.config.output_attentions = False
    t5fx.revert(model)
    again = model(IMAGES, output_attentions=True).attentions
    assert len(again) == len(maps)
    assert all(map(torch.equal, again, maps))


def test_attention_maps_of_a_part_and_of_a_model_that_does_not_tell_its_layers():
    whole = vit("eager", ViTForImageClassification)
    converted(whole.vit)
    with pytest.raises(t5fx.CaptureError, match="output_attentions=True"):
        whole(IMAGES, output_attentions=True)
    config = VideoMAEConfig(**{**SIZES, "num_frames": 4}, attn_implementation="eager")
    model, video = VideoMAEModel(config).eval(), torch.randn(1, 4, 3, 64, 64)
    assert len(model(video, output_attentions=True).attentions) == 2
    converted(model, x=video)
    with pytest.raises(t5fx.CaptureError, match="output_attentions=True"):
        model(video, output_attentions=True)


def test_eager_equals_sdpa():
    eager, sdpa = vit("eager"), vit("sdpa")
    softmax = run(sdpa, (IMAGES,), {})
    converted(eager)
    converted(sdpa)
    assert [site.form for site in t5fx.report(eager)] == ["written", "written"]
    assert [site.form for site in t5fx.report(sdpa)] == ["sdpa", "sdpa"]
    out = run(sdpa, (IMAGES,), {})
    assert (out - softmax).abs().max() > 1e-2
    torch.testing.assert_close(run(eager, (IMAGES,), {}), out, rtol=1e-5, atol=1e-5)


# -- outputs and files ----------------------------------------------------------------------------------------


def test_return_dict():
    model = converted(vit())
    named, plain = model(IMAGES, return_dict=True), model(IMAGES, return_dict=False)
    assert isinstance(named, transformers.utils.ModelOutput)
    assert type(plain) is tuple
    assert len(plain) == 2
    assert torch.equal(named.last_hidden_state, plain[0])
    assert torch.equal(named.pooler_output, plain[1])


def test_save_pretrained(tmp_path):
    softmax = run(vit(), (IMAGES,), {})
    model = converted(vit())
    out = run(model, (IMAGES,), {})
    model.save_pretrained(tmp_path / "base")
    stored = transformers.modeling_utils.load_state_dict(str(tmp_path / "base" / "model.safetensors"))
    assert len(stored) == len(model.state_dict())  # under the names of transformers 4
    assert sum(".ttt." in key for key in stored) == 14
    t5fx.save(model, tmp_path / "ttt")
    loaded = ViTModel.from_pretrained(tmp_path / "base").eval()
    torch.testing.assert_close(run(loaded, (IMAGES,), {}), softmax, rtol=0, atol=0)
    t5fx.load(loaded, tmp_path / "ttt")
    torch.testing.assert_close(run(loaded, (IMAGES,), {}), out, rtol=0, atol=0)


# -- one process ----------------------------------------------------------------------------------------------


def test_module_compile():
    model = converted(vit())
    out = run(model, (IMAGES,), {})
    model.compile(backend="aot_eager", fullgraph=True)
    compiled = first_tensor(model(IMAGES))
    torch.testing.assert_close(compiled, out, rtol=1e-4, atol=1e-5)
    compiled.square().sum().backward()
    assert model.layers[0].attention.ttt.w1.grad.any()


def test_ema():
    """The average of a model's weights runs on its own weights, and follows the model."""
    model, args, kwargs = build("timm/vit_tiny")
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=args))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    before = run(model, args, kwargs)
    average.update_parameters(model)
    torch.testing.assert_close(run(average, args, kwargs), before, rtol=0, atol=0)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    after = run(model, args, kwargs)
    average.update_parameters(model)
    middle = run(average, args, kwargs)
    assert (middle - before).abs().max() > 1e-3
    assert (middle - after).abs().max() > 1e-3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(start[name], 0.5)
    torch.testing.assert_close(middle, run(model, args, kwargs), rtol=1e-4, atol=1e-4)


def test_one_class_converted_differently():
    """The class of an owner is shared, what was done to it is not."""
    models = [vit() for _ in range(3)]
    softmax = run(models[2], (IMAGES,), {})
    converted(models[0])
    one = louder(t5fx.linearize(models[1], t5fx.last(1), config=t5fx.DIT5_TTT, example_inputs=(IMAGES,)))
    outputs = [run(m, (IMAGES,), {}) for m in models]
    assert torch.equal(outputs[2], softmax)
    alone = louder(t5fx.linearize(vit(), t5fx.last(1), config=t5fx.DIT5_TTT, example_inputs=(IMAGES,)))
    torch.testing.assert_close(outputs[1], run(alone, (IMAGES,), {}), rtol=0, atol=0)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    t5fx.revert(models[0])
    assert torch.equal(run(models[0], (IMAGES,), {}), softmax)
    assert torch.equal(run(one, (IMAGES,), {}), outputs[1])


def test_threads_at_two_resolutions():
    """Grids of as many tokens: taking the other thread's grid would not be noticed but in the numbers."""
    model, args, _ = build("timm/vit_dynamic_size")
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):  # layer scales start at 1e-5
            torch.nn.init.ones_(parameter)
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=args))
    pictures = [torch.randn(1, 3, 28, 112), torch.randn(1, 3, 112, 28)]
    alone = copy.deepcopy(model)
    with torch.no_grad():
        wanted = [alone.forward_features(x) for x in pictures]
        for x, sizes, other in zip(pictures, [(8, 2), (2, 8)], wanted, strict=True):
            with t5fx.grid(alone, sizes):
                assert (alone.forward_features(x) - other).abs().max() > 1e-2
    barrier, wrong = threading.Barrier(2), []

    def work(x, out):
        for _ in range(8):
            barrier.wait()
            with torch.no_grad():
                if not torch.equal(model.forward_features(x), out):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(pictures, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
