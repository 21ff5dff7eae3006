"""The Triton kernel of a whole site: what it takes, and how its launches follow each other.

Forward: key statistics (2 launches), the inner step, one launch a fast weight, the inner model on the queries. mse adds
the residual before the step. Where the convolution does not fit into a kernel's registers, ``prepare_tokens`` runs
before it (:mod:`.configs` says where).
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from . import configs
from .problem import Convolution, Gradients, Problem, Saved, Tensors, empty_tokens
from .triton_site import DTYPES, NARROWEST, WIDEST, Site, interpreting, padded, shared_memory, target_of


class TritonKernel:
    """:class:`t5fx.kernels.problem.Kernel` in Triton, for CUDA and HIP devices (and CPU tensors when interpreting)."""

    name = "triton"

    def refuse(self, problem: Problem, tensors: Tensors) -> str | None:
        """Why this kernel can't take such a call, or None. Reads shapes, strides, dtypes and devices only."""
        if find_spec("triton") is None:
            return "triton is not installed"
        query, key, value, weights, conv_query, conv_key, _ = tensors
        if not query.dtype == key.dtype == value.dtype:
            return f"query, key and value have different dtypes: {query.dtype}, {key.dtype}, {value.dtype}"
        if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"Triton kernels take float16, bfloat16 and float32, not {query.dtype}"
        if problem.inner not in ("swiglu", "mlp") or problem.loss not in ("dot", "mse"):
            return f"there is no Triton kernel for the inner model {problem.inner} with the loss {problem.loss}"
        reason = _refuse_device(query.device) or _refuse_sizes(tensors) or _refuse_grid(problem, conv_query, conv_key)
        if reason is not None:
            return reason
        width = max(padded(size) for size in (query.shape[-1], value.shape[-1], weights[0].shape[-1]))
        target = target_of(query.device)
        return configs.refuse(target, DTYPES[query.dtype], width, shared_memory(query.device))

    def forward(self, problem: Problem, tensors: Tensors, rate: Tensor) -> tuple[Tensor, Saved]:
        """output [B, H, Nq, Dv] over memory [B, Nq, H, Dv], in query's dtype; what backward needs.

        query, key, value: any strides with channels next to each other (else one copy is made).
        """
        from . import triton_phases as phases

        site = Site.of(problem, tensors)
        output = empty_tokens(tensors.query, channels=site.value_dim)
        with site.on_device():
            stats = phases.statistics(site, tensors.key)
            fast, low = phases.step(site, tensors, rate, stats)
            phases.apply(site, tensors.query, low, tensors.conv_query, output)
        return output, Saved(stats, fast)

    def backward(self, problem: Problem, tensors: Tensors, rate: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """All gradients. Activations are made again from the inputs, ``saved.stats`` and ``saved.fast``."""
        from . import triton_gradient as gradient

        site = Site.of(problem, tensors)
        with site.on_device():
            return gradient.backward(site, tensors, rate, saved, grad)


def _refuse_device(device: torch.device) -> str | None:
    if device.type == "cuda" or (device.type == "cpu" and interpreting()):
        return None
    return f"Triton kernels run on CUDA and HIP devices, the tensors are on {device.type}"


def _refuse_sizes(tensors: Tensors) -> str | None:
    query, key, value, weights, *_ = tensors
    sizes = {
        "head_dim": query.shape[-1],
        "value_dim": value.shape[-1],
        "hidden": weights[0].shape[-1],
    }
    for name, size in sizes.items():
        if not NARROWEST <= size <= WIDEST:
            return f"Triton kernels take {name} from {NARROWEST} to {WIDEST}, not {size}"
    for name, x in {"query": query, "key": key, "value": value}.items():
        if 0 in x.shape:
            return f"{name} is empty: {tuple(x.shape)}"
        # Inside a block of tokens offsets have 32 bits.
        if any(abs(stride) >= 2**24 for stride in x.stride()[2:3]):
            return f"the tokens of {name} lie {x.stride(2)} elements apart, Triton kernels take less than {2**24}"
    return None


def _refuse_grid(problem: Problem, conv_query: Convolution | None, conv_key: Convolution | None) -> str | None:
    for convolution in (conv_query, conv_key):
        if convolution is None:
            continue
        sides = convolution.weight.shape[2:]
        if len(sides) != len(problem.grid) or not 1 <= len(sides) <= 3:
            return f"a convolution with {len(sides)} axes does not fit a grid of {problem.grid}"
        if any(side % 2 == 0 for side in sides) or math.prod(sides) > 49:
            return f"Triton kernels take convolutions of odd sides and at most 49 taps, not {tuple(sides)}"
    return None
