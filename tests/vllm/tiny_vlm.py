"""A vision-language model of 0.2 M random weights that `vllm serve` takes for Qwen2-VL, with tokenizer and template.

Invariant: it answers every JSON schema with the shortest text that the schema allows, since it prefers what ends a text
to what goes on with it; which of the digits 1 to 5 it writes depends on the picture and on the question.
"""

from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
DIGITS = "12345"
PREFERS = {"<|im_end|>": 300.0, '"': 275.0, "}": 250.0, **dict.fromkeys(DIGITS, 100.0), **dict.fromkeys("ĠĊĉč", -100.0)}
"""Token -> how much it is preferred, whatever was said before; 0 for all others. The last four are white space."""
WIDTH = 64
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(folder: Path, seed: int = 0) -> None:
    """Write it in transformers' format."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    vocab = {piece: k for k, piece in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], extra_special_tokens=list(SPECIAL), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config(vocab)).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        words = model.model.language_model
        words.embed_tokens.weight[:, 0] = 4.0  # what is always there, for preferences
        for layer in words.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight.zero_()
        for piece, strength in PREFERS.items():
            model.lm_head.weight[vocab[piece], 0] = strength
        digits = [vocab[digit] for digit in DIGITS]
        model.lm_head.weight[digits, 1:] = rows(model, processor)
    model.save_pretrained(folder)


def rows(model: Any, processor: Any) -> Any:
    """What the digits look for in the last state: what differs from picture to picture, and nothing else."""
    import numpy as np
    import torch

    pictures = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (16, 4, 4, 3), np.uint8)
    states = [
        model.model(**asked(processor, picture.repeat(8, 0).repeat(8, 1), f"{k}")).last_hidden_state[0, -1, 1:]
        for k, picture in enumerate(pictures)
    ]
    mean_C, differences_KC = torch.stack(states).mean(0), torch.stack(states) - torch.stack(states).mean(0)
    found_DC = torch.randn(len(DIGITS), WIDTH - 1)
    found_DC -= (found_DC @ mean_C)[:, None] * mean_C / mean_C.square().sum()
    return found_DC / (differences_KC @ found_DC.T).std(0)[:, None]


def asked(processor: Any, pixels: Any, instruction: str) -> Any:
    """The model's inputs where it is to say a digit: a picture, words, and the beginning of the answer."""
    from PIL import Image

    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": instruction}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + '{"score":'
    return processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt")


def config(vocab: dict[str, int]) -> Any:
    """Of one vision layer and two text layers."""
    from transformers import Qwen2VLConfig

    text = {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": len(vocab), "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None, "eos_token_id": vocab["<|im_end|>"], "pad_token_id": vocab["<|endoftext|>"],
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
        vision_end_token_id=vocab["<|vision_end|>"],
    )


def rating(folder: Path, pixels: Any, instruction: str) -> int:
    """The digit that it must say of this picture and these words, by transformers' own forward pass."""
    import torch
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype="float32").eval()
    with torch.inference_mode():
        logits = model(**asked(processor, pixels, instruction)).logits[0, -1]
    return max((1, 2, 3, 4, 5), key=lambda digit: float(logits[processor.tokenizer.convert_tokens_to_ids(str(digit))]))
