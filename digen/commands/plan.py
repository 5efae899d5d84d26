"""`digen plan`: the time of a step from costs, or the memory of a run from its settings. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from digen.errors import ConfigError


def plan(
    algorithm: Annotated[
        str | None, typer.Argument(help="Plan the memory of such a run; without, the time of a step from costs.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    model: Annotated[str | None, typer.Option(help="Memory: the model; glyph if nothing else says.")] = None,
    config: Annotated[Path | None, typer.Option(help="Memory: YAML file with settings, e.g. a run's config.")] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Memory: place the run on so many devices; as it is configured if not given.")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Memory: gigabytes of each device, e.g. 80.")] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE_OR_RUN", help="Costs: a YAML or JSON file, or the folder of a run.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    generate: Annotated[float | None, typer.Option(help="Seconds of a generator for a micro-batch.")] = None,
    assist: Annotated[float | None, typer.Option(help="Seconds of the trainer to generate one.")] = None,
    update: Annotated[float | None, typer.Option(help="Seconds of the trainer to update on one, with TSP.")] = None,
    update_unstacked: Annotated[float | None, typer.Option(help="The same without TSP.")] = None,
    score: Annotated[float | None, typer.Option(help="Seconds of a generator to score one.")] = None,
    sync: Annotated[float | None, typer.Option(help="Seconds of the optimizer step and of publishing.")] = None,
    pull: Annotated[float | None, typer.Option(help="Seconds of a generator to load new weights.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Generators.")] = None,
    slower: Annotated[
        str | None, typer.Option(metavar="K,K,...", help="How many times as long each generator takes.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Global steps; 8 if nothing else says.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a micro-batch; 16 if nothing else says.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="schedule.max_in_flight")] = None,
    staleness: Annotated[float | None, typer.Option(help="Of tcss; 0.5 if nothing else says.")] = None,
    measured_on: Annotated[
        str | None, typer.Option(metavar="G:T", help="Generator and trainer devices that the costs are for.")
    ] = None,
    split: Annotated[bool, typer.Option("--split", help="Compare all splits of the devices.")] = False,
    devices: Annotated[
        str | None,
        typer.Option(metavar="N|G:T", help="To split; all alike, or of two kinds. Those of the costs if not given."),
    ] = None,
    gantt: Annotated[str | None, typer.Option(metavar="MODE", help="Mode to draw; the fastest if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Predict the time of a step in every mode from costs or a finished run; or the memory of a run. Loads nothing."""
    from digen.cli import _reported

    words = {
        "microbatches": microbatches, "samples": samples, "replicas": replicas, "slower": slower, "steps": steps,
        "generate": generate, "assist": assist, "update": update, "update_unstacked": update_unstacked,
        "score": score, "sync": sync, "pull": pull,
        "max_in_flight": max_in_flight, "staleness": staleness, "measured_on": measured_on,
    }  # fmt: skip
    about_time = {**words, "costs": costs, "devices": devices, "gantt": gantt, "split": split or None}
    about_memory = {"model": model, "config": config, "gpus": gpus, "gpu_memory": gpu_memory}
    with _reported(debug):
        if algorithm is None:
            _refuse(about_memory, "needs an ALGORITHM: digen plan flowgrpo --model qwen-image --gpus 32")
            _plan_time(costs, words, split, devices, gantt, as_json)
        else:
            _refuse(about_time, "is about the time of a step, which is planned without an ALGORITHM")
            _plan_memory(algorithm, model, config, overrides or [], gpus, gpu_memory, as_json)


def _refuse(flags: Mapping[str, Any], reason: str) -> None:
    for name in (name for name, value in flags.items() if value is not None):
        raise ConfigError(f"--{name.replace('_', '-')} {reason}")


def _plan_time(
    costs: Path | None,
    words: Mapping[str, Any],
    split: bool,
    devices: str | None,
    gantt: str | None,
    as_json: bool,
) -> None:
    from digen.cli import _console, _emit
    from digen.plan import plan as make
    from digen.workload import read

    made = make(read(costs, words), split=split, devices=None if devices is None else _devices(devices))
    if as_json:
        _emit(made.as_json())
        return
    from digen.observe.planned import show_plan

    show_plan(made, _console(stderr=False), made.mode(gantt) if gantt else made.fastest)


def _devices(text: str) -> int | tuple[int, int]:
    """`8`, or `8:4` of two kinds."""
    counts = text.split(":")
    if not all(count.isdecimal() for count in counts) or len(counts) > 2:
        raise ConfigError(f"--devices: got {text!r}; allowed: a whole number, or two of them as in 8:4 (two kinds)")
    first, *second = map(int, counts)
    return (first, second[0]) if second else first


def _plan_memory(
    algorithm: str,
    model: str | None,
    config: Path | None,
    overrides: list[str],
    gpus: int | None,
    gpu_memory: float | None,
    as_json: bool,
) -> None:
    from digen.cli import _console, _emit
    from digen.memory.placement import check_devices
    from digen.presets import resolve

    resolved = resolve(algorithm, model, config, overrides, os.environ)
    memory = None if gpu_memory is None else gpu_memory * 1e9
    check_devices(resolved, gpus, memory)
    from digen.memory.planner import plan_memory
    from digen.memory.show import show_memory

    made = plan_memory(resolved, gpus, memory, {text.partition("=")[0] for text in overrides})
    if as_json:
        _emit(made.as_json())
    else:
        show_memory(made, _console(stderr=False))
