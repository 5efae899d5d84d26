"""The generator `vllm-omni` on a stand-in engine that behaves as the real one was seen to: see `vllm_standin.py`.

The real engine is tested by `make test-vllm`.
"""

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from digen import plugins, preflight
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.generation.vllm_engine import EngineError, report
from digen.backends.generation.vllm_weights import Update, places
from digen.backends.training.local import LocalTrainer
from digen.cli import app
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, SyncError
from digen.presets import resolve
from digen.testing.contract import GeneratorContract
from digen.weights.state import trainable

STANDIN = f"{Path(__file__).parent}/vllm_standin.py"
BACKEND = f"{STANDIN}:Generator"
SMALL = ("algorithm.samples_per_prompt=4", "sampling.num_steps=4", "schedule.tag=static(1)", "schedule.assist=none")

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    module = sys.modules.get(plugins.find("generators", BACKEND).__module__)
    assert module is not None
    module.remove()


class TestStandIn(GeneratorContract):
    backend = BACKEND

    @pytest.fixture(autouse=True)
    def _ended(self) -> Iterator[None]:
        yield
        if "generator" in vars(self):
            self.generator.close()


@pytest.fixture
def made(make_config: Make, make_worker: Make) -> Iterator[Make]:
    """Loaded generators on the stand-in, which end with the test."""
    workers = []

    def make(*settings: str, name: str = "Generator", store: MemoryStore | None = None) -> Any:
        config = make_config(*SMALL, f"generator.backend={STANDIN}:{name}", *settings)
        kind: Any = plugins.find("generators", config.generator.backend)
        workers.append(make_worker(kind, config, store, "generator-0"))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def generated(worker: Any, microbatch: Any, version: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    shard = worker.generate(microbatch, version, tuple(range(microbatch.num_samples)))
    store = worker.context.store
    return store.get(shard.trajectory), store.get(shard.media)["media"]


# --- samples ---


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_trajectories_are_those_of_the_diffusers_backend(
    guidance: float, made: Make, make_config: Make, make_worker: Make, make_microbatch: Make
) -> None:
    settings = (f"sampling.guidance={guidance}",)
    ours = made(*settings)
    theirs = make_worker(DiffusersGenerator, make_config(*SMALL, *settings))
    microbatch = make_microbatch(ours.config)
    (trajectory, media), (expected, pixels) = generated(ours, microbatch), generated(theirs, microbatch)
    assert trajectory.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (trajectory[name].shape, trajectory[name].dtype) == (tensor.shape, tensor.dtype), name
        assert (trajectory[name].float() - tensor.float()).abs().max() <= 1e-5, name
    assert (media.int() - pixels.int()).abs().max() <= 1


def test_the_engines_decoder_tiles_where_diffusers_would(made: Make) -> None:
    for tiling in (True, False):
        vae = made(f"model.vae_tiling={tiling}").engine._engine.worker.model_runner.pipeline.vae
        assert vae.use_tiling == tiling


def test_eight_samples_go_through_the_transformer_together(made: Make, make_microbatch: Make) -> None:
    worker = made("generator.batch_size=8")
    generated(worker, make_microbatch(worker.config))
    assert worker.engine.call("digen_passes") == {"passes": 1}
    alone = made("generator.batch_size=1")
    generated(alone, make_microbatch(alone.config))
    assert alone.engine.call("digen_passes") == {"passes": 8}


def test_samples_can_be_trained_on_in_the_same_process(
    made: Make, make_config: Make, make_worker: Make, make_microbatch: Make, make_scored: Make
) -> None:
    """What an engine makes in inference mode would be refused by autograd."""
    store = MemoryStore()
    worker = made(store=store)
    scored = make_scored(worker.config, worker, make_microbatch(worker.config))
    stats = make_worker(LocalTrainer, make_config(*SMALL), store).accumulate(scored, 1, 8.0, True)
    assert stats["log_prob_gap"].high <= 1e-5
    assert stats["ratio_error"].high <= 1e-5


# --- what the engine says and does ---


def test_an_error_that_comes_back_as_a_dictionary_is_an_error(made: Make) -> None:
    with pytest.raises(EngineError, match="no_such_method"):
        made().engine.call("no_such_method")


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ([{"supported": False, "error": "no such thing"}], "no such thing"),
        ([{"todo": "not yet"}], "not yet"),
        ([[{"digen": "another"}]], "another"),
        ([[{"digen": "mine", "a": 1}, {"supported": False, "error": "rank 1"}]], "rank 1"),
        ([[None]], "None"),
        ([], "no reply"),
    ],
)
def test_no_reply_but_the_methods_own_counts(replies: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        report("mine", replies)
    assert report("mine", [[{"digen": "mine", "a": 1}]]) == {"a": 1}


def test_an_aborted_request_is_not_counted_as_a_sample(made: Make, make_microbatch: Make) -> None:
    worker = made("generator.batch_size=1")
    engine = worker.engine._engine
    start = engine._run

    async def aborting(batch: Any) -> None:
        if engine.waiting:
            await engine.abort(next(iter(engine.waiting)))
        await start(batch)

    engine._run = aborting
    with pytest.raises(EngineError, match="without a sample: it was aborted"):
        generated(worker, make_microbatch(worker.config))


def test_a_failed_pause_leaves_the_door_open(made: Make, make_microbatch: Make) -> None:
    worker = made()
    worker.engine._engine.pause_fails = True
    with pytest.raises(RuntimeError, match="pause_scheduler failed"):
        worker.engine.rest()
    generated(worker, make_microbatch(worker.config))


def test_memory_is_given_back_between_calls_and_the_samples_are_the_same(made: Make, make_microbatch: Make) -> None:
    plain, resting = made(), made("generator.offload_between_calls=true")
    microbatch = make_microbatch(plain.config)
    assert resting.engine._engine.asleep == 1
    assert torch.equal(generated(resting, microbatch)[1], generated(plain, microbatch)[1])
    assert resting.engine._engine.asleep == 1
    with pytest.raises(RuntimeError, match="asleep"):
        resting.sampler.rollout(microbatch, (0,))


def test_an_engine_that_does_not_wake_is_an_error(made: Make, make_microbatch: Make) -> None:
    worker = made("generator.offload_between_calls=true")

    async def tired() -> list[Any]:
        return [SimpleNamespace(status="ERROR", error_msg="out of memory")]

    worker.engine._engine.wake_up = tired
    with pytest.raises(EngineError, match="out of memory"):
        generated(worker, make_microbatch(worker.config))


# --- weights ---


def weights_of(worker: Any, change: float) -> dict[str, torch.Tensor]:
    """The base's weights, all changed a little: enough to be seen."""
    folder = Path(worker.model.folder) / "transformer"
    (file,) = folder.glob("*.safetensors")
    return {name: tensor * (1 + change) for name, tensor in load_file(file).items()}


def test_weights_are_taken_and_taken_back_bit_for_bit(made: Make, make_microbatch: Make, tmp_path: Path) -> None:
    worker = made()
    microbatch, path = make_microbatch(worker.config), tmp_path / "weights.safetensors"
    pictures = [generated(worker, microbatch)[1]]
    for version, change in ((1, 0.1), (2, 0.0)):
        save_file(weights_of(worker, change), path)
        worker.load_weights(path, version)
        pictures.append(generated(worker, microbatch, version)[1])
    assert not torch.equal(pictures[0], pictures[1])
    assert torch.equal(pictures[0], pictures[2])


def test_new_weights_wait_for_the_running_batch_and_not_for_the_waiting_one(made: Make, make_microbatch: Make) -> None:
    """Never two versions inside one trajectory (TCSS)."""
    worker = made("generator.batch_size=4")
    engine, microbatch = worker.engine._engine, make_microbatch(worker.config)
    old = generated(worker, microbatch)[1]
    held = worker.engine._portal.call(new_event)
    engine.hold, found = held, []
    thread = threading.Thread(target=lambda: found.append(worker.sampler.rollout(microbatch, range(8))[1]))
    thread.start()
    update = threading.Thread(target=worker._give, args=(weights_of(worker, 0.1), 1))
    while not (engine.log and engine.log[-1] == "batch of 4" and len(engine.log) > 3):
        assert thread.is_alive()
    update.start()
    while not engine.calls:
        assert update.is_alive()
    worker.engine._portal.call(held.set)
    update.join()
    thread.join()
    engine.hold = None
    new = generated(worker, microbatch, 1)[1]
    assert torch.equal(found[0][:4], old[:4])
    assert torch.equal(found[0][4:], old[4:]) or torch.equal(found[0][4:], new[4:])
    assert not torch.equal(old, new)


def new_event() -> Any:
    import asyncio

    return asyncio.Event()


def test_a_wrong_name_ends_the_engine_before_anything_is_loaded(made: Make, make_microbatch: Make) -> None:
    worker = made()
    tensors = weights_of(worker, 0.1)
    tensors["transformer_blocks.0.attn.to_z.weight"] = tensors.pop("transformer_blocks.0.attn.to_q.weight")
    with pytest.raises(SyncError, match=r"no place for 1 tensors: transformer_blocks\.0\.attn\.to_z\.weight"):
        worker._give(tensors, 1)
    with pytest.raises(RuntimeError, match="version"):
        generated(worker, make_microbatch(worker.config))
    worker.version = 1
    with pytest.raises(EngineError, match="the engine has ended: its weights could not be loaded"):
        generated(worker, make_microbatch(worker.config), 1)


def test_half_of_an_update_is_fatal(made: Make) -> None:
    worker = made()
    tensors = weights_of(worker, 0.1)
    name = max(name for name, tensor in tensors.items() if tensor.ndim == 2)
    with pytest.raises(SyncError, match="weights could not be loaded"):
        worker._give({**tensors, name: tensors[name][:1, :1]}, 1)
    worker = made()
    with pytest.raises(SyncError, match=f"1 of {len(tensors)} parameters were not given: {name}"):
        worker._give({key: tensor for key, tensor in tensors.items() if key != name}, 1)


def test_a_tensor_that_the_engine_leaves_out_silently_is_found(made: Make) -> None:
    worker = made()
    worker.engine._engine.worker.model_runner.pipeline.skips = ("transformer_blocks.0.attn.to_k.weight",)
    with pytest.raises(SyncError, match=r"1 parameters are not what was given: .*attn\.to_qkv\.weight"):
        worker._give(weights_of(worker, 0.1), 1)


def test_packed_and_renamed_parameters_have_the_names_that_diffusers_gives_them(made: Make) -> None:
    worker = made()
    transformer = worker.engine._engine.worker.model_runner.pipeline.transformer
    names = [name for name, _ in transformer.named_parameters()]
    pipeline = worker.engine._engine.worker.model_runner.pipeline
    found = list(places(names, pipeline.packed, pipeline.renamed))
    assert {theirs for theirs, _ in found} == trainable(worker.model.transformer).keys()
    assert len(found) > len(names)


def test_an_update_in_pieces_is_whole_when_all_have_come() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    given = {name: tensor.detach() + 1 for name, tensor in module.named_parameters()}
    update = Update(3, module, lambda named: [dict(module.named_parameters())[n].copy_(t) for n, t in named], {})
    for name, tensor in given.items():
        with pytest.raises(SyncError, match="were not given"):
            update.finish()
        update.take({name: tensor})
    assert update.finish() == {"version": 3, "tensors": 2, "parameters": 2}


# --- what can be had ---


def test_without_the_extra_the_way_to_get_it_is_said_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom digen.errors import ConfigError\nfrom digen.presets import resolve\n"
        "from importlib import util\nfind = util.find_spec\n"
        "import digen.plugins as p\np.find_spec = lambda n, *a: None if n.startswith('vllm') else find(n, *a)\n"
        "try:\n    resolve('flowgrpo', 'glyph', None, ['generator.backend=vllm-omni'], {})\n"
        "except ConfigError as error:\n    print(error)\n"
        "print(sorted({'torch', 'vllm', 'vllm_omni', 'diffusers'} & set(sys.modules)))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "generator 'vllm-omni' needs vllm_omni: pip install 'digen[vllm]'" in said
    assert said.endswith("[]\n")


@pytest.mark.skipif(find_spec("vllm_omni") is not None, reason="the extra is installed here")
def test_asking_for_it_without_the_extra_imports_nothing_that_takes_a_second() -> None:
    """So it answers in under a second: 0.9 s of processor time on busy cores. A test cannot count on a clock."""
    words = [sys.executable, "-X", "importtime", "-m", "digen", "run", "flowgrpo", "--generator", "vllm-omni"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "generator 'vllm-omni' needs vllm_omni: pip install 'digen[vllm]'" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pydantic" in imported
    assert not imported & {"torch", "diffusers", "transformers", "vllm"}


def test_digen_itself_never_imports_vllm() -> None:
    """Not with the backends, nor with this one, nor by whatever else this process has imported until now."""
    for backend in ("vllm_omni", "diffusers"):
        importlib.import_module(f"digen.backends.generation.{backend}")
    assert not [name for name in sys.modules if name.startswith("vllm")]


@pytest.mark.parametrize(
    ("found", "said"),
    [(None, "which is not installed"), ("0.31.0", "got vllm 0.31.0"), ("0.3", "got vllm 0.3")],
)
def test_other_versions_of_the_engine_are_refused(
    found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = plugins.find("generators", BACKEND)
    sys.modules[kind.__module__].install()
    monkeypatch.setattr(preflight, "_installed", lambda package: found)
    with pytest.raises(ConfigError, match=rf"generator 'vllm-omni' needs vllm 0\.30, {said}: pip install 'digen\[vl"):
        preflight.check_packages("generators", "vllm-omni")
    monkeypatch.setattr(preflight, "_installed", lambda package: "0.30.2")
    preflight.check_packages("generators", "vllm-omni")


@pytest.mark.parametrize(
    ("model", "setting", "said"),
    [
        ("tiny-hunyuan-video", "steps=1", "no pipeline of its own in the engine; allowed: .* or --generator diffusers"),
        ("tiny-z-image", "steps=1", "not adapted to the engine; allowed: qwen-image, .* or --generator diffusers"),
        ("glyph", "engine.name=inline", "needs engine.name=process, got inline: a process can hold one engine"),
        ("glyph", "weights.transport=collective", "allowed: shared_memory, safetensors"),
        ("glyph", "generator.dtype=float64", "allowed: float32, bfloat16"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_what_can(model: str, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve("flowgrpo", model, None, ["generator.backend=vllm-omni", setting], {})


def test_log_probs_of_another_backend_are_replayed_unless_settings_say_otherwise() -> None:
    def asked(*settings: str) -> str:
        found = resolve("flowgrpo", "glyph", None, ["schedule.assist=none", *settings], {})
        return str(found.algorithm.old_log_prob)

    backend = f"generator.backend={BACKEND}"
    assert asked() == "rollout"
    assert asked(backend) == "replay"
    assert asked(backend, "algorithm.old_log_prob=rollout") == "rollout"
    assert asked(backend, "schedule.staleness=0.5") == "rollout"
    assert asked(backend, "trainer.updates_per_rollout=2", "steps=2") == "rollout"


# --- digen check-backends ---


def checked(name: str, out: Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["check-backends", "--generator", f"{STANDIN}:{name}", "--out", str(out), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_backends_that_agree_pass_before_and_after_an_update(tmp_path: Path) -> None:
    code, found = checked("Generator", tmp_path / "both.png")
    assert (code, found["ok"]) == (0, True)
    assert {(row["weights"], row["what"]) for row in found["differences"]} >= {
        (weights, what)
        for weights in ("loaded", "synced")
        for what in ("final latents", "pixels", "noisy latents", "replayed log-prob")
    }
    assert (tmp_path / "both.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"), [("OtherNoise", {"noisy latents"}), ("OtherWeight", {"final latents", "noisy latents"})]
)
def test_one_disturbed_noise_or_weight_fails(name: str, what: set[str], tmp_path: Path) -> None:
    code, found = checked(name, tmp_path / "both.png")
    assert (code, found["ok"]) == (1, False)
    assert {row["what"] for row in found["differences"] if not row["ok"]} >= what


# --- a whole run ---


@pytest.mark.slow
def test_a_run_on_the_engine_trains_as_one_on_diffusers(warm: Any, tmp_path: Path) -> None:
    engine = f"{Path(__file__).parent}/warm.py:WarmEngine"
    weights = []
    for backend in (BACKEND, "diffusers"):
        folder = tmp_path / str(len(weights))
        words = [
            "run", "flowgrpo", "--engine", engine, "--generator", backend, "--steps", "2", "--run-dir", str(folder),
            "--reward", "jpeg-incompressibility", *SMALL, "data.prompts_per_step=2", "generator.replicas=2",
            "algorithm.old_log_prob=replay", "observe.grid_every=0",
        ]  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        weights.append(load_file(next(folder.glob("checkpoints/*2/weights.safetensors"))))
    for name, tensor in weights[1].items():
        assert (weights[0][name] - tensor).norm() <= 1e-4 * tensor.norm(), name
