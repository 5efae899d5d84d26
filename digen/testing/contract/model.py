"""What every model family must do (docs/models.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from digen import plugins
from digen.config import ModelConfig
from digen.models.base import ModelFamily, rows_of

TEXTS = ("a cat", 'a sign that says "OPEN", next to a tree', "")


@cache
def _loaded(name: str, settings: str) -> ModelFamily:
    kind = cast("type[ModelFamily]", plugins.find("models", name))
    model = kind(ModelConfig.model_validate({"name": name, **json.loads(settings)}))
    model.load("cpu", torch.float32, text_encoder=True, decoder=True)
    return model


class ModelContract:
    """Subclass it as `class TestMine(ModelContract)` and set `name`, with a small model: all of it runs on the CPU."""

    name: ClassVar[str]
    """Of the plugin, or `path.py:Name`."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Of the section `model`: `path`, `height`, `width`, `num_frames`, `max_text_tokens`."""
    num_steps: ClassVar[int] = 6
    tolerance: ClassVar[float] = 1e-5
    """Between the velocities of a row alone and among others."""

    @property
    def model(self) -> ModelFamily:
        """The family, loaded once for all tests."""
        return _loaded(self.name, json.dumps(dict(self.settings)))

    def test_its_transformer_is_frozen_and_has_blocks_and_layers_for_adapters(self) -> None:
        transformer = self.model.transformer
        assert not any(p.requires_grad for p in transformer.parameters())
        modules = set(map(id, transformer.modules()))
        assert len(self.model.blocks(transformer)) > 0
        assert all(id(block) in modules for block in self.model.blocks(transformer))
        linear = [n for n, m in transformer.named_modules() if isinstance(m, nn.Linear)]
        for target in self.model.lora_targets:
            assert any(n == target or n.endswith(f".{target}") for n in linear), target

    def test_noise_levels_fall_from_about_1_to_0(self) -> None:
        levels = self.model.sigmas(self.num_steps)
        assert levels.shape == (self.num_steps + 1,)
        assert levels.dtype == torch.float32
        assert 0.9 < float(levels[0]) <= 1
        assert float(levels[-1]) == 0
        assert bool((levels[1:] < levels[:-1]).all())

    def test_a_prompt_has_one_row_of_conditioning_the_same_alone_and_among_others(self) -> None:
        alone = [self.model.encode(text) for text in TEXTS]
        assert all(tensor.shape[0] == 1 for row in alone for tensor in row.values())
        again = self.model.encode(TEXTS[1])
        assert all(torch.equal(again[name], tensor) for name, tensor in alone[1].items())
        together = self.model.collate(alone)
        for k, row in enumerate(alone):
            for name, tensor in row.items():
                length = tensor.shape[1] if tensor.ndim > 1 else 0
                got = together[name][k] if tensor.ndim == 1 else together[name][k, :length]
                assert torch.equal(got, tensor[0]), f"{name} of {TEXTS[k]!r} is not at the start of its row"

    def test_rows_of_any_timesteps_and_prompts_share_a_forward_as_if_alone(self) -> None:
        """TSP: neither padding nor neighbours may be seen."""
        latents, levels = self._latents(3), torch.tensor([0.95, 0.5, 0.2])
        together = self._velocity(latents, levels, torch.arange(3))
        assert together.shape == latents.shape
        assert bool(torch.isfinite(together).all())
        for k in range(3):
            alone = self._velocity(latents[k : k + 1], levels[k : k + 1], torch.tensor([k]))
            torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=self.tolerance)

    def test_latents_level_and_prompt_each_change_the_velocity(self) -> None:
        latents, levels, rows = self._latents(1), torch.tensor([0.7]), torch.tensor([0])
        v = self._velocity(latents, levels, rows)
        others = {
            "latents": self._velocity(latents * 0.5, levels, rows),
            "noise level": self._velocity(latents, levels * 0.5, rows),
            "prompt": self._velocity(latents, levels, torch.tensor([1])),
        }
        for what, other in others.items():
            assert float((other - v).abs().max()) > self.tolerance, what

    def test_guidance_of_1_is_the_velocity_itself_and_more_leads_elsewhere(self) -> None:
        latents, levels = self._latents(1), torch.tensor([0.7])
        cond, negative = self.model.encode(TEXTS[1]), self.model.encode(TEXTS[0])
        with torch.no_grad():
            one, four = (self.model.guided_velocity(latents, levels, cond, negative, w) for w in (1.0, 4.0))
        assert float((four - one).abs().max()) > self.tolerance
        if not self.model.embeds_guidance:
            assert torch.equal(one, self._velocity(latents, levels, torch.tensor([1])))

    def test_latents_decode_to_pixels_of_the_size_asked_for(self) -> None:
        config, shape = self.model.config, self.model.latent_shape
        with torch.no_grad():
            media = self.model.decode(self._latents(2))
        frames = (config.num_frames,) if media.ndim == 5 else ()
        assert media.dtype == torch.uint8
        assert media.shape == (2, *frames, config.height, config.width, 3), f"latents of {shape}"

    def test_prompts_that_are_cut_are_counted(self) -> None:
        assert self.model.num_cut([]) == 0
        assert self.model.num_cut([TEXTS[0]]) == 0
        assert self.model.num_cut([TEXTS[0], "many words " * self.model.config.max_text_tokens]) == 1

    def test_a_worker_that_only_trains_needs_neither_text_encoder_nor_decoder(self) -> None:
        bare = type(self.model)(self.model.config)
        bare.load("cpu", torch.float32, text_encoder=False, decoder=False)
        assert bare.latent_shape == self.model.latent_shape
        assert torch.equal(bare.sigmas(self.num_steps), self.model.sigmas(self.num_steps))

    def _latents(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(number, *self.model.latent_shape, generator=draw)

    @torch.no_grad()
    def _velocity(self, latents: Tensor, levels: Tensor, rows: Tensor) -> Tensor:
        cond = self.model.collate([self.model.encode(TEXTS[int(k)]) for k in rows])
        row_of = torch.arange(len(rows))
        return self.model.guided_velocity(latents, levels, rows_of(cond, row_of), None, 1.0)
