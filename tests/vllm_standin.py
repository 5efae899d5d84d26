"""A stand-in for vLLM-Omni 0.30, as it was seen to behave: diffusers' modules behind its interface, in this process.

What it does as the real one does: a worker's exception comes back as a dictionary; an aborted request has an output
without images and without an error; a call to a worker waits for the running batch and goes before waiting requests; a
failed pause leaves admission closed; of deeper sleep than level 1 it does not wake; its loader skips names that it does
not know and stops in the middle at a wrong shape; q, k and v are one parameter; adapters may fit nowhere, silently.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor, nn

from digen.backends.generation.vllm_omni import VllmOmniGenerator

PACKED = {
    "to_qkv": ["to_q", "to_k", "to_v"],
    "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"],
}


class Generator(VllmOmniGenerator):
    """The backend itself, on the stand-in."""

    packages = ()

    def new_engine(self) -> Any:
        install()
        return super().new_engine()


class OtherNoise(Generator):
    """One sample's noise is not its own."""

    def request(self, wanted: Any, adapters: Any) -> Any:
        params = super().request(wanted, adapters)
        object.__setattr__(wanted, "seed", wanted.seed + (wanted.sample == 1))
        return params


class OtherWeight(Generator):
    """One weight changes on its way behind the engine's back."""

    def _load_model(self) -> None:
        super()._load_model()
        worker = self.engine._engine.worker
        with torch.no_grad():
            next(worker.model_runner.pipeline.transformer.parameters())[0, 0] += 0.5


# The engine's modules -----------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """diffusers' transformer with packed projections, called and named as the engine's is."""

    packed_modules_mapping = PACKED

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.inner = QwenImageTransformer2DModel.from_pretrained(folder, subfolder="transformer").eval()
        for block in self.inner.transformer_blocks:
            for name, parts in PACKED.items():
                _pack(block.attn, name, [getattr(block.attn, part) for part in parts])

    def forward(self, *, txt_seq_lens: list[int], **inputs: Any) -> Any:
        assert len(txt_seq_lens) == len(inputs["hidden_states"])
        return self.inner(**inputs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.inner.named_parameters(*args, **kwargs):
            yield name.replace(".to_out.0.", ".to_out."), parameter


def _pack(attention: nn.Module, name: str, parts: list[Any]) -> None:
    """One parameter, of which the layers' weights and biases are views."""
    packed = nn.Module()
    setattr(attention, name, packed)
    for leaf in ("weight", "bias"):
        whole = nn.Parameter(torch.cat([getattr(part, leaf).detach() for part in parts]), requires_grad=False)
        setattr(packed, leaf, whole)
        for part, piece in zip(parts, whole.detach().chunk(len(parts)), strict=True):
            delattr(part, leaf)
            setattr(part, leaf, piece)


class QwenImagePipeline(nn.Module):
    """What digen's pipeline is made from."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.transformer = Transformer(od_config.model)
        self.vae = AutoencoderKLQwenImage.from_pretrained(od_config.model, subfolder="vae").eval()
        self.text_encoder, self._encoder_modules = nn.Linear(1, 1), ["text_encoder"]
        self.weights_sources = [SimpleNamespace(subfolder="transformer")]
        self.skips: tuple[str, ...] = ()

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.transformer.named_parameters()), set()
        for full, tensor in pairs:
            name = full.removeprefix("transformer.").replace(".to_out.0.", ".to_out.")
            path, _, leaf = name.rpartition(".")
            parent, _, module = path.rpartition(".")
            packed = next((p for p, parts in PACKED.items() if module in parts), None)
            target = f"{parent}.{packed}.{leaf}" if packed else name
            if target not in own or name in self.skips:
                continue
            into = own[target].detach()
            if packed:
                into = into.chunk(3)[PACKED[packed].index(module)]
            into.copy_(tensor)
            loaded |= {name, target}
        return loaded


class Worker:
    """The engine's worker before anything is mixed into it."""

    def __init__(self, model: str) -> None:
        self.model_runner = SimpleNamespace(pipeline=None)
        self.lora_manager = None
        self.model = model

    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        kind = _resolved(custom_pipeline_args["pipeline_class"])
        self.model_runner.pipeline = kind(od_config=SimpleNamespace(model=self.model)).eval()


class CustomPipelineWorkerExtension:
    """What an extension must be made from."""


@dataclass
class DiffusionOutput:
    output: Any = None
    trajectory_latents: Any = None
    error: str | None = None


@dataclass
class OmniDiffusionSamplingParams:
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    lora_request: Any = None
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


# The engine ---------------------------------------------------------------------------------------------------------


class AsyncOmni:
    """One scheduler: calls to the worker before waiting requests, neither while a batch runs."""

    def __init__(
        self, *, model: str, max_num_seqs: int, custom_pipeline_args: Any, worker_extension_cls: str, **_: Any
    ) -> None:
        extension = _resolved(worker_extension_cls)
        self.worker = type("Extended", (extension, Worker), {})(model)
        self.worker.re_init_pipeline(custom_pipeline_args)
        self.max_num_seqs = max_num_seqs
        self.open, self.more = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.waiting: dict[str, tuple[Any, asyncio.Future[Any]]] = {}
        self.calls: deque[tuple[str, Any, asyncio.Future[Any]]] = deque()
        self.asleep, self.pause_fails, self.dead = 0, False, False
        self.hold: asyncio.Event | None = None
        """A test's: the running batch ends when it is set."""
        self.log: list[str] = []
        self.loop = asyncio.get_running_loop().create_task(self._busy())

    async def generate(
        self, prompt: Any, sampling_params: Any = None, request_id: str = "", *, sampling_params_list: Any = None
    ) -> AsyncIterator[Any]:
        await self.open.wait()
        if self.asleep:
            raise RuntimeError("Generation rejected: Engine is partially or fully asleep.")
        future = asyncio.get_running_loop().create_future()
        self.waiting[request_id] = sampling_params_list[0], future
        self.more.set()
        yield await future

    async def abort(self, request_id: str) -> None:
        _, future = self.waiting.pop(request_id)
        future.set_result(SimpleNamespace(images=[], error=None, trajectory_latents=None))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        future = asyncio.get_running_loop().create_future()
        self.calls.append((method, args, future))
        self.more.set()
        return await future

    async def _busy(self) -> None:
        while True:
            await self.more.wait()
            self.more.clear()
            await asyncio.sleep(0.005)  # a batch waits for more
            while self.calls or self.waiting:
                while self.calls:
                    self._answer(*self.calls.popleft())
                batch = [self.waiting.pop(name) for name in list(self.waiting)[: self.max_num_seqs]]
                if batch:
                    await self._run(batch)

    def _answer(self, method: str, args: Any, future: asyncio.Future[Any]) -> None:
        self.log.append(method)
        try:
            future.set_result([[getattr(self.worker, method)(*args)]])
        except Exception as error:  # noqa: BLE001 - as the real one does
            future.set_result([{"supported": False, "error": str(error)}])

    async def _run(self, batch: list[Any]) -> None:
        self.log.append(f"batch of {len(batch)}")
        req = SimpleNamespace(sampling_params_list=[params for params, _ in batch])
        pipeline = self.worker.model_runner.pipeline
        try:
            outputs = await asyncio.to_thread(torch.inference_mode()(pipeline), req)
        except Exception as error:  # noqa: BLE001 - as the real one does
            outputs = [DiffusionOutput(output=(), error=str(error)) for _ in batch]
        if self.hold:
            await self.hold.wait()
        for (_, future), made in zip(batch, outputs, strict=True):
            if not future.done():
                images = list(made.output)
                latents = made.trajectory_latents
                future.set_result(SimpleNamespace(images=images, error=made.error, trajectory_latents=latents))

    async def pause_generation(self, *, mode: str = "abort") -> None:
        self.open.clear()
        if self.pause_fails:
            raise RuntimeError("pause_scheduler failed")

    async def resume_generation(self) -> None:
        self.open.set()

    async def sleep(self, level: int = 2) -> Any:
        self.asleep = level
        return [SimpleNamespace(status="SUCCESS")]

    async def wake_up(self) -> Any:
        if self.asleep > 1:
            raise NotImplementedError("wake_up() after sleep(level=2) is not yet implemented")
        self.asleep = 0
        return [SimpleNamespace(status="SUCCESS")]

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("Stage-0 has no live replica")

    def shutdown(self) -> None:
        self.loop.cancel()


def _resolved(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], attribute)


MODULES = {
    "vllm_omni": (AsyncOmni,),
    "vllm_omni.inputs": (),
    "vllm_omni.inputs.data": (OmniDiffusionSamplingParams,),
    "vllm_omni.lora": (),
    "vllm_omni.lora.request": (LoRARequest,),
    "vllm_omni.diffusion": (),
    "vllm_omni.diffusion.data": (DiffusionOutput,),
    "vllm_omni.diffusion.worker": (),
    "vllm_omni.diffusion.worker.diffusion_worker": (CustomPipelineWorkerExtension,),
    "vllm_omni.diffusion.models": (),
    "vllm_omni.diffusion.models.qwen_image": (),
    "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image": (QwenImagePipeline,),
}
OURS = ("digen.backends.generation.vllm_pipeline", "digen.backends.generation.vllm_worker")
"""Imported anew with whichever engine is there."""


def install() -> None:
    """Be what `import vllm_omni` finds in this process."""
    for name, members in MODULES.items():
        if name not in sys.modules:
            module = sys.modules[name] = ModuleType(name)
            for member in members:
                setattr(module, member.__name__, member)


def remove() -> None:
    """And no longer."""
    for name in (*MODULES, *OURS):
        sys.modules.pop(name, None)
