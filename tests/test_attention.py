"""Attention kernels by name, each group its own: what is asked for runs, or is refused before a model is loaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from digen import plugins
from digen.backends import attention
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.backends.worker import TorchWorker
from digen.conflicts import OWN_ATTENTION, attention_conflicts
from digen.engines.store import MemoryStore
from digen.errors import ConfigError
from digen.models.base import ModelFamily
from digen.presets import resolve
from digen.weights.state import trainable

MINIATURES = ("glyph", "tiny-qwen-image", "tiny-flux", "tiny-z-image", "tiny-sd3", "tiny-wan", "tiny-hunyuan-video")
Make = Callable[..., Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that torch was told to take, as diffusers tells it."""
    found, real = list[str](), torch.nn.attention.sdpa_kernel

    def sdpa_kernel(kernels: Any, *more: Any, **named: Any) -> Any:
        found.append(kernels.name if isinstance(kernels, SDPBackend) else str(kernels))
        return real(kernels, *more, **named)

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", sdpa_kernel)
    return found


def test_a_generator_runs_on_the_kernel_that_is_asked_for_and_the_trainer_on_its_own(
    seen: list[str], make_config: Make, make_worker: Make, make_microbatch: Make
) -> None:
    plain, math = make_config(), make_config("generator.attention=_native_math")
    microbatch, latents = make_microbatch(plain), []
    for kind, config, kernels in (
        (DiffusersGenerator, plain, set()),
        (DiffusersGenerator, math, {"MATH"}),
        (LocalTrainer, math, set()),
    ):
        one = make_worker(kind, config)
        seen.clear()
        shard = one.generate(microbatch, 0, tuple(range(microbatch.num_samples)))
        latents.append(one.context.store.get(shard.trajectory)["latents"])
        assert set(seen) == kernels
    assert torch.equal(latents[2], latents[0])
    assert not torch.equal(latents[1], latents[0])
    assert float((latents[1] - latents[0]).abs().max()) <= 1e-4  # six steps of guidance enlarge the last digit


def test_gradients_are_computed_on_the_trainers_kernel_and_are_the_same(
    seen: list[str], make_config: Make, make_worker: Make, make_microbatch: Make, make_scored: Make
) -> None:
    plain, math, store = make_config(), make_config("trainer.attention=_native_math"), MemoryStore()
    scored = make_scored(plain, make_worker(DiffusersGenerator, plain, store), make_microbatch(plain))
    found = []
    for config in (plain, math):
        trainer = make_worker(LocalTrainer, config, store)
        seen.clear()
        trainer.accumulate(scored, 0, 4.0, True)
        assert set(seen) == ({"MATH"} if config is math else set())
        gradients = [p.grad for p in trainable(trainer.model.transformer).values() if p.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) <= 1e-5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flash", r"attention=flash: .*flash-attn"),
        ("sage", r"attention=sage: .*sageattention"),
        ("xformers", r"attention=xformers: .*xformers"),
        ("nativ", r"attention: got 'nativ'\. Did you mean 'native'\? Allowed: _flash_3, "),
    ],
)
def test_a_kernel_that_is_not_here_is_refused_before_a_model_is_loaded(
    name: str, said: str, make_config: Make, make_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchWorker, "load", lambda _: pytest.fail("it loads"))
    with pytest.raises(ConfigError, match=said):
        make_worker(DiffusersGenerator, make_config(f"generator.attention={name}", "schedule.assist=none"))


def test_a_kernel_without_a_backward_pass_is_refused_where_gradients_are_computed(make_config: Make) -> None:
    make_config("generator.attention=sage", "schedule.assist=none")
    for name in ("sage", "_sage_qk_int8_pv_fp8_cuda"):
        with pytest.raises(ConfigError, match=rf"trainer\.attention={name} has no backward pass"):
            make_config(f"trainer.attention={name}")
        with pytest.raises(ConfigError, match=rf"generator\.attention={name} has no backward pass"):
            make_config(f"generator.attention={name}", "schedule.assist=both")


def test_the_names_of_another_engine_are_not_held_against_diffusers(make_config: Make) -> None:
    config = make_config()
    other = config.generator.model_copy(update={"backend": "vllm-omni", "attention": "SAGE_ATTN"})
    assert list(attention_conflicts(config.model_copy(update={"generator": other}))) == []


@pytest.mark.parametrize("name", MINIATURES)
def test_every_family_takes_a_kernel_or_is_refused_by_name(name: str) -> None:
    config = resolve("flowgrpo", name, None, [], {})
    family: ModelFamily = plugins.find("models", config.model.name)(config.model)
    family.load("cpu", torch.float32, text_encoder=False, tokenizer=False, decoder=False)
    if name not in OWN_ATTENTION:
        attention.use(family.transformer, "_native_math")
        return
    with pytest.raises(ConfigError, match="has attention of its own"):
        attention.use(family.transformer, "_native_math")
    with pytest.raises(ConfigError, match=rf"trainer\.attention=native: model\.name={name} has attention of its own"):
        resolve("flowgrpo", name, None, ["trainer.attention=native"], {})
