"""The engine's side of sampling: digen's own denoising loop around a transformer and a decoder that the engine owns.

Invariant: steps, noise, log-probs and what is recorded are those of `digen/backends/sampler.py`, line for line; the
engine adds scheduling, batching and its kernels, and no formula of its own (rules R8, R9). No word of vLLM is in here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from digen import plugins
from digen.backends.conditions import Conditions
from digen.backends.sampler import Sampler
from digen.models.base import Conditioning, ModelFamily
from digen.presets import rebuild
from digen.types import MicroBatch, Prompt

Answer = dict[str, Tensor]
"""One sample: `media`, `sigmas` and the fields of its trajectory, or of an evaluation `latents`; one row each."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for: one sample, by its identity. Its conditioning comes with it: the engine encodes nothing.

    `step` None: an evaluation sample, without step noise.
    """

    seed: int
    step: int | None
    samples_per_prompt: int
    prompt: Prompt
    sample: int
    texts: Mapping[str, Conditioning]
    """Conditioning (one row, on the CPU) of every text that the sample needs: the prompt's, and what it avoids."""

    @property
    def together(self) -> tuple[int, int | None, int]:
        """What is the same for samples that are made in one pass."""
        return self.seed, self.step, self.samples_per_prompt


class AsDiffusers(nn.Module):
    """An engine's transformer that is called as diffusers' is: `call` says how that goes for its family."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, **inputs: Any) -> Any:
        return self.call(self.inner, **inputs)

    def __getattr__(self, name: str) -> Any:
        """Families look at layers of a transformer, such as the one whose dtype counts."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Host:
    """Makes samples of one run with parts that were loaded elsewhere. `payload`: `digen.presets.payload` of the run."""

    def __init__(self, payload: Mapping[str, Any], transformer: nn.Module, decoder: nn.Module, device: str) -> None:
        config = rebuild(payload)
        kind = cast("type[ModelFamily]", plugins.find("models", config.model.name))
        model, dtype = kind(config.model), next(transformer.parameters()).dtype
        model.empty = True
        model.load(device, dtype, text_encoder=False, decoder=False)  # `LOADING` is held by who waits for this
        model.transformer, model.pipeline.vae = transformer, decoder
        if config.model.vae_tiling:
            cast("Any", decoder).enable_tiling()
        self.num_passes = 0
        """Batches made so far: fewer than samples, where the engine put several together."""
        self.sampler = Sampler(
            model,
            config.algorithm,
            config.sampling,
            torch.float32,  # of steps and log-probs; the forward runs in the dtype of the engine's parameters
            config.algorithm.samples_per_prompt * config.data.prompts_per_step,
            Conditions(model, device, dtype),
        )

    @torch.no_grad()
    def serve(self, wanted: Sequence[Wanted]) -> list[Answer]:
        """The samples, in order. Those of one step go through the transformer together."""
        answers: dict[int, Answer] = {}
        for key in dict.fromkeys(each.together for each in wanted):
            rows = [k for k, each in enumerate(wanted) if each.together == key]
            some = [wanted[k] for k in rows]
            answers |= zip(rows, self._made(some), strict=True)
            self.num_passes += 1
        return [answers[k] for k in range(len(wanted))]

    def _made(self, some: Sequence[Wanted]) -> list[Answer]:
        kept: OrderedDict[str, Conditioning] = OrderedDict()
        for each in some:
            kept.update(each.texts)
        whole = self.sampler
        sampler = replace(whole, conditions=Conditions(whole.model, str(whole.model.device), whole.dtype, kept))
        if some[0].step is None:
            texts, negatives = [e.prompt.text for e in some], [e.prompt.negative for e in some]
            latents, media = sampler.evaluate(texts, [e.prompt.id for e in some], some[0].seed, negatives)
            return [{"latents": latents[k : k + 1], "media": media[k : k + 1]} for k in range(len(some))]
        prompts = list({each.prompt.id: each.prompt for each in some}.values())
        place = {prompt.id: k for k, prompt in enumerate(prompts)}
        group = some[0].samples_per_prompt
        microbatch = MicroBatch(some[0].step, 0, tuple(prompts), group, some[0].seed)
        made, media = sampler.rollout(microbatch, [place[e.prompt.id] * group + e.sample for e in some])
        sigmas = made.pop("sigmas")
        rows = {name: tensor for name, tensor in made.items() if name != "prompt" and "." not in name}
        rows["media"] = media
        return [{"sigmas": sigmas, **{name: t[k : k + 1] for name, t in rows.items()}} for k in range(len(some))]
