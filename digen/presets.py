"""From everything that a user sets to one valid run: default < preset < file < environment < command line.

Invariant: whatever is wrong (unknown key, value, plugin, file, impossible combination) is said here, all of it at once,
each with key, value, what is allowed and where it was set, before any model, backend or torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from pydantic import ValidationError

from digen import plugins, schema
from digen.algos.base import Algorithm
from digen.config import ModelConfig, RunConfig, TrainerConfig
from digen.data.sampler import StepPrompts
from digen.data.sources import Sources
from digen.errors import ConfigError, DataError, PluginError
from digen.rewards.base import RewardSet
from digen.schedule import tag
from digen.settings import (
    Keys,
    Setting,
    Tree,
    dump_yaml,
    from_environment,
    from_file,
    from_overrides,
    from_tree,
    merge,
    source,
    without_other_types,
)

FALLBACK = "flowgrpo"
"""An algorithm without presets of its own takes this one's, but for their `algorithm` section."""
NAME: Final = ("algorithm", "name")
"""In files the algorithm's plugin name, as on the command line, whatever its class calls itself."""
MODEL: Final = ("model", "name")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
"""`owner/name`; a folder of that shape is written with `./` before it."""
NAMES: Mapping[Keys, plugins.Kind] = {
    MODEL: "models",
    ("generator", "backend"): "generators",
    ("trainer", "backend"): "trainers",
    ("engine", "name"): "engines",
    ("weights", "transport"): "transports",
}
"""Keys that hold the name of a plugin."""
BUNDLED = {"prompts": "train.txt", "heldout": "heldout.txt"}
"""Names in the folder `prompts` beside a model plugin's source."""


def presets() -> dict[tuple[str, str], Path]:
    """(algorithm, model) -> file, of every preset that comes with digen."""
    package = Path(__file__).parent
    folder = next(p for p in (package / "configs", package.parent / "configs") if p.is_dir())  # wheel, checkout
    return {(path.parent.name, path.stem): path for path in sorted(folder.glob("*/*.yaml"))}


def resolve(
    algorithm: str, model: str | None, file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> RunConfig[Any]:
    """The run that these settings describe. Raises ConfigError with one line for each problem.

    `algorithm` is a plugin's name or `path.py:Name`; `model` stands for the override `model.name`; overrides are
    `section.key=value`. The preset is that of the model that the highest layer names.
    """
    kind = _run_type(algorithm)
    named = [Setting(MODEL, model, "command line")] if model else []
    above = [_read(file) if file else [], from_environment(environ), named + from_overrides(overrides)]
    known = schema.keys(kind)
    below = [_defaults(kind), _preset(algorithm, above), _meant_by_name(kind, algorithm)]
    below.insert(1, _replayed([*below, *above]))
    layers = _without_older_assist([*below, *above])
    settings = [s for layer in without_other_types(layers, schema.type_keys(known)) for s in layer]
    tree = merge({}, [s for s in settings if s.path != NAME], schema.open_keys(known))
    return _validate(kind, tree, settings, _other_algorithm(algorithm, settings))


def for_model(model: str) -> RunConfig[Any]:
    """A model with its preset's settings where it has one, to sample with: nothing that training needs is looked for.

    Raises PluginError when there is no such model.
    """
    plugins.target("models", model)
    kind = _run_type(FALLBACK)
    named, some = [Setting(MODEL, model, "command line")], [Setting(("steps",), 1, "default")]
    known = schema.keys(kind)
    layers = without_other_types([_defaults(kind), some, _preset(FALLBACK, [named]), named], schema.type_keys(known))
    return kind.model_validate(merge({}, [s for layer in layers for s in layer], schema.open_keys(known)))


def load(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = MappingProxyType({})
) -> RunConfig[Any]:
    """The run of a file written with `dump`: the file itself says which algorithm it is for."""
    return resolve(algorithm_of(path), None, path, overrides, environ)


def algorithm_of(path: Path) -> str:
    """The algorithm that a file written with `dump` is for."""
    names = [s.value for s in _read(path) if s.path == NAME]
    if not names:
        raise ConfigError(f"{path}: algorithm.name is missing; allowed: an algorithm of `digen list` or path.py:Name")
    return str(names[-1])


def dump(config: RunConfig[Any]) -> str:
    """YAML text with every key, which gives the same run when it is fed back with `--config`."""
    return dump_yaml(payload(config))


def payload(config: RunConfig[Any]) -> Tree:
    """A run as plain data, for a worker process or a file; `rebuild` is the way back."""
    tree = config.model_dump(mode="json")
    where = plugins.origin(type(config.algorithm))
    tree["algorithm"]["name"] = plugins.installed_name("algorithms", where) or where
    return tree


def rebuild(values: Mapping[str, Any]) -> RunConfig[Any]:
    """The run of what `payload` made, in another process; its plugins and files have been checked where it was made."""
    algorithm = dict(values["algorithm"])
    return _run_type(algorithm.pop("name")).model_validate({**values, "algorithm": algorithm})


def prompt_file(config: RunConfig[Any], which: Literal["prompts", "heldout"]) -> Path:
    """What `data.prompts` or `data.heldout` names, or the model's bundled file. ConfigError when there is none.

    `data.prompts` may name several: `prompt_sources`.
    """
    name: str | None = getattr(config.data, which)
    if name is not None:
        return Path(name).expanduser()
    bundled = plugins.folder("models", config.model.name) / "prompts" / BUNDLED[which]
    if not bundled.is_file():
        raise ConfigError(f"data.{which}: must be set, model {config.model.name!r} brings no prompts of its own")
    return bundled


def prompt_sources(config: RunConfig[Any]) -> Sources:
    """Where the training prompts come from. Raises ConfigError when that is nowhere."""
    named = config.data.prompts
    if not isinstance(named, Mapping):
        return Sources({prompt_file(config, "prompts"): 1.0}, config.data.column)
    return Sources({Path(name).expanduser(): share for name, share in named.items()}, config.data.column)


def step_prompts(config: RunConfig[Any]) -> StepPrompts:
    """The training prompts of every global step. Raises ConfigError or DataError."""
    data = config.data
    return prompt_sources(config).step_prompts(data.prompts_per_step, shuffle=data.shuffle, seed=config.seed)


def derived(config: RunConfig[Any]) -> dict[str, int]:
    """What follows from the settings: counts of a global step and of the run. A forward is one row of latents."""
    algorithm, per_step, prompts = config.algorithm, config.data.prompts_per_step, step_prompts(config)
    trained = algorithm.steps.num_trained(config.sampling.num_steps)
    samples, kept = per_step * algorithm.samples_per_prompt, per_step * algorithm.kept_per_prompt()
    embedded = plugins.attribute("models", config.model.name, "embeds_guidance")
    guided = 2 if config.sampling.guidance > 1 and not embedded else 1
    passes = 1 + algorithm.loss.needs_reference
    renoised = trained if algorithm.noise.forward_process else 0
    steps_per_epoch = prompts.steps_per_epoch
    limits = [config.steps, config.epochs and config.epochs * steps_per_epoch]
    steps, per_rollout = min(limit for limit in limits if limit is not None), config.trainer.updates_per_rollout
    return {
        "prompts": len(prompts.prompts),
        "groups_per_step": per_step,
        "samples_per_step": samples,
        "trained_samples_per_step": kept,
        "microbatches_per_step": ceil(per_step / config.schedule.prompts_per_microbatch),
        "denoising_steps": config.sampling.num_steps,
        "trained_timesteps_per_sample": trained,
        "rollout_forwards_per_step": samples * (config.sampling.num_steps + renoised) * guided,
        "update_forwards_per_step": kept * trained * guided * passes,
        "optimizer_steps_per_step": 1,
        "steps_per_rollout": per_rollout,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps - steps % per_rollout,
    }


def _run_type(algorithm: str) -> type[RunConfig[Any]]:
    """`RunConfig[X]` of an algorithm plugin."""
    found = plugins.find("algorithms", algorithm)
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise ConfigError(f"algorithm {algorithm!r} is no subclass of digen.algos.base.Algorithm, got {found!r}")
    return cast("type[RunConfig[Any]]", RunConfig.__class_getitem__(found))


def _defaults(kind: type[RunConfig[Any]]) -> list[Setting]:
    algorithm = kind.model_fields["algorithm"].annotation
    assert isinstance(algorithm, type)
    tree = {"algorithm": schema.defaults(algorithm), **schema.defaults(kind)}
    return [s for s in from_tree(tree, "default") if s.path != NAME]


def _meant_by_name(kind: type[RunConfig[Any]], algorithm: str) -> list[Setting]:
    """What an algorithm's name says of other sections than its own."""
    found = kind.model_fields["algorithm"].annotation
    assert isinstance(found, type)
    assert issubclass(found, Algorithm)
    scales = ("guidance", "eval_guidance") if found.without_guidance else ()
    return [Setting(("sampling", key), 1.0, f"algorithm {algorithm}") for key in scales]


def _replayed(layers: Sequence[Sequence[Setting]]) -> list[Setting]:
    """Log-probs of another forward pass than the trainer's own are replayed, unless settings say otherwise.

    They cannot be where the trainer no longer has the weights that made a sample.
    """
    named = {s.path: s.value for layer in layers for s in layer}
    backend, staleness = named.get(("generator", "backend")), named.get(("schedule", "staleness"))
    off_policy = str(staleness) not in ("0", "0.0") or str(named.get(("trainer", "updates_per_rollout"))) != "1"
    if backend == "diffusers" or not isinstance(backend, str) or off_policy:
        return []
    try:
        own = plugins.attribute("generators", backend, "trainers_forward") is not False
    except PluginError:  # reported with all the others
        own = True
    return [] if own else [Setting(("algorithm", "old_log_prob"), "replay", f"generator {backend}")]


def _read(file: Path) -> list[Setting]:
    try:
        return from_file(file.read_text("utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(f"configuration file {file} cannot be read: {reason}") from error


def _preset(algorithm: str, above: Sequence[Sequence[Setting]]) -> list[Setting]:
    """The preset of the model that the highest layer names; of the default model when there is no such model at all."""
    known, default = presets(), ModelConfig().name
    model = next((str(s.value) for layer in reversed(above) for s in reversed(layer) if s.path == MODEL), default)
    if ":" not in model and model not in {p.name for p in plugins.available("models")}:
        model = default
    name = next((a for a in (algorithm, FALLBACK) if (a, model) in known), None)
    if name is None:
        return []
    settings = from_file(known[name, model].read_text("utf-8"), f"configs/{name}/{model}.yaml")
    return [s for s in settings if name == algorithm or s.path[0] != "algorithm"]


def _without_older_assist(layers: Sequence[list[Setting]]) -> list[list[Setting]]:
    """Whoever sets mode, TAG policy or order means it: `schedule.assist` of the layers below gives way."""
    rivals = {("schedule", key) for key in ("mode", "tag", "ordered")}
    top = max(k for k, layer in enumerate(layers) if k == 0 or any(s.path in rivals for s in layer))
    return [
        [s for s in layer if s.path != ("schedule", "assist")] if 0 < k < top else layer
        for k, layer in enumerate(layers)
    ]


def _other_algorithm(algorithm: str, settings: Sequence[Setting]) -> Iterator[tuple[Keys, str]]:
    """A file for another algorithm is refused, not bent to this one."""
    where = plugins.target("algorithms", algorithm)
    for given in (s.value for s in settings if s.path == NAME):
        if given != algorithm and (plugins.target("algorithms", str(given)) != where):
            yield NAME, f"{schema.dotted(NAME)}: got {given!r}, but the run is for {algorithm!r}"


def _validate(
    kind: type[RunConfig[Any]], tree: Tree, settings: Sequence[Setting], problems: Iterable[tuple[Keys, str]]
) -> RunConfig[Any]:
    """One way out: a run without problems, or all problems at once."""
    known = schema.keys(kind)
    found = [*problems, *schema.flags_for_numbers(tree, known).items()]
    config = None
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path, texts = schema.lines(details, tree, known)
            found += [(path, text) for text in texts]
    found += [*_missing_plugins(tree), *_missing_files(tree)]
    if config is not None and not found:
        found += _misfits(config)
    lines = list(dict.fromkeys(_with_source(text, path, settings, known) for path, text in found))
    if config is None or lines:
        raise ConfigError(lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} problems:", *lines]))
    return config


def _with_source(text: str, path: Keys, settings: Sequence[Setting], known: Collection[Keys]) -> str:
    """A problem and where it was set; the key that the sentence begins with is more exact than the checked one."""
    begins = tuple(text.partition("=")[0].partition(":")[0].split("."))
    path = begins if begins in known else path
    return f"{text} ({source(settings, path)})" if path else text


def _missing_plugins(tree: Tree) -> Iterator[tuple[Keys, str]]:
    """Plugins that are unknown or cannot be imported; values of a wrong type have been reported already."""
    asked = [(path, kind, _dig(tree, path)) for path, kind in NAMES.items()]
    for key in ("reward", "eval_reward"):
        terms = tree.get(key)
        for name, term in terms.items() if isinstance(terms, dict) else ():
            plugin = term.get("plugin") if isinstance(term, dict) else None
            asked.append(((key, name, "plugin") if plugin else (key, name), "rewards", plugin or name))
    for path, kind, name in asked:
        try:
            if isinstance(name, str):
                plugins.target(kind, name)
        except PluginError as error:
            yield path, f"{schema.dotted(path)}: {error}"


def _missing_files(tree: Tree) -> Iterator[tuple[Keys, str]]:
    """Files and folders that do not exist; better now than in a worker while the others wait."""
    for path in (("data", "prompts"), ("data", "heldout")):
        named = _dig(tree, path)
        for name in named if isinstance(named, dict) else [named]:
            if isinstance(name, str) and not Path(name).expanduser().exists():
                yield path, f"{schema.dotted(path)}: file {Path(name).absolute()} does not exist"
    name = _dig(tree, ("model", "path"))
    if isinstance(name, str) and not HUB_ID.fullmatch(name) and not Path(name).expanduser().is_dir():
        yield ("model", "path"), f"model.path: folder {Path(name).absolute()} does not exist"


def _misfits(config: RunConfig[Any]) -> Iterator[tuple[Keys, str]]:
    """What each section alone cannot know."""
    yield from _caught(("algorithm", "steps"), lambda: config.algorithm.steps.check(config.sampling.num_steps))
    yield from _caught(("schedule", "tag"), lambda: tag.parse(config.schedule.tag))
    yield from _caught(("data", "prompts"), lambda: step_prompts(config))
    for key, terms in (("reward", config.reward), ("eval_reward", config.eval_reward)):
        yield from _caught((key,), RewardSet(terms, config.scoring.timeout_s, 1, key=key).check)
    yield from _caught(("schedule", "assist"), lambda: _check_helpers(config))
    yield from _caught(("sampling", "guidance"), lambda: _check_guidance(config))
    yield from _caught(("trainer", "optimizer"), lambda: _check_optimizer(config.trainer))
    per_step, per_microbatch = config.data.prompts_per_step, config.schedule.prompts_per_microbatch
    if per_microbatch > per_step:
        path = ("schedule", "prompts_per_microbatch")
        yield path, f"{schema.dotted(path)}: got {per_microbatch}; allowed: 1 to data.prompts_per_step={per_step}"
    least = min(per_microbatch / per_step, 1.0)
    if 0 < config.schedule.staleness < least:
        path = ("schedule", "staleness")
        got = config.schedule.staleness
        yield path, f"{schema.dotted(path)}: got {got}, less than one micro-batch; allowed: 0, or {least:.3g} to 1"


def _check_guidance(config: RunConfig[Any]) -> None:
    """What is embedded costs no forward that could be left out, and the model expects it."""
    model, scale = config.model.name, config.sampling.guidance
    if config.algorithm.without_guidance and plugins.attribute("models", model, "embeds_guidance"):
        raise ConfigError(
            f"sampling.guidance={scale:g}: model {model!r} embeds guidance, so there is no forward to leave out as "
            f"{config.algorithm.name} does; allowed with it: flowgrpo"
        )


def _check_helpers(config: RunConfig[Any]) -> None:
    """Only a generator with autograd can help. The built-in one is known; others are looked at, which imports them."""
    assist, backend = config.schedule.assist, config.generator.backend
    if not config.schedule.generators_help or backend == "diffusers":
        return
    if not hasattr(plugins.find("generators", backend), "hand_gradients"):
        reason = "it has no `accumulate` and `hand_gradients`; allowed: none, trainer"
        raise ConfigError(f"schedule.assist={assist}: generator {backend!r} cannot compute gradients, {reason}")


def _check_optimizer(trainer: TrainerConfig) -> None:
    package = trainer.needs_package
    if package and find_spec(package) is None:
        raise ConfigError(
            f"trainer.optimizer={trainer.optimizer} needs {package} (for trainer.backend={trainer.backend}), which is "
            f"not installed: pip install 'digen[8bit]'; allowed without it: adamw, sgd"
        )


def _caught(path: Keys, check: Callable[[], object]) -> Iterator[tuple[Keys, str]]:
    try:
        check()
    except (ConfigError, DataError) as error:
        yield path, str(error)


def _dig(tree: Tree, path: Keys) -> Any:
    value: Any = tree
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
