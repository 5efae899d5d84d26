"""Rewards: the function that scores samples, and the set of them that a run uses (paper section 3.3, scoring).

Invariant (rule R17): a score that could not be had is NaN, never a number; `RewardSet.score` answers within its time
limit whatever a reward does; and options are checked before anything heavy is loaded, where there is no torch.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from digen.config import RewardTerm
from digen.errors import ConfigError, PluginError, RewardError, one_of
from digen.plugins import find

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from digen.rewards.judge_server import ModelServer

log = logging.getLogger(__name__)


class RewardFn(Protocol):
    """Scores K samples. A plain function is one; so is an instance of a class with `__call__`.

    A class is constructed with the options of its term (`reward.<name>.<option>`) and must not load anything then. It
    may have `check()`, called before anything is loaded, which raises ConfigError; `missing()`, which says what must be
    downloaded, or None; `served_by`, the server that the run must start, or None; and `load()`, called once in the
    worker. A function's options are its parameters after the third.
    """

    def __call__(
        self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]], /
    ) -> Sequence[float]:
        """One score per sample, higher is better; None or a non-finite number where there is none.

        `media`: RGB 0..255, read-only, (K, height, width, 3) for images and (K, frames, height, width, 3) for video.
        `prompts`, `metadata`: K entries, as they are in the prompt file.
        """
        ...


class RewardSet:
    """The rewards of a run, inside one worker. Each call of a reward has its own thread, so that several overlap.

    `threads` is the number of CPU threads, and `device` the torch device, for rewards that have an option of that name
    and leave it unset. `key`: where the terms stand in the config.
    """

    def __init__(
        self,
        terms: Mapping[str, RewardTerm],
        timeout_s: float,
        threads: int = 1,
        device: str | None = None,
        key: str = "reward",
    ) -> None:
        self._terms, self._key = terms, key
        self._given = {"threads": threads, "device": device}
        self._timeout_s = timeout_s
        self._rewards: dict[str, RewardFn] = {}
        self._running = {name: threading.Lock() for name in terms}

    def check(self) -> None:
        """Find and construct every reward, without loading one. Raises PluginError or ConfigError, naming the key."""
        for name, term in self._terms.items():
            if name not in self._rewards:
                self._rewards[name] = _build(
                    f"{self._key}.{name}", term.plugin or name, term.model_extra or {}, self._given
                )

    def missing(self) -> list[str]:
        """What must be downloaded before the rewards can be loaded, as sentences that say how. Downloads nothing."""
        self.check()
        asked = (getattr(reward, "missing", None) for reward in self._rewards.values())
        return [sentence for ask in asked if ask and (sentence := ask())]

    def servers(self) -> dict[str, ModelServer]:
        """What the run must start before the rewards can be loaded (their `served_by`), by the name of the reward."""
        self.check()
        found = {name: getattr(reward, "served_by", None) for name, reward in self._rewards.items()}
        return {name: server for name, server in found.items() if server is not None}

    def load(self) -> None:
        """Load what the rewards need. Call it once, in the worker that scores."""
        self.check()
        for reward in self._rewards.values():
            if load := getattr(reward, "load", None):
                load()

    def score(
        self, media: NDArray[np.uint8], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> dict[str, tuple[float, ...]]:
        """Raw values of every reward, K each; NaN where it failed (logged once per call, with the cause).

        Raises RewardError when the media are not as `RewardFn` promises, or when what a reward returns is not K
        numbers: that is a mistake in a program, which repeating cannot cure.
        """
        if len(self._rewards) < len(self._terms):
            raise RuntimeError("RewardSet.score was called before load")
        _check_media(media, prompts, metadata)
        shared = media.view()
        shared.flags.writeable = False
        calls = {name: self._start(name, shared, prompts, metadata) for name in self._rewards}
        wait(calls.values(), timeout=self._timeout_s)
        return {name: self._values(name, call, prompts) for name, call in calls.items()}

    def _start(
        self, name: str, media: NDArray[np.uint8], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Future[object]:
        answer: Future[object] = Future()

        def run() -> None:
            # One call at a time per reward. After the caller's time limit a waiting call gives up: none pile up.
            if not self._running[name].acquire(timeout=self._timeout_s):
                return
            try:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self._rewards[name](media, list(prompts), list(metadata)))
            except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; the caller gets it
                answer.set_exception(error)
            finally:
                self._running[name].release()

        # A daemon: Python cannot end a stuck thread, and it must not keep the process from exiting.
        threading.Thread(target=run, name=f"reward-{name}", daemon=True).start()
        return answer

    def _values(self, name: str, call: Future[object], prompts: Sequence[str]) -> tuple[float, ...]:
        if not call.done():
            call.cancel()
            return _all_failed(name, prompts, f"no answer within {self._timeout_s:g} s")
        if error := call.exception():
            return _all_failed(name, prompts, f"{type(error).__name__}: {error}", error)
        values = _numbers(f"reward {name!r} ({_label(self._rewards[name])})", call.result(), len(prompts))
        failed = [k for k, value in enumerate(values) if math.isnan(value)]
        if failed:
            log.warning(
                "reward %r has no finite score for %d of %d samples; the first is sample %d, prompt %r",
                name, len(failed), len(values), failed[0], prompts[failed[0]],
            )  # fmt: skip
        return values


def _all_failed(name: str, prompts: Sequence[str], cause: str, error: BaseException | None = None) -> tuple[float, ...]:
    log.warning(
        "reward %r failed for %d samples (the first prompt is %r): %s",
        name,
        len(prompts),
        prompts[0],
        cause,
        exc_info=error,
    )
    return (math.nan,) * len(prompts)


def _check_media(media: NDArray[np.uint8], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
    if str(media.dtype) != "uint8" or media.ndim not in {4, 5} or media.shape[-1] != 3:
        raise RewardError(
            "media to score must be uint8 (K, height, width, 3) or (K, frames, height, width, 3); "
            f"got {media.dtype} {media.shape}"
        )
    if not len(media) == len(prompts) == len(metadata) > 0:
        raise RewardError(
            f"got {len(media)} samples, {len(prompts)} prompts and {len(metadata)} rows of metadata to score"
        )


def _label(reward: object) -> str:
    function = reward.func if isinstance(reward, partial) else reward
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _numbers(what: str, result: object, count: int) -> tuple[float, ...]:
    """What a reward returned as `count` floats; None and non-finite become NaN. RewardError for anything else."""
    expected = f"{what} must return {count} numbers, one per sample"
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise RewardError(f"{expected}; got {type(result).__name__} {_short(result)}")
    if len(result) != count:
        raise RewardError(f"{expected}; got {len(result)}: {_short(result)}")
    return tuple(_number(expected, k, value) for k, value in enumerate(result))


def _number(expected: str, index: int, value: object) -> float:
    if hasattr(value, "tolist"):  # a scalar of an array or tensor library
        value = value.tolist()
    if value is None:
        return math.nan
    if not isinstance(value, Real):
        raise RewardError(f"{expected}; got {type(value).__name__} {_short(value)} for sample {index}")
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- From a name and options to a reward ---


def _build(key: str, name: str, options: Mapping[str, object], given: Mapping[str, object]) -> RewardFn:
    plugin: Any = find("rewards", name)
    if not callable(plugin):
        raise PluginError(f"reward {name!r} must be a class or a function; got {type(plugin).__name__}")
    parameters = _option_parameters(plugin)
    unset = {option: value for option, value in given.items() if option in parameters and value is not None}
    values = _checked_options(key, plugin, parameters, {**unset, **options})
    try:
        reward = plugin(**values) if inspect.isclass(plugin) else partial(plugin, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error
    _check_callable(name, reward)
    if check := getattr(reward, "check", None):
        check()
    return cast("RewardFn", reward)


def _option_parameters(plugin: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """What the config can set: a constructor's parameters, or a function's after media, prompts and metadata."""
    parameters = inspect.signature(plugin).parameters
    names = list(parameters) if inspect.isclass(plugin) else list(parameters)[3:]
    return {name: parameters[name] for name in names if parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL}


def _checked_options(
    key: str, plugin: Callable[..., object], parameters: Mapping[str, inspect.Parameter], options: Mapping[str, object]
) -> dict[str, object]:
    hints = _hints(plugin)
    named = {option for option, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    empty = inspect.Parameter.empty
    if missing := [option for option in named if parameters[option].default is empty and option not in options]:
        raise ConfigError(f"{key}.{min(missing)} is required")
    if unknown := [option for option in options if option not in named and len(named) == len(parameters)]:
        raise ConfigError(one_of(f"{key}.{unknown[0]}: unknown option", unknown[0], named))
    return {
        option: _checked_option(f"{key}.{option}", hints.get(option, Any), value) for option, value in options.items()
    }


def _checked_option(path: str, hint: Any, value: object) -> object:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{path}: {problem}; got {value!r}") from error
    except PydanticUserError as error:
        raise ConfigError(f"{path}: a value of type {hint} cannot come from a config") from error


def _hints(plugin: Callable[..., object]) -> dict[str, Any]:
    function = plugin.__init__ if inspect.isclass(plugin) else plugin
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # names imported for type checkers only, or a callable without annotations
        return {}


def _check_callable(name: str, reward: object) -> None:
    """It must take (media, prompts, metadata) and must not be asynchronous."""
    if not callable(reward):
        raise PluginError(
            f"reward {name!r}: class {type(reward).__qualname__} has no __call__(media, prompts, metadata)"
        )
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise PluginError(f"reward {name!r} is async; make it a plain function: it runs in its own thread")
    signature = inspect.signature(reward)
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise PluginError(
            f"reward {name!r} must take (media, prompts, metadata); got {_label(reward)}{signature}: {error}"
        ) from error
