"""Pretrain *glyph*, the small text-to-image flow model bundled with digen.

Glyph is a complete `diffusers.QwenImagePipeline` in small: the same five classes as Qwen-Image (transformer, VAE,
text encoder, tokenizer, scheduler), so whatever runs on glyph on a laptop runs unchanged on the real model. It draws
32 x 32 px images of short texts (`a sign that says "OPEN"`), well enough to be read sometimes: an OCR reward has
something to improve. This script makes every file of `digen/models/glyph` from fixed seeds, with no download:

    python examples/pretrain_glyph.py OUT_DIR             # the shipped model
    python examples/pretrain_glyph.py OUT_DIR --quick     # a few seconds; the images stay noise

Measured on one thread of a shared 2-core machine: 10 minutes. Held-out OCR reward 0.03, 0.18 and 0.51 after 1250, 1500
and 1750 flow steps (10 sampling steps, no guidance): it stops there, so that reinforcement learning has room.

Order of work: tokenizer (BPE) -> VAE (autoencoding rendered images) -> transformer and text encoder (flow matching).
Invariant: an image is a function of its prompt, and no text quoted in `prompts/heldout.txt` is ever trained on.

Flow matching (https://arxiv.org/abs/2210.02747): x_s = (1 - s) x_0 + s eps, target velocity eps - x_0. s is drawn
uniformly (stratified over the batch), then shifted exactly as the pipeline shifts its own sigmas for 64 image tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import re
import string
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResidualBlock,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

log = logging.getLogger("pretrain_glyph")

# Shape letters: K images, C channels, H height, W width, N image tokens, D channels of a token, L text tokens.
IMAGE_SIZE = 32  # px, height and width
LATENT_CHANNELS = 12  # of the VAE, per 2 x 2 px
VAE_WIDTH = 16
LATENT_NOISE = 0.05  # standard deviation of the VAE's posterior, the same everywhere
IMAGE_TOKENS = 64  # one per 4 x 4 px
HIDDEN = 96  # width of the text encoder and of the transformer
NEGATIVE_PROMPT = " "
NEGATIVE_SHARE = 0.1  # of the training prompts, so that guidance (true_cfg_scale > 1) works
NUM_TRAIN_PROMPTS, NUM_HELDOUT_PROMPTS = 384, 64
EMA_DECAY = 0.998

INKS = {
    "black": (15, 15, 15),
    "red": (200, 25, 30),
    "blue": (25, 55, 200),
    "green": (10, 115, 45),
    "purple": (120, 30, 150),
    "brown": (115, 65, 20),
}
GROUNDS = {
    "white": (250, 250, 250),
    "yellow": (250, 225, 95),
    "pink": (250, 190, 210),
    "gray": (200, 200, 200),
    "orange": (250, 180, 90),
    "cyan": (170, 230, 240),
}
SIZES = {"small": 10.0, "": 12.0, "large": 15.0}  # font size in px; widths are squeezed to the pitch
PITCH = 8  # px from one character to the next: two image tokens, so a character looks the same in every place
TEMPLATES = (
    'a sign that says "{text}"',
    'a {ground} sign that says "{text}"',
    'a {ground} sign with {ink} letters saying "{text}"',
    '{size} {ink} letters "{text}" on a {ground} background',
    '{ink} letters "{text}" on a {ground} background',
    '{size} letters "{text}"',
    'the word "{text}" in {ink}',
    'the word "{text}" in {size} {ink} type on {ground}',
    'a {ground} card with the {size} text "{text}"',
    'a {ground} poster, the text "{text}" in {ink}',
    'a {size} {ink} label "{text}"',
    '"{text}" written in {ink} ink on {ground} paper',
    'a {ground} wall with "{text}" painted in {ink}',
    'a {ground} button that reads "{text}"',
    'a {ink} stamp reading "{text}"',
    'a {ground} door with the {ink} number "{text}"',
)
WORDS = tuple(
    """
    ACT ADD AGE AIR ALE ANT APE ARK ARM ART ASH ATE BAD BAG BAKE BALL BAR BARN BAT BEAR BED BEE BELL BEND BET BEST
    BUS BUSY CAB CAFE CAKE CALL CALM CAMP CAN CAP CAR CARD CARE CASE CASH CAT CHEF CLAY CUP CUT DAD DARK DATE DAY
    DEAL DEN DESK DEER DRY DUCK EAR EAST EAT EDGE EGG ELF ELM END EXAM EYE FACE FALL FAN FAR FARM FAST FAT FEE FELT
    FERN FLAG FLAT FUN FUR GAP GAS GATE GEM GET GLAD GUM GUY HALL HAM HAND HAT HAY HEAD HELP HEN HERE HUB HUT JAM
    JAR JET JUG KEY LAB LAKE LAMP LAND LATE LAW LEAF LEFT LEG LET LUCK MAN MAP MARK MAT MATH MAY MEN MENU MET MUD
    NAP NEST NET NEW NEXT NUT PALM PAN PARK PASS PATH PAY PEA PEN PET PLAN PLAY PUB PUSH RAM RAN RAT RAY RED REST
    RUN RUSH SALE SALT SAND SAT SEA SEAT SELF SET SHE SKY SPA STAR STAY STEP SUN TAG TALK TAN TAP TAX TEA TEAM TEN
    TENT TEST TRAM TREE TRY TURN USE VAN VET WALK WARM WAY WEB WEST WET YAM YES YET ZEN
    """.split()  # noqa: SIM905
)
LETTERS = "".join(sorted(set(string.ascii_uppercase) - set("IOQ")))  # I, O and Q alone read as 1 and 0
DIGITS = "23456789"

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt and what its image shows; a colour or size the prompt leaves open has its default (black on white)."""

    prompt: str
    text: str
    ink: str
    ground: str
    size: str


def draw_text(rng: random.Random) -> str:
    """A text of 2 to 4 characters: a word (2 in 5), random letters (2 in 5) or a number (1 in 5)."""
    kind = rng.choices(("word", "letters", "digits"), (2, 2, 1))[0]
    if kind == "word":
        return rng.choice(WORDS)
    length = rng.choices((2, 3, 4), (4, 4, 2))[0]
    return "".join(rng.choices(LETTERS if kind == "letters" else DIGITS, k=length))


def draw_scene(rng: random.Random, text: str) -> Scene:
    """A scene that shows `text`, with a template, colours and size drawn from `rng`."""
    template = rng.choice(TEMPLATES)
    drawn = {"ink": rng.choice(list(INKS)), "ground": rng.choice(list(GROUNDS)), "size": rng.choice(list(SIZES))}
    default = {"ink": "black", "ground": "white", "size": ""}
    shown = {key: drawn[key] if "{" + key + "}" in template else default[key] for key in drawn}
    prompt = re.sub(r" +", " ", template.format(text=text, **drawn)).strip()
    return Scene(prompt, text, **shown)


def render(scene: Scene) -> Image.Image:
    """The scene as an RGB image of 32 x 32 px: one centred line in Pillow's built-in font, at a fixed pitch."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), GROUNDS[scene.ground])
    font = ImageFont.load_default(SIZES[scene.size])
    left = (IMAGE_SIZE - PITCH * len(scene.text)) // 2
    for place, character in enumerate(scene.text):
        width = math.ceil(font.getlength(character))
        mask = Image.new("L", (width, IMAGE_SIZE))
        ImageDraw.Draw(mask).text((width / 2, IMAGE_SIZE / 2), character, font=font, fill=255, anchor="mm")
        if width >= PITCH:
            width = PITCH - 1
            mask = mask.resize((width, IMAGE_SIZE), Image.Resampling.LANCZOS)
        image.paste(INKS[scene.ink], (left + PITCH * place + round((PITCH - width) / 2), 0), mask)
    return image


def to_tensor(images: Sequence[Image.Image]) -> Tensor:
    """Images as one float tensor (K, C, 1, H, W) in [-1, 1], the VAE's input."""
    pixels = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1.0


def prompt_sets(seed: int) -> tuple[list[Scene], list[Scene]]:
    """The shipped training and held-out scenes; all quoted texts are different."""
    rng = random.Random(seed)
    scenes: dict[str, Scene] = {}
    while len(scenes) < NUM_TRAIN_PROMPTS + NUM_HELDOUT_PROMPTS:
        text = draw_text(rng)
        scenes.setdefault(text, draw_scene(rng, text))
    ordered = list(scenes.values())
    rng.shuffle(ordered)
    return ordered[NUM_HELDOUT_PROMPTS:], ordered[:NUM_HELDOUT_PROMPTS]


def scene_stream(seed: int, excluded: frozenset[str]) -> Iterator[Scene]:
    """Endless scenes whose text is not in `excluded`."""
    rng = random.Random(seed)
    while True:
        text = draw_text(rng)
        if text not in excluded:
            yield draw_scene(rng, text)


def build_tokenizer(out_dir: Path) -> Qwen2Tokenizer:
    """Train the BPE and write it.

    Its corpus is Qwen-Image's prompt template and the lower-case prompt words, with merges until each is one token.
    Upper-case words and digits are not in it, so a quoted text is one token per character: the model can spell.
    """
    template = (
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background: system\n user\n assistant\n"
    )
    words = " ".join([re.sub(r'"?\{\w+\}"?', "", " ".join(TEMPLATES)), *INKS, *GROUNDS, *SIZES])
    corpus = [template, "system", "user", "assistant", ":", ' "', '"', "\n", *words.split(), *re.split(r"(?= )", words)]
    bpe = Tokenizer(BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    folder = out_dir / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "bos_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": 4096,
        "padding_side": "right",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return Qwen2Tokenizer.from_pretrained(folder)


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Two causal layers; the vision tower is as small as the class allows and is never run."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "type": "mrope",
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0], "window_size": 8, "patch_size": 4, "spatial_merge_size": 1,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def build_pipeline(out_dir: Path, seed: int) -> QwenImagePipeline:
    """The untrained pipeline, with Qwen-Image's own scheduler settings."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(out_dir)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=HIDDEN // 32,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(8, 12, 12),
    )
    for block in transformer.transformer_blocks:  # adaLN-zero: each block starts as the identity
        for layer in (block.img_mod[-1], block.txt_mod[-1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    nn.init.zeros_(transformer.proj_out.weight)
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
    text_encoder = build_text_encoder(tokenizer)
    return QwenImagePipeline(scheduler, build_vae(), text_encoder, tokenizer, transformer)


def build_vae() -> AutoencoderKLQwenImage:
    """Spatial factor 2; no residual blocks beyond the class's own, since every sample pays for the decoder."""
    vae = AutoencoderKLQwenImage(
        base_dim=VAE_WIDTH,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1],
        num_res_blocks=0,
        temperal_downsample=[False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    start_near_linear(vae)
    return vae


@torch.no_grad()
def start_near_linear(vae: AutoencoderKLQwenImage, bias: float = 4.0) -> None:
    """Start the VAE as space-to-depth and back (each 2 x 2 px cell comes back as its mean colour).

    From a random start it is still blurred after 400 steps; from here OCR reads every reconstruction after 250. The
    norms before the last convolutions divide by the length of the channel vector; one large constant channel keeps
    that length nearly the same everywhere, so brightness survives.
    """
    for module in vae.modules():
        if isinstance(module, QwenImageResidualBlock):
            zero(module.conv2)
        elif isinstance(module, QwenImageAttentionBlock):
            zero(module.proj)
    encoder, decoder = vae.encoder, vae.decoder
    down, up = encoder.down_blocks[0].resample[1], decoder.up_blocks[0].upsamplers[0].resample[1]
    last_shortcut = decoder.up_blocks[1].resnets[0].conv_shortcut
    pass_through(encoder.conv_in, 3)
    zero(down, slice(12))
    zero(up, slice(3))
    for cell, colour in itertools.product(range(4), range(3)):
        down.weight[3 * cell + colour, colour, cell // 2, cell % 2] = 1.0
        up.weight[colour, 3 * cell + colour, 1, 1] = 0.25
    gain = 2.0 * bias / VAE_WIDTH**0.5  # undoes the norm and SiLU's slope of 1/2
    pass_through(encoder.conv_out, LATENT_CHANNELS, gain)
    pass_through(vae.quant_conv, LATENT_CHANNELS)
    pass_through(vae.post_quant_conv, LATENT_CHANNELS)
    pass_through(decoder.conv_in, LATENT_CHANNELS)
    pass_through(last_shortcut, 3)
    pass_through(decoder.conv_out, 3, gain)
    for conv in (down, last_shortcut):
        zero(conv, slice(-1, None))
        conv.bias[-1] = bias
    zero(vae.quant_conv, slice(LATENT_CHANNELS, None))  # the posterior's log-variance: a constant
    vae.quant_conv.bias[LATENT_CHANNELS:] = 2.0 * math.log(LATENT_NOISE)


def zero(conv: Any, rows: slice = slice(None)) -> None:
    """Zero the convolution's output channels `rows`."""
    conv.weight[rows] = 0.0
    conv.bias[rows] = 0.0


def pass_through(conv: Any, count: int, gain: float = 1.0) -> None:
    """The first `count` output channels become the same input channels of the same pixel, times `gain`."""
    zero(conv, slice(count))
    height, width = conv.weight.shape[-2:]
    for channel in range(count):
        conv.weight[channel, channel, -1, height // 2, width // 2] = gain


def convolve_frame(conv: QwenImageCausalConv3d, x: Tensor, _cache: Tensor | None = None) -> Tensor:
    """What the causal 3D convolution computes for one frame: only its last time slice meets the frame."""
    padding = (conv._padding[2], conv._padding[0])  # noqa: SLF001
    frame = nn.functional.conv2d(x.squeeze(2), conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding)
    return frame.unsqueeze(2)


def single_frame_convolutions() -> AbstractContextManager[Any]:
    """Inside it the VAE runs single frames about twice as fast, with the same results."""
    return mock.patch.object(QwenImageCausalConv3d, "forward", convolve_frame)


def train_vae(vae: AutoencoderKLQwenImage, scenes: Iterator[Scene], steps: int, batch: int = 16) -> None:
    """Autoencode rendered images (squared error), then write the measured latent statistics into the config."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=max(0.1, 2 / steps))
    vae.quant_conv.requires_grad_(False)
    for step in range(1, steps + 1):
        pixels = to_tensor([render(scene) for scene in itertools.islice(scenes, batch)])
        with single_frame_convolutions():
            mean = vae.quant_conv(vae.encoder(pixels))[:, :LATENT_CHANNELS]
            latent = mean + LATENT_NOISE * torch.randn_like(mean)
            output = vae.decoder(vae.post_quant_conv(latent))  # `vae.decode` would clamp, and stop gradients
        error = (output - pixels).square().mean()
        loss = error + 1e-4 * mean.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            log.info("vae step %d: squared error %.4f", step, error.item())
    vae.requires_grad_(False)
    latents = encode(vae, [render(scene) for scene in itertools.islice(scenes, 512)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, images: Sequence[Image.Image], batch: int = 64) -> Tensor:
    """Posterior means (K, C, H/2, W/2), not normalised."""
    chunks = [images[i : i + batch] for i in range(0, len(images), batch)]
    with single_frame_convolutions():
        return torch.cat([vae.encode(to_tensor(chunk)).latent_dist.mean[:, :, 0] for chunk in chunks])


def pack(vae: AutoencoderKLQwenImage, latent_KCHW: Tensor) -> Tensor:
    """Normalised tokens (K, N, D) in the order the transformer sees them."""
    mean, std = (torch.tensor(stat).view(1, -1, 1, 1) for stat in (vae.config.latents_mean, vae.config.latents_std))
    latent_KCHW = (latent_KCHW - mean) / std
    packed: Tensor = QwenImagePipeline._pack_latents(latent_KCHW, *latent_KCHW.shape)  # noqa: SLF001
    return packed


def training_sigmas(pipe: QwenImagePipeline, count: int) -> Tensor:
    """`count` draws, one from each `count`-th of (0, 1), shifted as the pipeline does at 32 x 32 px (mu 0.490)."""
    config = pipe.scheduler.config
    mu = calculate_shift(
        IMAGE_TOKENS, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    uniform = ((torch.arange(count) + torch.rand(count)) / count).clamp(1e-3, 1.0)
    return math.exp(mu) / (math.exp(mu) + 1.0 / uniform - 1.0)


def encode_prompts(pipe: QwenImagePipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """What `pipe.encode_prompt` gives, (K, L, D) and mask (K, L), at a third of its cost.

    The 34 tokens of the template's prefix are the same for every prompt and attention is causal: they are run once.
    """
    prefix, suffix = pipe.prompt_template_encode.split("{}")
    shared = pipe.tokenizer(prefix, return_tensors="pt").input_ids
    own = pipe.tokenizer([prompt + suffix for prompt in prompts], padding=True, return_tensors="pt")
    model = pipe.text_encoder.model.language_model
    cache = model(input_ids=shared, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(prompts))
    full_mask = torch.cat([own.attention_mask.new_ones(len(prompts), shared.shape[1]), own.attention_mask], 1)
    output = model(input_ids=own.input_ids, attention_mask=full_mask, past_key_values=cache, use_cache=True)
    hidden_KLD = output.last_hidden_state * own.attention_mask.unsqueeze(-1)
    return hidden_KLD, own.attention_mask


def velocity(pipe: QwenImagePipeline, prompts: list[str], noisy_KND: Tensor, sigma_K: Tensor) -> Tensor:
    """The transformer's prediction (K, N, D), with gradients into the text encoder too."""
    prompt_KLD, mask_KL = encode_prompts(pipe, prompts)
    side = math.isqrt(IMAGE_TOKENS)
    prediction: Tensor = pipe.transformer(
        hidden_states=noisy_KND,
        timestep=sigma_K,
        encoder_hidden_states=prompt_KLD,
        encoder_hidden_states_mask=mask_KL,
        img_shapes=[[(1, side, side)]] * len(prompts),
        return_dict=False,
    )[0]
    return prediction


class Pool:
    """Encoded scenes: made once, drawn from in every step (encoding anew would double the cost of a step)."""

    def __init__(self, vae: AutoencoderKLQwenImage, scenes: Iterator[Scene], size: int) -> None:
        self.prompts: list[str] = []
        tokens: list[Tensor] = []
        while len(self.prompts) < size:
            chunk = list(itertools.islice(scenes, 64))
            self.prompts += [scene.prompt for scene in chunk]
            tokens.append(pack(vae, encode(vae, [render(scene) for scene in chunk])))
        self.token_KND = torch.cat(tokens)

    def draw(self, rng: random.Random, count: int) -> tuple[list[str], Tensor]:
        """Prompts (some replaced by the negative prompt) and their tokens."""
        picks = [rng.randrange(len(self.prompts)) for _ in range(count)]
        prompts = [NEGATIVE_PROMPT if rng.random() < NEGATIVE_SHARE else self.prompts[i] for i in picks]
        return prompts, self.token_KND[picks]


def flow_optimizers(models: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else (embeddings, modulations, biases, first and last layer).

    Measured: the loss after 400 steps is what AdamW alone reaches after 900.
    """
    matrices, rest = [], []
    for name, weight in models.named_parameters():
        in_layer = ("transformer_blocks" in name or "layers." in name) and "mod." not in name
        (matrices if in_layer and weight.ndim == 2 else rest).append(weight)
    muon = torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)]


def train_flow(pipe: QwenImagePipeline, pool: Pool, out_dir: Path, args: argparse.Namespace) -> None:
    """Flow matching on the transformer and the text encoder together; the pipeline ends with the averaged weights."""
    torch.manual_seed(args.seed + 1)
    rng = random.Random(args.seed + 1)
    models = nn.ModuleList([pipe.transformer, pipe.text_encoder.model.language_model])
    average = torch.optim.swa_utils.AveragedModel(
        models, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA_DECAY)
    )
    optimizers = flow_optimizers(models, args.lr)
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100) for optimizer in optimizers]
    started, recent = time.monotonic(), 1.0
    for step in range(1, args.steps + 1):
        prompts, clean_KND = pool.draw(rng, args.batch)
        sigma_K = training_sigmas(pipe, args.batch)
        noise_KND = torch.randn_like(clean_KND)
        noisy_KND = torch.lerp(clean_KND, noise_KND, sigma_K.view(-1, 1, 1))
        error = velocity(pipe, prompts, noisy_KND, sigma_K) - (noise_KND - clean_KND)
        loss = error.square().mean()
        models.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        for stepped in (*optimizers, *schedules):
            stepped.step()
        average.update_parameters(models)
        recent += 0.02 * (loss.item() - recent)
        if step % 100 == 0:
            log.info("flow step %d: loss %.4f, %.0f s", step, recent, time.monotonic() - started)
        if args.checkpoint_every and step % args.checkpoint_every == 0:
            save_file(average.module.state_dict(), out_dir / f"average-{step}.safetensors")
    models.load_state_dict(average.module.state_dict())


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --quick makes every part tiny."""
    parser = argparse.ArgumentParser(description="Pretrain the bundled glyph model.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--steps", type=int, default=1750, help="flow matching steps")
    parser.add_argument("--batch", type=int, default=32, help="images a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of flow matching")
    parser.add_argument("--vae-steps", type=int, default=400)
    parser.add_argument("--pool", type=int, default=24576, help="images rendered and encoded for flow matching")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more than one gains little on layers this small")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between kept weights, 0 for none")
    parser.add_argument("--quick", action="store_true", help="a few seconds of work, for tests")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.batch, args.vae_steps, args.pool = 3, 8, 3, 64
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and write the model folder."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    train, heldout = prompt_sets(args.seed)
    (args.out_dir / "prompts").mkdir(exist_ok=True)
    for name, scenes in (("train", train), ("heldout", heldout)):
        lines = "".join(scene.prompt + "\n" for scene in scenes)
        (args.out_dir / "prompts" / f"{name}.txt").write_text(lines, encoding="utf-8")
    pipe = build_pipeline(args.out_dir, args.seed)
    stream = scene_stream(args.seed + 1, frozenset(scene.text for scene in heldout))
    train_vae(pipe.vae, stream, args.vae_steps)
    pool = Pool(pipe.vae, stream, args.pool)
    train_flow(pipe, pool, args.out_dir, args)
    pipe.save_pretrained(args.out_dir, safe_serialization=True)


if __name__ == "__main__":
    main()
