"""https://github.com/huggingface/diffusers/issues/11360: Flux recompiles for every resolution.

The second size may compile once more, with its sizes dynamic; a third one must not.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from zoo import build, image_ids

import t5fx


def compiles(model, calls):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for kwargs in calls:
        with torch.no_grad():
            want, got = model(**kwargs)[0], compiled(**kwargs)[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return counter.frame_count


@pytest.mark.parametrize("name", ["diffusers/DiT", pytest.param("diffusers/SD3", marks=pytest.mark.slow)])
def test_two_compiles_for_three_sizes(name):
    model, args, kwargs = build(name)
    if args:
        kwargs, args = {"hidden_states": args[0], **kwargs}, ()
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    sizes = ((16, 16), (24, 24), (32, 32)) if name == "diffusers/DiT" else ((16, 16), (24, 12), (28, 20))
    calls = [{**kwargs, "hidden_states": torch.randn(2, 4, *size)} for size in sizes]
    assert compiles(model, calls) <= 2


def test_two_compiles_for_three_sizes_of_packed_latents():
    """The report's model.  Compiled code can't read the grid out of img_ids, so eager mode does it first."""
    model, args, kwargs = build("diffusers/Flux")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    calls = []
    for height, width in ((8, 8), (12, 6), (16, 16)):
        ids = image_ids(height, width)
        calls.append({**kwargs, "hidden_states": torch.randn(2, len(ids), 4), "img_ids": ids})
    assert compiles(model, calls) <= 2
