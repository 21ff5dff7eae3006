"""A Stable Diffusion 3 pipeline with all its parts, tiny and random, and a handful of images with captions.

make(Path("checkpoint"), Path("pairs"))
StableDiffusion3Pipeline.from_pretrained("checkpoint")
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image

WIDTH = 32  # of the text encoders
COLOURS = ("red", "green", "blue", "gold", "pink", "brown", "purple", "orange")


def make(checkpoint: Path, pairs: Path, seed: int = 0) -> None:
    """Write both folders, unless they are there.  The transformer has 4 blocks, dual attention in two, query-key norms:
    the parts that SD3.5 Medium has."""
    if not (checkpoint / "model_index.json").is_file():
        torch.manual_seed(seed)
        pipeline().save_pretrained(checkpoint)
    pairs.mkdir(parents=True, exist_ok=True)
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (80 + number, 72), colour).save(pairs / f"{number}.png")
        (pairs / f"{number}.txt").write_text(f"a {colour} wall\n")


def pipeline() -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16, dual_attention_layers=(0, 1), qk_norm="rms_norm",
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, sample_size=64, layers_per_block=1,
        shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip(), tokenizer=clip_tokenizer(), text_encoder_2=clip(), tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


def clip() -> transformers.CLIPTextModelWithProjection:
    config = transformers.CLIPTextConfig(
        vocab_size=54, hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    return transformers.CLIPTextModelWithProjection(config)


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """One token a letter, another for a word's last."""
    letters = string.ascii_lowercase
    tokens = [*letters, *[letter + "</w>" for letter in letters], "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=16)


def t5() -> transformers.T5EncoderModel:
    config = transformers.T5Config(vocab_size=30, d_model=2 * WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config)


def t5_tokenizer() -> transformers.T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    return transformers.T5Tokenizer(
        vocab=[*pieces, *((letter, -3.0) for letter in string.ascii_lowercase)], extra_ids=0
    )
