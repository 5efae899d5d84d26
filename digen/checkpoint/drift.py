"""Which settings may differ between the two halves of a run.

Invariant: a setting that is not known to leave the results alone counts as one that changes them; such a change is
refused unless it is allowed by name. A moved prompt file with the same content is no change, an edited one is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from digen import schema
from digen.config import RunConfig
from digen.errors import ConfigError, one_of
from digen.presets import payload
from digen.settings import Keys, from_file, merge

FREE: Final = frozenset(
    {
        *("checkpoint", "engine", "observe", "run_dir", "schedule", "steps", "epochs", "model.embedding_cache_gb"),
        *("data.heldout", "eval_reward", "sampling.eval_num_steps", "sampling.eval_guidance"),
        *("scoring.timeout_s", "scoring.devices"),
        *(f"{group}.{key}" for group in ("generator", "trainer") for key in ("ranks", "devices", "threads", "env")),
        *("generator.replicas", "generator.batch_size", "trainer.batch_size", "trainer.tsp", "trainer.backend"),
        *("generator.min_replicas", "generator.offload_between_calls", "generator.node", "trainer.node"),
        "generator.tensor_parallel",
        *("weights.transport", "weights.dir", "weights.timeout_s"),
        *("trainer.zero_stage", "trainer.cpu_offload", "trainer.max_bad_steps", "trainer.shard_ranks"),
        *("trainer.activation_checkpointing", "trainer.sync_gradients", "trainer.generate_with"),
        *("trainer.log_prob_gap", "trainer.on_log_prob_gap"),
    }
)
"""Keys, and sections of keys, that decide where and when work is done: results then differ by rounding at most."""
STALE: Final = frozenset({"schedule.staleness"})
WHEN_STALE: Final = frozenset({"schedule.window", "schedule.prompts_per_microbatch"})
"""Not free, although their section is: which samples are stale (TCSS) changes results."""
PROMPTS: Final = "data.prompts"


def refuse_drift(
    made_by: str, config: RunConfig[Any], changed: Collection[str], allowed: Collection[str], where: str
) -> list[str]:
    """The changes, as sentences, that are allowed by name. Raises ConfigError listing those that are not.

    `made_by`: the configuration, as YAML, of what is resumed; `changed`: keys of which something else than their value
    is known to have changed; `where`: what is resumed, for the message.
    """
    old: dict[str, Any] = merge({}, from_file(made_by, where), ())
    new = payload(config)
    found = dict(_changes(old, new))
    found |= {key: f"{key}: what it stands for is not what it was" for key in changed}
    known = {schema.dotted(path) for path in (*schema.keys(type(config)), *_leaves(old), *_leaves(new))}
    for name in allowed:
        if name not in known:
            raise ConfigError(one_of("--allow-change", name, known))
    refused = [text for key, text in found.items() if not _covered(key, allowed)]
    if refused:
        count = "1 setting differs" if len(refused) == 1 else f"{len(refused)} settings differ"
        raise ConfigError(
            "\n".join(
                [
                    f"{count} from what {where} was made with, and would change the results:",
                    *(f"  {text}" for text in refused),
                    "Set it back, allow it by name (--allow-change KEY), or begin a new run with --init-from RUN.",
                ]
            )
        )
    return list(found.values())


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, sentence) of every change that is not free; keys that a later version of digen added are left out."""
    free = FREE - ({"schedule"} if _stale(old) or _stale(new) else set())
    paths = dict.fromkeys([*_leaves(old), *(path for path in _leaves(new) if path[0] == "reward")])
    for path in paths:
        key, was, now = schema.dotted(path), _dig(old, path), _dig(new, path)
        if was == now or key == PROMPTS:
            continue
        stale = key in STALE or (key in WHEN_STALE and "schedule" not in free)
        if stale or not _covered(key, FREE):
            yield key, f"{key}: {schema.shown(now)}, was {schema.shown(was)}"


def _stale(tree: Mapping[str, Any]) -> bool:
    return bool(_dig(tree, ("schedule", "staleness")))


def _covered(key: str, names: Collection[str]) -> bool:
    """Whether the key or a section that it is in is among the names."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _leaves(tree: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key)


def _dig(tree: Any, path: Keys) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
