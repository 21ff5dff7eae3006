"""Example inputs: bring what a user gave into one form, or infer them for timm, transformers and diffusers models.

The numbers do not matter (discovery looks at shapes), the shapes do: they decide the token counts in a report.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .dryrun import on_meta

Call = tuple[tuple, dict[str, Any]]


def normalize(model: nn.Module, example_inputs: Any) -> Call:
    """``example_inputs`` (a tensor, a tuple, a dict of keywords, ``(args, kwargs)``, or None) as ``(args, kwargs)``.

    Raises:
        InputError: they are of another type, or None for a model whose inputs can't be inferred.
    """
    if example_inputs is None:
        return infer(model)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        pair = tuple(example_inputs)
        if len(pair) == 2 and isinstance(pair[0], (tuple, list)) and isinstance(pair[1], dict):
            return tuple(pair[0]), dict(pair[1])
        return pair, {}
    if hasattr(example_inputs, "keys"):  # BatchFeature and the like
        return (), {key: example_inputs[key] for key in example_inputs.keys()}  # noqa: SIM118
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tensor, a tuple, a dict of keywords or "
        "(args, kwargs)"
    )


def infer(model: nn.Module, size: int | tuple[int, int] | None = None) -> Call:
    """Inputs that ``model`` accepts, from its configuration; ``size`` overrides the image (or latent) size.

    Raises:
        InputError: the model is not one of timm, transformers or diffusers; the message says what to pass.
    """
    library = next((c.__module__.split(".")[0] for c in type(model).__mro__
                    if c.__module__.split(".")[0] in _BY_LIBRARY), None)  # fmt: skip
    if library is None:
        raise InputError(
            f"example inputs can't be inferred for {type(model).__name__} (they are for timm, transformers and "
            "diffusers models): pass example_inputs=, a tensor, a tuple, a dict of keywords or (args, kwargs), such as "
            "example_inputs=torch.randn(1, 3, 224, 224)"
        )
    hw = (size, size) if isinstance(size, int) else size
    try:
        kwargs = _BY_LIBRARY[library](model, hw)
    except InputError:
        raise
    except Exception as error:  # an unusual configuration
        raise InputError(
            f"example inputs of {type(model).__name__} could not be inferred ({type(error).__name__}: {error}): "
            "pass example_inputs="
        ) from error
    args = (kwargs.pop("*"),) if "*" in kwargs else ()
    return args, kwargs


def _place(model: nn.Module) -> dict[str, Any]:
    """Device and dtype of the first floating-point parameter."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = torch.device("meta") if on_meta(model) else parameter.device if parameter is not None else None
    return {"device": device, "dtype": parameter.dtype if parameter is not None else None}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[-2]), int(value[-1]))


def _timm(model: Any, hw: tuple[int, int] | None) -> dict[str, Any]:
    channels, *default = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    embed = getattr(model, "patch_embed", None)
    if getattr(embed, "img_size", None):
        default = embed.img_size  # type: ignore[union-attr]
    projection = getattr(embed, "proj", None)
    channels = getattr(projection, "in_channels", channels)
    return {"*": torch.zeros(1, channels, *(hw or _pair(default)), **_place(model))}


def _transformers(model: Any, hw: tuple[int, int] | None) -> dict[str, Any]:
    config = model.config
    if getattr(model, "main_input_name", "") == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = hw or _pair(getattr(vision, "image_size", None) or 224)
        return {"pixel_values": torch.zeros(1, getattr(vision, "num_channels", 3), *size, **_place(model))}
    dummy = dict(model.dummy_inputs)
    device = _place(model)["device"]
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in dummy.items()}


def _first(config: Any, *names: str) -> Any:
    return next((config[n] for n in names if n in config and config[n] is not None), None)


def _diffusers(model: Any, hw: tuple[int, int] | None) -> dict[str, Any]:
    """Fill the parameters of the forward that have no default, and the usual conditions, from the configuration."""
    config, place = dict(model.config), _place(model)
    parameters = inspect.signature(type(model).forward).parameters
    size = hw or _pair(_first(config, "sample_size") or 32)
    text_width = _first(config, "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim",
                        "text_embed_dim", "cap_feat_dim")  # fmt: skip
    text_width = text_width[0] if isinstance(text_width, (tuple, list)) else text_width
    packed = [name for name in ("img_ids", "img_shapes") if name in parameters]
    # SD3 joins 77 CLIP and 256 T5 tokens; Flux and its kin take 512 of T5.
    usual = 77 if "joint_attention_dim" not in config else 512 if packed else 333
    text_length = _first(config, "max_text_seq_length", "text_len") or usual
    half = (size[0] // 2, size[1] // 2)
    patch = _first(config, "patch_size")
    video = "3D" in type(model).__name__ or (isinstance(patch, (tuple, list)) and len(patch) == 3)
    channels = _first(config, "in_channels") or 4
    kwargs: dict[str, Any] = {}
    for name, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        if name in ("sample", "hidden_states", "x"):
            if packed:
                kwargs[name] = torch.zeros(1, half[0] * half[1], channels, **place)
            elif video:
                kwargs[name] = torch.zeros(1, channels, 2, *size, **place)
            else:
                kwargs[name] = torch.zeros(1, channels, *size, **place)
        elif name == "timestep":
            if "sample" in parameters and "encoder_hidden_states" not in parameters:
                continue  # an autoencoder has no time
            kwargs[name] = torch.ones(1, device=place["device"])
        elif (
            name == "class_labels" and _first(config, "num_embeds_ada_norm") and not _first(config, "caption_channels")
        ):
            kwargs[name] = torch.zeros(1, dtype=torch.long, device=place["device"])
        elif name == "encoder_hidden_states" and text_width:
            kwargs[name] = torch.zeros(1, text_length, text_width, **place)
        elif name in ("pooled_projections", "pooled_projection") and _first(config, "pooled_projection_dim"):
            kwargs[name] = torch.zeros(1, config["pooled_projection_dim"], **place)
        elif name in ("encoder_attention_mask", "encoder_hidden_states_mask") and needed:
            kwargs[name] = torch.ones(1, text_length, dtype=torch.bool, device=place["device"])
        elif name == "img_ids":
            rows = torch.arange(half[0]).repeat_interleave(half[1])
            columns = torch.arange(half[1]).repeat(half[0])
            ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=1)
            device = None if on_meta(model) else place["device"]  # their numbers say where the tokens lie
            kwargs[name] = ids.to(device=device, dtype=place["dtype"])
        elif name == "txt_ids":
            kwargs[name] = torch.zeros(text_length, 3, **place)
        elif name == "img_shapes":
            kwargs[name] = [(1, *half)]
        elif name == "guidance" and _first(config, "guidance_embeds"):
            kwargs[name] = torch.ones(1, **place)
        elif name == "added_cond_kwargs" and _first(config, "use_additional_conditions") is not None:
            kwargs[name] = {"resolution": None, "aspect_ratio": None}
        elif name == "return_dict":
            kwargs[name] = False
    return kwargs


_BY_LIBRARY = {"timm": _timm, "transformers": _transformers, "diffusers": _diffusers}
