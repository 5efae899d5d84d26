"""Text encoders and tokenizers of the miniatures: transformers' own classes, small and with random weights.

Invariant: a family's template takes as many tokens as it does with the real tokenizer, because pipelines cut it off by
that number; every other word is spelled, so that any prompt can be encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

WIDTH: Final = 32
"""Of text embeddings, and of the miniatures' transformers."""


def clip(*, projected: bool = False) -> tuple[Any, Any]:
    """Encoder and tokenizer; a letter is a token."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=WIDTH // 2,
        intermediate_size=WIDTH,
        projection_dim=WIDTH // 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=vocab["<|startoftext|>"],
        eos_token_id=vocab["<|endoftext|>"],
        pad_token_id=vocab["<|endoftext|>"],
    )
    encoder = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    return encoder.eval(), CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5(kind: Any = None) -> tuple[Any, Any]:
    """Encoder (T5's, or `kind`) and tokenizer; a printable character is a token."""
    from transformers import T5EncoderModel, T5Tokenizer

    kind = kind or T5EncoderModel
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    config = kind.config_class(
        vocab_size=len(pieces),
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    tokenizer = T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=512)
    return kind(config).eval(), tokenizer


def qwen(template: str) -> tuple[Any, Any]:
    """Qwen2.5-VL, whose vision tower is as small as the class allows and never run."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _qwen_tokenizer(template)
    vocab = tokenizer.get_vocab()
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
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
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": WIDTH,
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


def qwen3() -> tuple[Any, Any]:
    """Qwen3 as a text encoder, of which the layer before the last is used, and a tokenizer with its chat template."""
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = _qwen_tokenizer("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    vocab = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=WIDTH // 2,
        pad_token_id=vocab["<|endoftext|>"],
        bos_token_id=vocab["<|endoftext|>"],
        eos_token_id=vocab["<|im_end|>"],
    )
    return Qwen3Model(config).eval(), tokenizer


def _qwen_tokenizer(template: str) -> Any:
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
    vocab, merges = _bpe(template, PRETOKENIZE_REGEX, specials)
    return Qwen2Tokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=list(specials), model_max_length=4096, padding_side="right"
    )


def llama(template: str) -> tuple[Any, Any]:
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
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
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
