"""The attention kernel of a worker's transformer (`generator.attention`, `trainer.attention`), by diffusers' name.

Invariant: what is asked for is what runs, or an error: never another kernel in its place (rule R16).
"""

from __future__ import annotations

from diffusers import attention_backend
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention
from torch import nn

from digen.errors import ConfigError, one_of


def check(name: str) -> None:
    """Raises ConfigError for a kernel that there is not, or that this process cannot have."""
    known = {each.value for each in AttentionBackendName}
    if name not in known:
        raise ConfigError(one_of("attention", name, known))
    try:
        with attention_backend(name):
            pass
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"attention={name}: {error}") from error


def use(transformer: nn.Module, name: str) -> None:
    """Let all attention that diffusers dispatches run on this kernel. Raises ConfigError when it dispatches none."""
    modules = [module for module in transformer.modules() if isinstance(module, Attention | AttentionModuleMixin)]
    found = [module.processor for module in modules if hasattr(module.processor, "_attention_backend")]
    if not found:
        raise ConfigError(f"attention={name}: {type(transformer).__name__} has attention of its own; leave it out")
    for processor in found:  # as `set_attention_backend` does, which also sets it for all models of the process
        processor._attention_backend = AttentionBackendName(name)  # noqa: SLF001
