"""Miniatures of the model families: diffusers' own classes in small sizes with random weights, without a download.

A miniature is a folder in diffusers' format, made the first time that it is asked for and kept in the user's cache.
Invariant: the same file, libraries and seed give the same weights; what the code meets in a real model it meets here:
text encoders, tokenizers with the real templates' lengths, the real schedulers' settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch

from digen.config import ModelConfig
from digen.models.base import ModelFamily, quieten

SEED = 0
_WIDTH = 32
"""Of text embeddings and transformers."""


class Tiny(ModelFamily):
    """A family whose weights are made here when the config names no folder."""

    default_path = ""
    recipe: ClassVar[str]
    """Name of a function in this file."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if not self.path:
            self.path = str(folder(self.recipe))


def folder(recipe: str) -> Path:
    """Where a miniature is; it is made now if it is not there. Whole or not at all: processes may ask at once."""
    made_of = [
        Path(__file__).read_bytes(),
        *(version(name).encode() for name in ("torch", "diffusers", "transformers")),
    ]
    key = hashlib.blake2b(b"\0".join(made_of), digest_size=6).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "digen"
    made = root / f"tiny-{recipe}-{key}"
    if made.is_dir():
        return made
    aside = root / f".{made.name}.{secrets.token_hex(4)}"
    try:
        build(recipe, aside)
        aside.rename(made)
    except OSError:
        if not made.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def build(recipe: str, path: Path) -> None:
    """Write the miniature into the new folder `path`."""
    recipes: Mapping[str, Callable[[], Any]] = {f.__name__: f for f in (sd3, flux, qwen_image, wan, hunyuan_video)}
    quieten()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipeline = recipes[recipe]()
    pipeline.save_pretrained(path)


# One function per family: a pipeline as its authors put it together -------------------------------------------------


def sd3() -> Any:
    """Dual attention in the first block, as in SD3.5-medium."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=_WIDTH,
        caption_projection_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        _image_vae(scaling_factor=1.5305, shift_factor=0.0609),
        *_clip(projected=True),
        *_clip(projected=True),
        *_t5(),
    )


def flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        pooled_projection_dim=_WIDTH // 2,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        scheduler, _image_vae(scaling_factor=0.3611, shift_factor=0.1159), *_clip(), *_t5(), transformer
    )


def qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    transformer = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1)
    encoder, tokenizer = _qwen(QwenImagePipeline(scheduler, None, None, None, None).prompt_template_encode)
    return QwenImagePipeline(scheduler, vae, encoder, tokenizer, transformer)


def wan() -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5EncoderModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=_WIDTH,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1)
    encoder, tokenizer = _t5(UMT5EncoderModel)
    return WanPipeline(tokenizer, encoder, vae, scheduler, transformer)


def hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=_WIDTH,
        pooled_projection_dim=_WIDTH // 2,
        rope_axes_dim=(4, 6, 6),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    encoder, tokenizer = _llama(str(DEFAULT_PROMPT_TEMPLATE["template"]))
    clip, clip_tokenizer = _clip()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return HunyuanVideoPipeline(encoder, tokenizer, transformer, vae, scheduler, clip, clip_tokenizer)


# Parts ---------------------------------------------------------------------------------------------------------------


def _image_vae(**scale: float) -> Any:
    """4 latent channels, 8 pixels per latent pixel."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **scale,
    )


def _clip(*, projected: bool = False) -> tuple[Any, Any]:
    """Encoder and tokenizer; a letter is a token."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=_WIDTH // 2,
        intermediate_size=_WIDTH,
        projection_dim=_WIDTH // 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=vocab["<|startoftext|>"],
        eos_token_id=vocab["<|endoftext|>"],
        pad_token_id=vocab["<|endoftext|>"],
    )
    encoder = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    return encoder.eval(), CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _t5(kind: Any = None) -> tuple[Any, Any]:
    """Encoder (T5's, or `kind`) and tokenizer; a printable character is a token."""
    from transformers import T5EncoderModel, T5Tokenizer

    kind = kind or T5EncoderModel
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    config = kind.config_class(
        vocab_size=len(pieces),
        d_model=_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    tokenizer = T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=512)
    return kind(config).eval(), tokenizer


def _qwen(template: str) -> tuple[Any, Any]:
    """Qwen2.5-VL, whose vision tower is as small as the class allows and never run."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
    vocab, merges = _bpe(template, PRETOKENIZE_REGEX, specials)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=list(specials), model_max_length=4096, padding_side="right"
    )
    text = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(vocab),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "type": "mrope"},
        "pad_token_id": vocab["<|endoftext|>"],
        "bos_token_id": vocab["<|endoftext|>"],
        "eos_token_id": vocab["<|im_end|>"],
    }
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": _WIDTH,
        "fullatt_block_indexes": [0], "window_size": 8, "patch_size": 4, "spatial_merge_size": 1,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval(), tokenizer


def _llama(template: str) -> tuple[Any, Any]:
    """Llama 3, whose tokenizer puts a token before every text."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    specials = (
        "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<pad>",
    )  # fmt: skip
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
    vocab, merges = _bpe(template, pattern, specials)
    words = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words.pre_tokenizer, words.decoder = _split(pattern), decoders.ByteLevel()
    first = "<|begin_of_text|>"
    words.post_processor = processors.TemplateProcessing(
        f"{first} $A", f"{first} $A {first} $B", [(first, vocab[first])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=first,
        eos_token="<|eot_id|>",  # noqa: S106 - a token of text
        pad_token="<pad>",  # noqa: S106
        extra_special_tokens=list(specials[2:4]),
        model_max_length=4096,
        padding_side="right",
    )
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=vocab[first],
        eos_token_id=vocab["<|eot_id|>"],
        pad_token_id=vocab["<pad>"],
    )
    return LlamaModel(config).eval(), tokenizer


def _split(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    by_pattern = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bpe(template: str, pattern: str, specials: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: a word of the template is one token, as for the real tokenizer, others are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = _split(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    texts = [part for part in re.split("|".join(map(re.escape, specials)), template.replace("{}", "")) if part]
    words.train_from_iterator(texts, trainer)
    model = json.loads(words.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]
