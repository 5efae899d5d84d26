"""The generator that samples with the vLLM-Omni engine: its kernels, its batching, digen's own steps and noise.

Invariant: a sample has the identity, noise, steps and log-prob formula that the diffusers backend gives it (rule R8;
the loop is the same code, see `vllm_host.py`), and one version of weights, which every byte of the engine's parameters
has been compared with (R15). Each rank has an engine of its own, over one device or several: its worker runs in the
rank's process, as no second engine could, or has processes of its own, of which none outlives the rank and none the
others. vllm is imported when a model is loaded, and not before.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from digen.backends.conditions import Conditions
from digen.backends.generation.vllm_adapters import write_adapters
from digen.backends.generation.vllm_engine import AsyncEngine, OmniEngine
from digen.backends.generation.vllm_host import Answer, Wanted
from digen.backends.sampler import Sampler
from digen.backends.worker import DTYPES, NO_VERSION, TorchWorker
from digen.config import GroupConfig
from digen.conflicts import VLLM_FAMILIES
from digen.engines.placement import named_devices
from digen.errors import ConfigError, SyncError, one_of
from digen.models.base import Conditioning
from digen.presets import payload
from digen.types import MicroBatch, Prompt, Published, Version
from digen.weights.base import load
from digen.weights.state import check_fit, read_export, trainable
from digen.workload import generator_names

logger = logging.getLogger(__name__)

WAIT_MS = 50.0
"""How long the engine waits for more requests before it starts a batch that is not full; it stops at a fifth of this
without a new one."""
PIPELINES: Mapping[str, str] = {
    "QwenImagePipeline": "digen.backends.generation.vllm_pipeline.DigenQwenImagePipeline",
    "StableDiffusion3Pipeline": "digen.backends.generation.vllm_sd3.DigenSD3Pipeline",
    "FluxPipeline": "digen.backends.generation.vllm_flux.DigenFluxPipeline",
    "WanPipeline": "digen.backends.generation.vllm_wan.DigenWanPipeline",
}
"""Class in the engine's process by the name of diffusers' pipeline class: the families that can be had."""
EXTENSION = "digen.backends.generation.vllm_worker.DigenWorker"
VISIBLE = "CUDA_VISIBLE_DEVICES"
PORTS = (20_000, 32_000)
"""Below those that Linux gives to whoever asks for any."""


class VllmOmniGenerator(TorchWorker):
    """Samples with the vLLM-Omni engine: Qwen-Image, FLUX.1, Stable Diffusion 3.5 and Wan2.1 (extra `vllm`)."""

    packages: ClassVar[tuple[tuple[str, str], ...]] = (("vllm", "0.30"), ("vllm-omni", "0.30"))
    """Distributions that must be installed, with the version's beginning that this file is written for."""
    extra: ClassVar[str] = "vllm"
    """What installs them: `digen[vllm]`."""
    trainers_forward: ClassVar[bool] = False
    """Whether its forward pass is the trainer's own code, so that log-probs of both are equal to the last bit."""

    engine: OmniEngine
    adapted: Mapping[str, str]
    """Ends of diffusers' module names, and what adapters must call them in the engine."""
    host: dict[str, Tensor]
    """What weights are pulled into: the trained tensors, in host memory."""

    @property
    def placement(self) -> GroupConfig:
        return self.config.generator

    # Loading --------------------------------------------------------------------------------------------------------

    def check_attention(self, name: str) -> None:
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        if name not in DiffusionAttentionBackendEnum.__members__:
            raise ConfigError(one_of("generator.attention", name, DiffusionAttentionBackendEnum.__members__))

    def _load_model(self) -> None:
        """The engine, and of the model what names weights and encodes prompts. Raises ConfigError for other families.

        The transformer here has no weights: the engine has them.
        """
        model = self.new_model()
        self._check_family(model)
        model.empty = True
        model.load(self.context.device, self.kept_dtype, text_encoder=False, tokenizer=True, decoder=False)
        self.make_trainable(model)
        self.model, self.host = model, _like(model.transformer)
        self.engine = OmniEngine(self.new_engine, self.request, len(self.devices), self.lost)
        self.adapted = self.engine.call("digen_begin", payload(self.config))["adapted"]
        self.sampler = EngineSampler(
            model,
            self.algorithm,
            self.config.sampling,
            DTYPES[self.placement.dtype],
            self.batch_size,
            Conditions(model, self.context.device, self.kept_dtype),
            self.engine,
        )
        if self.placement_rests:
            self.engine.rest()

    def _check_family(self, model: Any) -> None:
        kind = model.pipeline_class.__name__
        if kind not in PIPELINES:
            raise ConfigError(
                f"generator.backend=vllm-omni cannot sample model.name={self.config.model.name} ({kind}); allowed: "
                f"{', '.join(VLLM_FAMILIES)}, or generator.backend=diffusers, which has every family"
            )

    @property
    def batch_size(self) -> int:
        """Samples that the engine may put into one batch."""
        return self.placement.batch_size or -(-self.algorithm.samples_per_prompt // self.context.world_size)

    @property
    def placement_rests(self) -> bool:
        """Whether the engine leaves the device between calls (`generator.offload_between_calls`)."""
        return self.config.generator.offload_between_calls

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that the engine divides the model over, this rank's own first; `cpu` once for each of its processes."""
        generator, mine = self.config.generator, self.context
        parallel = generator.devices_per_rank
        if parallel == 1 or mine.device == "cpu":
            return (mine.device,) * parallel
        names = generator_names(generator.replicas)
        devices = generator.devices_of(names.index(mine.group) if mine.group in names else 0)
        return named_devices(devices, generator.ranks)[mine.rank :: mine.world_size]

    @property
    def in_process(self) -> bool:
        """Whether the engine's worker is a thread of this process, where it has the first device that is seen here."""
        return self.devices in (("cpu",), ("cuda:0",))

    def new_engine(self) -> AsyncEngine:
        """Start the engine; called in its event loop."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm_omni import AsyncOmni

        apart = nullcontext() if self.in_process else seeing(self.devices)
        # Its sockets, in a folder that goes with the run: an engine that is killed leaves them.
        self.sockets = tempfile.TemporaryDirectory(prefix="digen-engine-", dir=self.context.shared_dir)
        kernel = {"DIFFUSION_ATTENTION_BACKEND": self.placement.attention} if self.placement.attention else {}
        with apart, setting({"MASTER_PORT": str(free_port()), "VLLM_RPC_BASE_PATH": self.sockets.name, **kernel}):
            engine: AsyncEngine = AsyncOmni(**self.engine_settings())
        return engine

    def lost(self, why: str) -> None:
        """The engine's processes have died: so does this one, which the run notices at once, and starts it again."""
        logger.critical("the engine has ended: %s", why)
        os._exit(1)

    def engine_settings(self) -> dict[str, Any]:
        """What the engine is started with."""
        parallel = {"tensor_parallel_size": len(self.devices), "distributed_executor_backend": "mp"}
        return {
            "model": self.model.folder,
            "dtype": self.placement.dtype,
            "enforce_eager": True,
            **({} if self.in_process else parallel),
            "max_num_seqs": self.batch_size,
            "request_batch_max_wait_ms": WAIT_MS if self.batch_size > 1 else 0.0,
            "enable_sleep_mode": self.placement_rests,
            "custom_pipeline_args": {"pipeline_class": PIPELINES[self.model.pipeline_class.__name__]},
            "worker_extension_cls": EXTENSION,
        }

    def request(self, wanted: Wanted, adapters: Any) -> Any:
        """The engine's sampling parameters of one sample."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        model, sampling = self.config.model, self.config.sampling
        return OmniDiffusionSamplingParams(
            height=model.height,
            width=model.width,
            num_frames=model.num_frames,
            num_inference_steps=sampling.num_steps if wanted.step is not None else sampling.eval_num_steps,
            lora_request=adapters,
            extra_args={"digen": wanted},
        )

    def close(self) -> None:
        super().close()
        if "engine" in vars(self):
            self.engine.close()
            self.sockets.cleanup()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with self.engine.awake() if self.placement_rests else nullcontext():
            yield
        if "transport" in vars(self):
            self.transport.proven()

    # Weights --------------------------------------------------------------------------------------------------------

    def pull(self, published: Published) -> str:
        """Take new weights through host memory into the engine; a failure ends the engine (SyncError)."""
        self.version = NO_VERSION
        found = load(self.transport, published, self.host)
        self._give(self.host, published.version)
        return found

    def _give(self, tensors: Mapping[str, Tensor], version: Version) -> None:
        """The engine has these weights, all of them and nothing else, or none at all and is closed."""
        self.version = NO_VERSION
        with self.engine.awake() if self.placement_rests else nullcontext():
            if self.config.trainer.lora:
                self.engine.load(lambda engine: self._give_adapters(engine, tensors, version))
            else:
                self.engine.load(lambda engine: self._give_whole(engine, tensors, version))
        self.version = version

    def _give_whole(self, engine: OmniEngine, tensors: Mapping[str, Tensor], version: Version) -> None:
        engine.call("digen_start_weight_update", version)
        with self._handed(tensors) as given:
            engine.call("digen_update_weights", given)
        reply = engine.call("digen_finish_weight_update")
        if reply["version"] != version or reply["tensors"] != len(tensors):
            raise SyncError(f"gave the engine {len(tensors)} tensors of version {version}, it took {reply}")

    @contextmanager
    def _handed(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor] | str]:
        """As the engine's workers get them: in this process as they are, else as a file in memory that all map."""
        if self.in_process:
            yield dict(tensors)
            return
        with tempfile.TemporaryDirectory(prefix="digen-weights-", dir=self.context.shared_dir) as folder:
            file = Path(folder) / "weights.safetensors"
            save_file(dict(tensors), file)
            yield str(file)

    def _give_adapters(self, engine: OmniEngine, tensors: Mapping[str, Tensor], version: Version) -> None:
        lora = self.config.trainer.lora
        assert lora is not None
        with tempfile.TemporaryDirectory(prefix="digen-adapters-") as folder:
            names = write_adapters(Path(folder), tensors, lora.rank, lora.alpha, self.adapted)
            reply = engine.call("digen_load_adapters", folder, version, names)
        engine.adapters = reply["request"]

    def restore(self, path: Path) -> None:
        self.load_weights(path / "weights.safetensors", self.version)

    def load_weights(self, path: Path, version: Version = 0) -> None:
        module = self.model.transformer
        tensors = read_export(path, module) if path.is_dir() else load_file(path)
        check_fit(trainable(module), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._give(tensors, version)


def _like(module: nn.Module) -> dict[str, Tensor]:
    """Host memory for the trained tensors of a module."""
    return {name: torch.empty(p.shape, dtype=p.dtype) for name, p in trainable(module).items()}


@contextmanager
def seeing(devices: Sequence[str]) -> Iterator[None]:
    """What is started within the block sees these alone of the GPUs that this process sees, as its first ones."""
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    before = os.environ.get(VISIBLE)
    names = before.split(",") if before else [str(number) for number in range(max(numbers, default=0) + 1)]
    with setting({VISIBLE: ",".join(names[number] for number in numbers)} if numbers else {}):
        yield


@contextmanager
def setting(environment: Mapping[str, str]) -> Iterator[None]:
    """These environment variables are set within the block."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port() -> int:
    """A port of this host that nobody has, nor will have in a moment: the system gives those of this range to nobody.

    The engine would take one that is given to the next who asks, and ask for it some seconds later itself.
    """
    while True:
        port = random.randrange(*PORTS)  # noqa: S311 - no secret
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True, slots=True)
class EngineSampler(Sampler):
    """A sampler whose denoising runs in an engine: it asks for one sample after the other, all at once."""

    engine: OmniEngine

    def rollout(self, microbatch: MicroBatch, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        group, prompts, guidance = microbatch.samples_per_prompt, microbatch.prompts, self.sampling.guidance
        texts = {place: self._texts(prompts[place], guidance) for place in {row // group for row in rows}}
        wanted = [
            Wanted(microbatch.seed, microbatch.step, group, prompts[row // group], row % group, texts[row // group])
            for row in rows
        ]
        tensors, media = _joined(self.engine.sample(wanted))
        cond, negative = self.conditioning([p.text for p in prompts], guidance, [p.negative for p in prompts])
        tensors["prompt"] = torch.tensor([row // group for row in rows])
        tensors |= {f"cond.{name}": tensor for name, tensor in cond.items()}
        tensors |= {f"negative.{name}": tensor for name, tensor in (negative or {}).items()}
        return tensors, media

    def evaluate(
        self,
        texts: Sequence[str],
        prompt_ids: Sequence[int],
        seed: int,
        negatives: Sequence[str | None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        own = negatives or [None] * len(texts)
        prompts = [Prompt(i, text, {}, no) for i, text, no in zip(prompt_ids, texts, own, strict=True)]
        guidance = self.sampling.eval_guidance
        wanted = [Wanted(seed, None, 1, prompt, 0, self._texts(prompt, guidance)) for prompt in prompts]
        tensors, media = _joined(self.engine.sample(wanted))
        return tensors["latents"], media

    def _texts(self, prompt: Prompt, guidance: float) -> dict[str, Conditioning]:
        """Conditioning of the texts that a sample of this prompt needs, on the CPU."""
        texts = [prompt.text]
        if guidance != 1.0 and not self.model.embeds_guidance:
            texts.append(self.sampling.negative_prompt if prompt.negative is None else prompt.negative)
        return {text: {name: t.cpu() for name, t in self.conditions.of([text]).items()} for text in texts}


def _joined(answers: Sequence[Answer]) -> tuple[dict[str, Tensor], Tensor]:
    """Trajectory tensors of all samples, and their media. Raises ValueError where their noise levels differ."""
    rows = {name: torch.cat([answer[name] for answer in answers]) for name in answers[0] if name != "sigmas"}
    media = rows.pop("media")
    if "sigmas" not in answers[0]:
        return rows, media
    sigmas = answers[0]["sigmas"].clone()
    if any(not torch.equal(answer["sigmas"], sigmas) for answer in answers):
        raise ValueError("the samples of one micro-batch were made at different noise levels")
    return {**rows, "sigmas": sigmas}, media
