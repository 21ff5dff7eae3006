"""Small, randomly initialised instances of real architectures: ``build(name)`` -> ``(model, args, kwargs)``.

``model(*args, **kwargs)`` runs on a CPU in well under a second and needs no download.  ``EXPECTED`` says, for each,
what ``inspect`` must find: how many sites, the codes of the refusals among them, and the layout of the first site.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

ZOO: dict[str, Callable] = {}
EXPECTED: dict[str, tuple[int, tuple[str, ...], str]] = {
    "timm/vit_tiny": (2, (), "1 + 4x4"),
    "timm/deit3_small": (2, (), "1 + 4x4"),
    "timm/eva02_tiny": (2, (), "1 + 4x4"),
    "timm/vit_dinov2_reg4": (2, (), "5 + 4x4"),
    "timm/vit_dynamic_size": (2, (), "5 + 4x4"),
    "timm/siglip": (3, ("pooling",), "4x4"),
    "timm/beit": (2, ("float-mask",) * 2, "1 + 4x4"),
    "timm/swin_tiny": (5, ("float-mask",) * 5, "7x7"),
    "timm/hiera_tiny": (12, (*("shape",) * 4, *("layout",) * 6, "cross", "layout"), "no grid"),
    "timm/pvt_v2_b0": (8, ("cross",) * 6, "2x2"),
    "timm/maxvit_pico": (22, ("float-mask",) * 22, "2x2"),
    "timm/xcit_nano": (4, ("channel", "channel", "pooling", "pooling"), "no grid"),
    "diffusers/DiT": (2, (), "8x8"),
    "diffusers/SD3": (2, (), "8x8 + 7"),
    "diffusers/SD3_dual": (3, (), "8x8 + 7"),
    "diffusers/Flux": (2, (), "7 + 8x8"),
    "diffusers/PixArt": (4, ("cross", "cross"), "8x8"),
    "diffusers/Sana": (2, ("cross", "cross"), "?"),
    "diffusers/UNet2DCondition": (8, ("cross",) * 4, "8x8"),
    "diffusers/AutoencoderKL": (2, (), "16x16"),
    "diffusers/Wan": (4, ("cross", "cross"), "2x8x8"),
    "transformers/ViT": (2, (), "1 + 4x4"),
    "transformers/CLIPVision": (2, (), "1 + 4x4"),
    "transformers/Dinov3ViT": (2, (), "5 + 4x4"),
    "transformers/Bert": (2, (), "no grid"),
    "transformers/Llama": (2, ("query-mask",) * 2, "no grid"),
    "torchvision/vit": (2, (), "1 + 4x4"),
    "torch/MultiheadAttention": (1, (), "4x4"),
    "torch/MultiheadAttention_weights": (1, ("map",), "4x4"),
    "torch/TransformerEncoderLayer": (1, (), "4x4"),
}
# The models whose whole life (training, compiling, saving...) is tested.
CORE = [
    "timm/vit_tiny", "timm/deit3_small", "timm/eva02_tiny", "timm/vit_dinov2_reg4", "timm/vit_dynamic_size",
    "timm/siglip", "diffusers/DiT", "diffusers/SD3", "diffusers/SD3_dual", "transformers/ViT",
    "transformers/CLIPVision", "transformers/Dinov3ViT",
]  # fmt: skip


def register(name: str) -> Callable:
    def put(builder: Callable) -> Callable:
        ZOO[name] = builder
        return builder

    return put


def build(name: str, seed: int = 0, **options) -> tuple[nn.Module, tuple, dict]:
    """One entry in eval mode.  Parameters that start at zero get numbers, or gates would hide what is behind them.

    ``options`` are for timm's entries: ``size=(height, width)`` of the image that they are made for.
    """
    torch.manual_seed(seed)
    model, args, kwargs = ZOO[name](**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model.eval(), args, kwargs


def _timm(name: str, size: int, **overrides) -> Callable:
    def builder(size: tuple[int, int] = (size, size)):
        import timm

        made_for = {"img_size": size} if "img_size" in overrides else {}
        model = timm.create_model(name, num_classes=10, **{**overrides, **made_for})
        return model, (torch.randn(2, 3, *size),), {}

    return builder


_two = {"depth": 2}
_narrow = {"embed_dim": 96, "num_heads": 3}
ZOO["timm/vit_tiny"] = _timm("vit_tiny_patch16_224", 64, img_size=64, **_two)
ZOO["timm/deit3_small"] = _timm("deit3_small_patch16_224", 64, img_size=64, **_two)
ZOO["timm/eva02_tiny"] = _timm("eva02_tiny_patch14_224", 56, img_size=56, **_two)
ZOO["timm/vit_dinov2_reg4"] = _timm("vit_small_patch14_reg4_dinov2", 56, img_size=56, **_two)
ZOO["timm/vit_dynamic_size"] = _timm("vit_small_patch14_reg4_dinov2", 56, img_size=56, dynamic_img_size=True, **_two)
ZOO["timm/siglip"] = _timm("vit_so400m_patch14_siglip_224", 56, img_size=56, **_narrow, **_two)
ZOO["timm/beit"] = _timm("beit_base_patch16_224", 64, img_size=64, **_narrow, **_two)
_swin = {"depths": (1, 2, 1, 1), "embed_dim": 24}
ZOO["timm/swin_tiny"] = _timm("swin_tiny_patch4_window7_224", 112, img_size=112, **_swin)
ZOO["timm/xcit_nano"] = _timm("xcit_nano_12_p16_224", 64, **_two)
ZOO["timm/hiera_tiny"] = _timm("hiera_tiny_224", 224)
ZOO["timm/pvt_v2_b0"] = _timm("pvt_v2_b0", 64)
ZOO["timm/maxvit_pico"] = _timm("maxvit_rmlp_pico_rw_256", 64, img_size=64)


@register("diffusers/DiT")
def _dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    labels = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}
    return model, (torch.randn(2, 4, 16, 16),), {**labels, "return_dict": False}


def _sd3(**overrides) -> Callable:
    def builder():
        from diffusers import SD3Transformer2DModel

        model = SD3Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
            pos_embed_max_size=16, **overrides,
        )  # fmt: skip
        inputs = {"hidden_states": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 32)}
        conditions = {"pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 2.0])}
        return model, (), {**inputs, **conditions, "return_dict": False}

    return builder


ZOO["diffusers/SD3"] = _sd3()
ZOO["diffusers/SD3_dual"] = _sd3(dual_attention_layers=(0,), qk_norm="rms_norm")


@register("diffusers/Flux")
def _flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, (), {
        "hidden_states": torch.randn(2, 64, 4), "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 2.0]),
        "img_ids": image_ids(8, 8), "txt_ids": torch.zeros(7, 3), "return_dict": False,
    }  # fmt: skip


def image_ids(height: int, width: int) -> torch.Tensor:
    """What Flux is told of the places of its packed latents."""
    rows, columns = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return torch.stack([torch.zeros(height * width), rows.flatten(), columns.flatten()], dim=1)


@register("diffusers/PixArt")
def _pixart():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=32, sample_size=16, patch_size=2, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 16, 16),), {
        "encoder_hidden_states": torch.randn(2, 7, 32), "timestep": torch.tensor([1, 2]),
        "encoder_attention_mask": torch.ones(2, 7), "return_dict": False,
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }  # fmt: skip


@register("diffusers/Sana")
def _sana():
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
        sample_size=8,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 8, 8),), {
        "encoder_hidden_states": torch.randn(2, 7, 32), "timestep": torch.tensor([1, 2]),
        "encoder_attention_mask": torch.ones(2, 7), "return_dict": False,
    }  # fmt: skip


@register("diffusers/UNet2DCondition")
def _unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
    )  # fmt: skip
    args = (torch.randn(2, 4, 16, 16), torch.tensor([1, 2]), torch.randn(2, 7, 32))
    return model, args, {"return_dict": False}


@register("diffusers/AutoencoderKL")
def _vae():
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=32,
    )  # fmt: skip
    return model, (torch.randn(2, 3, 32, 32),), {"return_dict": False}


@register("diffusers/Wan")
def _wan():
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, (), {
        "hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 12, 16), "return_dict": False,
    }  # fmt: skip


_encoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_vision = {"image_size": 64, "patch_size": 16, **_encoder}


def _transformers(model_class: str, config_class: str, inputs: Callable, **config) -> Callable:
    def builder():
        import transformers

        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
        return model, (), inputs()

    return builder


def _pixels() -> dict:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


ZOO["transformers/ViT"] = _transformers("ViTModel", "ViTConfig", _pixels, **_vision)
ZOO["transformers/CLIPVision"] = _transformers("CLIPVisionModel", "CLIPVisionConfig", _pixels, **_vision)
ZOO["transformers/Dinov3ViT"] = _transformers(
    "DINOv3ViTModel", "DINOv3ViTConfig", _pixels, num_register_tokens=4, **_vision
)
ZOO["transformers/Bert"] = _transformers(
    "BertModel", "BertConfig",
    lambda: {"input_ids": torch.randint(0, 100, (2, 9)), "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])},
    vocab_size=100, **_encoder,
)  # fmt: skip
ZOO["transformers/Llama"] = _transformers(
    "LlamaModel", "LlamaConfig", lambda: {"input_ids": torch.randint(0, 100, (2, 9)), "use_cache": False},
    vocab_size=100, num_key_value_heads=1, **_encoder,
)  # fmt: skip


@register("torchvision/vit")
def _torchvision_vit():
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(image_size=64, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)
    return model, (torch.randn(2, 3, 64, 64),), {}


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` as a layer of one input."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def _tokens(make: Callable[[], nn.Module]) -> Callable:
    return lambda: (make(), (torch.randn(2, 16, 32),), {})


ZOO["torch/MultiheadAttention"] = _tokens(lambda: SelfAttention(False))
ZOO["torch/MultiheadAttention_weights"] = _tokens(lambda: SelfAttention(True))
ZOO["torch/TransformerEncoderLayer"] = _tokens(lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))
