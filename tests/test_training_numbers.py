"""The trainer's numbers on the real bundled model: ratio, stacking, guidance, KL, and what changes weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.engines.store import MemoryStore
from digen.types import Rollout
from digen.weights.state import trainable

ALGORITHMS = {
    "flow-sde": ("flowgrpo", ["algorithm.noise.type=flow-sde"]),
    "cps": ("flowgrpo", ["algorithm.noise.type=cps"]),
    "dance": ("dancegrpo", []),
}


@pytest.fixture
def pair(make_config: Any, make_worker: Any) -> Any:
    """A generator and a trainer that share a store."""

    def make(*overrides: str, algorithm: str = "flowgrpo") -> tuple[Any, Any, Any]:
        config = make_config(*overrides, algorithm=algorithm)
        store = MemoryStore()
        return (
            config,
            make_worker(DiffusersGenerator, config, store, "generator"),
            make_worker(LocalTrainer, config, store, "trainer"),
        )

    return make


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainable(worker.model.transformer).items()}


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_ratio_is_one_before_the_first_update(
    kind: str, guidance: float, pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    algorithm, overrides = ALGORITHMS[kind]
    config, generator, trainer = pair(*overrides, f"sampling.guidance={guidance}", algorithm=algorithm)
    scored = make_scored(config, generator, make_microbatch(config))
    stats = trainer.accumulate(scored, 1, 24.0, last=True)
    assert stats["ratio_error"].high <= 1e-6
    assert stats["ratio"].count == sum(scored.keep) * config.algorithm.steps.num_trained(6)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_with_bfloat16_the_ratio_stays_close_and_the_gap_is_told_per_timestep(
    kind: str, pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    algorithm, overrides = ALGORITHMS[kind]
    both = ["generator.dtype=bfloat16", "trainer.dtype=bfloat16"]
    config, generator, trainer = pair(*overrides, *both, algorithm=algorithm)
    scored = make_scored(config, generator, make_microbatch(config))
    stats = trainer.accumulate(scored, 0, 24.0, last=True)
    assert stats["ratio_error"].high <= 1e-3
    steps = {name for name in stats if name.startswith("log_prob_gap/step")}
    assert steps
    assert stats["log_prob_gap"].high == max(stats[name].high for name in steps)


def test_a_schedule_that_is_off_by_one_step_shows_in_the_gap(
    pair: Any, make_microbatch: Any, make_scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, generator, trainer = pair()
    scored = make_scored(config, generator, make_microbatch(config))
    sound = trainer.accumulate(scored, 1, 24.0, last=True)["log_prob_gap"].high
    ref = scored.rollout.shards[0].trajectory
    tensors = trainer.context.store.get(ref)
    trainer.context.store.drop(ref)
    shifted = trainer.context.store.put("shifted", tensors | {"steps": tensors["steps"] + 1})
    shard = replace(scored.rollout.shards[0], trajectory=shifted)
    off = replace(scored, rollout=replace(scored.rollout, shards=(shard,)))
    gap = trainer.accumulate(off, 1, 24.0, last=True)["log_prob_gap"].high
    assert sound < config.trainer.log_prob_gap < gap


def test_stacking_timesteps_changes_the_number_of_forwards_and_not_the_gradient(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair("algorithm.steps.type=all-but-last")
    scored = make_scored(config, generator, make_microbatch(config))
    calls = []
    trainer.model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients, counts = [], []
    for width in (1, 2, 0):
        calls.clear()
        trainer.optimizer.zero_grad()
        trainer.accumulate(scored, width, 40.0, last=True)
        counts.append(len(calls))
        gradients.append(torch.cat([g.flatten() for g in trainer.gradients().values()]).double())
    assert counts == [2 * 5, 2 * 3, 2 * 1]
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-6 * gradients[0].norm()


def test_guidance_costs_exactly_one_more_forward_per_pass(pair: Any, make_microbatch: Any, make_scored: Any) -> None:
    counts = {}
    for guidance in (1.0, 4.0):
        config, generator, trainer = pair(f"sampling.guidance={guidance}")
        calls: list[int] = []
        for worker in (generator, trainer):
            worker.model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        scored = make_scored(config, generator, make_microbatch(config))
        trainer.accumulate(scored, 0, 24.0, last=True)
        counts[guidance] = len(calls)
    assert counts[4.0] == 2 * counts[1.0]


def test_without_a_kl_term_the_reference_is_never_run_and_with_it_the_kl_has_a_gradient(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair("algorithm.loss.kl=0.0")
    assert trainer.base is None
    calls: list[int] = []
    trainer.model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    scored = make_scored(config, generator, make_microbatch(config))
    trainer.accumulate(scored, 0, 24.0, last=True)
    assert len(calls) == 2  # one pass per prompt

    config, generator, trainer = pair("algorithm.loss.kl=1.0")
    with torch.no_grad():
        for parameter in trainable(trainer.model.transformer).values():
            parameter.mul_(1.01)
    silent = replace(scored, rollout=make_scored(config, generator, make_microbatch(config)).rollout)
    silent = replace(silent, advantages=(0.0,) * len(scored.advantages))
    stats = trainer.accumulate(silent, 0, 24.0, last=True)
    assert stats["kl"].mean > 0
    assert all(torch.isfinite(g).all() for g in trainer.gradients().values())
    assert sum(float(g.abs().sum()) for g in trainer.gradients().values()) > 0


def test_the_reference_of_adapters_is_the_base_with_the_adapters_off(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair("algorithm.loss.kl=1.0", "trainer.lora={rank: 4}")
    scored = make_scored(config, generator, make_microbatch(config))
    assert trainer.accumulate(scored, 0, 24.0, last=True)["kl"].high == 0  # B starts at zero
    with torch.no_grad():
        for name, parameter in trainable(trainer.model.transformer).items():
            parameter.add_(0.05 if "lora_B" in name else 0.0)
    assert trainer.accumulate(scored, 0, 24.0, last=True)["kl"].mean > 0


def test_accumulating_never_changes_weights_and_stepping_does(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair()
    before = weights(trainer)
    scored = make_scored(config, generator, make_microbatch(config))
    trainer.accumulate(scored, 0, 24.0, last=True)
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    report = trainer.optimizer_step(1.0)
    assert report.applied
    assert report.weight_delta > 0
    assert trainer.version == 1
    assert not trainer.gradients()


def test_equal_rewards_leave_the_weights_bit_unchanged(pair: Any, make_microbatch: Any, make_scored: Any) -> None:
    config, generator, trainer = pair()
    scored = make_scored(config, generator, make_microbatch(config))
    before = weights(trainer)
    trainer.accumulate(replace(scored, advantages=(0.0,) * len(scored.advantages)), 0, 24.0, last=True)
    report = trainer.optimizer_step(1.0)
    assert not report.applied
    assert report.finite
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())


def test_a_non_finite_gradient_is_never_applied(pair: Any, make_microbatch: Any, make_scored: Any) -> None:
    config, generator, trainer = pair()
    scored = make_scored(config, generator, make_microbatch(config))
    before = weights(trainer)
    trainer.accumulate(replace(scored, advantages=(float("nan"),) * len(scored.advantages)), 0, 24.0, last=True)
    report = trainer.optimizer_step(1.0)
    assert not report.finite
    assert not report.applied
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    assert not trainer.gradients()


def test_dropped_groups_change_no_other_gradient(pair: Any, make_microbatch: Any, make_scored: Any) -> None:
    config, generator, trainer = pair()
    scored = make_scored(config, generator, make_microbatch(config, prompts=2))
    n = config.algorithm.samples_per_prompt
    nan = float("nan")
    half = replace(scored, keep=(True,) * n + (False,) * n, advantages=scored.advantages[:n] + (nan,) * n)
    trainer.accumulate(half, 0, 24.0, last=True)
    without = trainer.gradients()
    trainer.optimizer.zero_grad()
    single = make_scored(config, generator, make_microbatch(config, prompts=1))
    trainer.accumulate(replace(single, advantages=scored.advantages[:n]), 0, 24.0, last=True)
    for name, gradient in trainer.gradients().items():
        assert torch.equal(gradient, without[name])
    trainer.accumulate(replace(scored, keep=(False,) * (2 * n)), 0, 24.0, last=True)  # nothing left: nothing happens


@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_p35_pushed_weights_arrive_bit_equal_and_change_the_samples(
    lora: str, pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair(f"trainer.lora={lora}", "trainer.learning_rate=1e-2")
    microbatch = make_microbatch(config)
    scored = make_scored(config, generator, microbatch)
    store = generator.context.store
    media = store.get(scored.rollout.shards[0].trajectory)["latents"]
    trainer.accumulate(scored, 0, 24.0, last=True)
    trainer.optimizer_step(1.0)
    published = trainer.push(1)
    assert generator.pull(published) == published.fingerprint
    assert all(torch.equal(w, weights(trainer)[n]) for n, w in weights(generator).items())
    after = Rollout(
        microbatch, 1, (generator.generate(microbatch, 1, tuple(range(microbatch.num_samples))),), "generator"
    )
    assert not torch.equal(store.get(after.shards[0].trajectory)["latents"], media)
    with pytest.raises(RuntimeError, match="version 0"):
        generator.generate(microbatch, 0, (0,))


def test_the_replayed_old_log_prob_is_exactly_the_new_one_while_the_weights_are_the_same(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config, generator, trainer = pair("algorithm.old_log_prob=replay", "generator.dtype=bfloat16")
    scored = make_scored(config, generator, make_microbatch(config))
    stats = trainer.accumulate(scored, 0, 24.0, last=True)
    assert stats["ratio_error"].high == 0
    assert stats["log_prob_gap"].high > 0


def test_p34_adapter_targets_that_match_nothing_are_named_with_some_that_there_are(
    make_config: Any, make_worker: Any
) -> None:
    from digen.errors import ConfigError

    config = make_config("trainer.lora={rank: 4, target_modules: [attn.to_z]}")
    with pytest.raises(ConfigError, match=r"attn\.to_z.*to_q"):
        make_worker(LocalTrainer, config)


def test_p34_new_weights_that_match_no_parameter_are_refused_and_the_old_ones_stay(pair: Any) -> None:
    from digen.errors import SyncError

    _, generator, trainer = pair("trainer.lora={rank: 4}")
    published, before = trainer.push(0), weights(generator)
    others = {f"unet.{name}": torch.zeros_like(w) for name, w in before.items()}
    for tensors in (others, {}):
        wrong = replace(published, weights=trainer.transport.push(0, tensors))
        with pytest.raises(SyncError, match=f"{len(before)} missing .*lora_A.* {len(tensors)} extra"):
            generator.pull(wrong)
    assert all(torch.equal(before[n], w) for n, w in weights(generator).items())
