"""One denoising loop for everybody who samples: generators, assisting trainers, evaluation.

Invariant: the samples depend on the weights and on the samples' identities only (rule R8); only trained steps are kept;
the state, the step and its log-probability are float32 (R9). Shape letters: K samples, P prompts, S trained steps, T
steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digen.algos.base import Algorithm, Transition
from digen.algos.sde import clean, euler
from digen.backends import noise
from digen.backends.conditions import Conditions
from digen.config import SamplingConfig
from digen.models.base import Conditioning, ModelFamily, rows_of
from digen.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one worker turns (micro-batch, rows) into trajectories and media."""

    model: ModelFamily
    algorithm: Algorithm
    sampling: SamplingConfig
    dtype: torch.dtype
    batch_size: int
    """Samples in one forward pass."""
    conditions: Conditions

    @property
    def state_dtype(self) -> torch.dtype:
        """Latents are float32 whatever the forward's dtype; only a float64 run keeps them in float64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @torch.no_grad()
    def rollout(self, microbatch: MicroBatch, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Trajectory tensors and uint8 media (K, ...) of these rows.

        Trajectory: `latents`, `next_latents` (K, S, ...), `log_probs` (K, S), `steps` (K, S) int64, `sigmas` (T+1,),
        `prompt` (K,) int64 (row of the conditioning), `cond.*` and, with guidance, `negative.*` (P, ...); and the
        fields that the algorithm records.
        """
        texts, negatives = [p.text for p in microbatch.prompts], [p.negative for p in microbatch.prompts]
        cond, negative = self.conditioning(texts, self.sampling.guidance, negatives)
        prompt_K = torch.tensor([row // microbatch.samples_per_prompt for row in rows], device=self.model.device)
        size = self.batch_size
        parts = [
            self._denoise(microbatch, rows[start : start + size], cond, negative, prompt_K[start : start + size])
            for start in range(0, len(rows), size)
        ]
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        media = tensors.pop("media")
        tensors |= {"sigmas": self.model.sigmas(self.sampling.num_steps), "prompt": prompt_K}
        tensors |= {f"cond.{name}": tensor for name, tensor in cond.items()}
        tensors |= {f"negative.{name}": tensor for name, tensor in (negative or {}).items()}
        return tensors, media

    def conditioning(
        self, texts: Sequence[str], guidance: float, negatives: Sequence[str | None] | None = None
    ) -> tuple[Conditioning, Conditioning | None]:
        """Conditioning of the prompts and, where guidance needs it, of what it leads away from, one row per prompt.

        `negatives`: the prompts' own; None: `sampling.negative_prompt`.
        """
        cond = self.conditions.of(texts)
        if guidance == 1.0 or self.model.embeds_guidance:
            return cond, None
        own = negatives or [None] * len(texts)
        return cond, self.conditions.of([self.sampling.negative_prompt if text is None else text for text in own])

    def _denoise(
        self,
        microbatch: MicroBatch,
        rows: Sequence[int],
        cond: Conditioning,
        negative: Conditioning | None,
        prompt_K: Tensor,
    ) -> dict[str, Tensor]:
        algorithm, num_steps = self.algorithm, self.sampling.num_steps
        seed, step = microbatch.seed, microbatch.step
        identities = [(prompt.id, sample) for prompt, sample in map(microbatch.identity, rows)]
        noisy_KT, trained_KT = self._plan(seed, step, identities)
        cond, negative = rows_of(cond, prompt_K), rows_of(negative, prompt_K) if negative else None
        x = self._initial(seed, step, identities)
        sigmas = self.model.sigmas(num_steps).to(x.device)
        record: dict[str, list[Tensor]] = defaultdict(list)
        for i in range(num_steps):
            at = Transition.at(sigmas, torch.full((len(x),), i, device=x.device), x.ndim)
            v = self.velocity(x, at.sigma.reshape(-1), cond, negative, self.sampling.guidance)
            y = euler(x, v, at)
            if noisy_KT[:, i].any():
                mean, std = algorithm.noise.mean_std(x, v, at)
                eps = noise.draw(seed, step, identities, i, self.model.latent_shape).to(x)
                y = torch.where(noisy_KT[:, i].to(x.device).view(at.sigma.shape), mean + std * eps, y)
            kept = trained_KT[:, i].nonzero().flatten().to(x.device)
            if len(kept) and not algorithm.noise.forward_process:
                log_prob = algorithm.noise.log_prob(y[kept], mean[kept], std[kept])
                record["steps"].append(torch.full_like(kept, i))
                record["row"].append(kept)
                for name, value in (("latents", x[kept]), ("next_latents", y[kept]), ("log_probs", log_prob)):
                    record[name].append(value)
                if "mean" in algorithm.records:
                    record["mean"].append(mean[kept])
            last, x = (x, v, at), y
        media = self.model.decode(clean(*last) if algorithm.decode == "clean" else x)
        if algorithm.noise.forward_process:
            return {**self._noised_anew(microbatch, identities, x, trained_KT, cond, negative), "media": media}
        return {**_by_row(record, len(rows)), "media": media}

    def _noised_anew(
        self,
        microbatch: MicroBatch,
        identities: Sequence[tuple[int, int]],
        x0: Tensor,
        trained_KT: Tensor,
        cond: Conditioning,
        negative: Conditioning | None,
    ) -> dict[str, Tensor]:
        """Clean samples at the trained levels, with the noise that such a step would have had (`matching`).

        One pass for each trained level of a row, whichever that is: on all ranks the same number of passes.
        """
        algorithm, sigmas, columns = self.algorithm, self.model.sigmas(self.sampling.num_steps).to(x0.device), []
        if algorithm.noise.draws_per_group:
            identities = [(prompt_id, 0) for prompt_id, _ in identities]
        for index_K in trained_KT.nonzero()[:, 1].view(len(x0), -1).T.to(x0.device):
            at = Transition.at(sigmas, index_K, x0.ndim)
            who = zip(identities, index_K.tolist(), strict=True)
            draws = [noise.draw(microbatch.seed, microbatch.step, [row], i, self.model.latent_shape) for row, i in who]
            eps = torch.cat(draws).to(x0)
            x, y = (1 - at.sigma) * x0 + at.sigma * eps, eps - x0
            v = self.velocity(x, at.sigma.reshape(-1), cond, negative, self.sampling.guidance)
            mean, std = algorithm.noise.mean_std(x, v, at)
            log_prob = algorithm.noise.log_prob(y, mean, std)
            columns.append({"latents": x, "next_latents": y, "log_probs": log_prob, "steps": index_K})
            columns[-1] |= {"mean": mean} if "mean" in algorithm.records else {}
        return {name: torch.stack([column[name] for column in columns], 1) for name in columns[0]}

    def _plan(self, seed: int, step: int, identities: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Which denoising steps inject noise and which are trained, for each row: two masks (K, T).

        What is trained on samples that are noised anew has none: such samples are made without.
        """
        steps, num_steps = self.algorithm.steps, self.sampling.num_steps
        masks = torch.zeros(2, len(identities), num_steps, dtype=torch.bool)
        for row, (prompt_id, sample) in enumerate(identities):
            noisy = () if self.algorithm.noise.forward_process else steps.noisy(seed, step, prompt_id, num_steps)
            masks[0, row, list(noisy)] = True
            masks[1, row, list(steps.trained(seed, step, prompt_id, sample, num_steps))] = True
        return masks[0], masks[1]

    def _initial(self, seed: int, step: int, identities: Sequence[tuple[int, int]]) -> Tensor:
        if self.algorithm.same_initial_noise:
            identities = [(prompt_id, 0) for prompt_id, _ in identities]
        initial = noise.draw(seed, step, identities, noise.INITIAL, self.model.latent_shape)
        return initial.to(self.model.device, self.state_dtype)

    def velocity(
        self, x: Tensor, sigma_N: Tensor, cond: Conditioning, negative: Conditioning | None, guidance: float
    ) -> Tensor:
        """Guided velocity in the state's dtype; the forward runs under autocast when the worker's dtype is bfloat16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            v = self.model.guided_velocity(x, sigma_N, cond, negative, guidance)
        return v.to(x.dtype)

    @torch.no_grad()
    def evaluate(
        self,
        texts: Sequence[str],
        prompt_ids: Sequence[int],
        seed: int,
        negatives: Sequence[str | None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One sample per prompt without step noise: final latents (K, ...) and media (K, ...).

        Uses `eval_num_steps` and `eval_guidance`; initial noise from (seed, evaluation, prompt id). `negatives` as of
        `conditioning`.
        """
        num_steps, guidance = self.sampling.eval_num_steps, self.sampling.eval_guidance
        sigmas = self.model.sigmas(num_steps).to(self.model.device)
        latents, media = [], []
        size = self.batch_size
        for start in range(0, len(texts), size):
            own = negatives and negatives[start : start + size]
            cond, negative = self.conditioning(texts[start : start + size], guidance, own)
            ids = [(prompt_id, 0) for prompt_id in prompt_ids[start : start + size]]
            x = noise.draw(seed, noise.EVALUATION, ids, noise.INITIAL, self.model.latent_shape)
            x = x.to(self.model.device, self.state_dtype)
            for i in range(num_steps):
                at = Transition.at(sigmas, torch.full((len(x),), i, device=x.device), x.ndim)
                x = euler(x, self.velocity(x, at.sigma.reshape(-1), cond, negative, guidance), at)
            latents.append(x)
            media.append(self.model.decode(x))
        return torch.cat(latents), torch.cat(media)


def _by_row(record: Mapping[str, list[Tensor]], num_rows: int) -> dict[str, Tensor]:
    """From values listed step by step to (K, S, ...): each row's trained steps in order; all rows have S of them."""
    order = torch.cat(record["row"]).argsort(stable=True)
    flat = {name: torch.cat(values)[order] for name, values in record.items() if name != "row"}
    return {name: values.reshape(num_rows, -1, *values.shape[1:]) for name, values in flat.items()}
