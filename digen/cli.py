"""The command line. Everything heavy is imported inside the command that needs it.

Invariant: `digen --help` imports neither torch nor a backend; with `--json`, stdout holds exactly one JSON object; a
problem on the user's side is one readable block on stderr and the exit code of its error, never a traceback.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import digen
from digen import reward_command
from digen.commands.check_backends import check_backends
from digen.commands.doctor import doctor
from digen.commands.new import new
from digen.commands.plan import plan
from digen.errors import ConfigError, DigenError

if TYPE_CHECKING:
    from rich.console import Console

    from digen.trained import Kind

app = typer.Typer(
    name="digen",
    help=digen.__doc__,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(reward_command.app, name="reward")
app.command("check-backends")(check_backends)
app.command()(doctor)
app.command()(new)
app.command()(plan)


def main() -> None:
    """Entry point of the `digen` command. SIGTERM unwinds it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()


def _installed(kind: Any) -> list[str]:
    """Names for shell completion."""
    from digen import plugins

    return [p.name for p in plugins.available(kind)]


Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Weights = Annotated[
    str | None, typer.Option(metavar="live|ema", help="Which trained weights; the average (ema) where there is one.")
]

Algorithm = Annotated[
    str | None,
    typer.Argument(help="Name from `digen list`, or path.py:Name.", autocompletion=lambda: _installed("algorithms")),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")]
Model = Annotated[
    str | None, typer.Option(help="Model; glyph if nothing else says.", autocompletion=lambda: _installed("models"))
]
ConfigFile = Annotated[Path | None, typer.Option(help="YAML file with settings, e.g. a run's config.yaml.")]
Rewards = Annotated[list[str] | None, typer.Option(help="Reward, instead of those set; repeatable.")]
CostsOf = Annotated[Path | None, typer.Option(metavar="RUN", help="Start with the costs that another run measured.")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run, from its newest checkpoint.")]
AllowChange = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="With --resume: a setting that may change the results; repeatable."),
]
InitFrom = Annotated[Path | None, typer.Option(metavar="RUN", help="Start a new run from the weights of another.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the resolved settings and counts, run nothing.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"digen {digen.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None: ...


@app.command()
def run(
    algorithm: Algorithm = None,
    overrides: Overrides = None,
    model: Model = None,
    config: ConfigFile = None,
    generator: Annotated[str | None, typer.Option(help="generator.backend")] = None,
    trainer: Annotated[str | None, typer.Option(help="trainer.backend")] = None,
    engine: Annotated[str | None, typer.Option(help="engine.name")] = None,
    address: Annotated[str | None, typer.Option(help="engine.address")] = None,
    reward: Rewards = None,
    steps: Annotated[int | None, typer.Option(help="steps")] = None,
    seed: Annotated[int | None, typer.Option(help="seed")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="run_dir")] = None,
    costs: CostsOf = None,
    resume: Resume = None,
    allow_change: AllowChange = None,
    init_from: InitFrom = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model with reinforcement learning."""
    flags: dict[str, Any] = {
        "generator.backend": generator,
        "trainer.backend": trainer,
        "engine.name": engine,
        "engine.address": address,
        "steps": steps,
        "seed": seed,
        "run_dir": run_dir,
        "checkpoint.init_from": init_from,
        "reward": {name: {} for name in reward} if reward else None,
    }
    with _reported(debug):
        settings = [f"{key}={_quoted(value)}" for key, value in flags.items() if value is not None]
        words = [word for word in (algorithm, *(overrides or ())) if word is not None]
        if resume:
            given = {"--config": config, "--run-dir": run_dir, "--init-from": init_from}
            resolved = _resumed(resume, words, settings, [name for name, value in given.items() if value is not None])
        else:
            resolved = _resolved(algorithm, model, config, [*settings, *words[1:]])
        known = None
        if costs:
            from digen.run import known_costs

            known = known_costs(resolved, costs)
        if dry_run:
            _show_plan(resolved, as_json)
            return
        from digen.run import run as start

        allowed = None if resume is None else allow_change or ()
        summary = start(resolved, console=_console(stderr=as_json), costs=known, resume=allowed)
        if as_json:
            _emit(summary.as_dict())


@app.command("eval")
def evaluate(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or of an export.", exists=True, file_okay=False)
    ],
    weights: Weights = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a trained model with its base model on held-out prompts."""
    with _reported(debug):
        from digen.evaluate import evaluate as start

        report = start(run_dir, _kind(weights), console=_console(stderr=as_json))
        if as_json:
            _emit(report.as_dict())


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", exists=True, file_okay=False)],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="New or empty folder.")],
    weights: Weights = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="N", help="Weights after N steps; the newest checkpoint if not given.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write trained weights as diffusers loads them: a LoRA file or a transformer, with a model card."""
    with _reported(debug):
        from digen.export import export as start

        made = start(run_dir, to, _kind(weights), checkpoint)
        if as_json:
            _emit(made.as_dict())
        else:
            typer.echo(f"{made.path}: {made.format}, {made.weights} weights of {made.checkpoint}")


@app.command()
def sample(
    run_or_model: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run or of an export, or a model's name.")
    ],
    prompt: Annotated[list[str], typer.Option(help="What to draw; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path("samples"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; the model's own if not given.")] = None,
    weights: Weights = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw images with a trained or a base model."""
    with _reported(debug):
        from digen.evaluate import sample as start

        console = _console(stderr=True)
        paths = [str(path) for path in start(run_or_model, prompt, out, seed, num_steps, _kind(weights), console)]
        if as_json:
            _emit({"images": paths})
        else:
            typer.echo("\n".join(paths))


@app.command()
def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", exists=True, file_okay=False)],
    out: Annotated[Path | None, typer.Option(help="Folder for trace.json, trace.html and trace.png; RUN.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where the time of a run went: a lane per worker, its bubbles and their causes."""
    with _reported(debug):
        from digen.observe.trace import write_trace

        written = write_trace(run_dir, out)
        if as_json:
            _emit(written.as_dict())
        else:
            typer.echo("\n".join([*written.timeline.facts(), *map(str, written.paths)]))


@app.command("list")
def list_plugins(as_json: Json = False, debug: Debug = False) -> None:
    """Show the installed plugins of every kind: algorithms, models, backends, rewards, ..., and where each is from."""
    with _reported(debug):
        from digen import plugins

        found = {kind: plugins.available(kind) for kind in plugins.KINDS}
        if as_json:
            _emit({kind: [p._asdict() for p in members] for kind, members in found.items()})
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("kind", "name", "what it is", "from"):
            table.add_column(title, overflow="fold")
        for kind, members in found.items():
            for k, plugin in enumerate(members):
                what = Text(f"broken: {plugin.problem}", "red") if plugin.problem else Text(plugin.summary)
                table.add_row("" if k else kind, Text(plugin.name), what, Text(plugin.source))
        _console(stderr=False).print(table)


def _kind(weights: str | None) -> Kind | None:
    from digen.trained import kind_of

    return None if weights is None else kind_of(weights)


def _resolved(algorithm: str | None, model: str | None, config: Path | None, settings: Sequence[str]) -> Any:
    """The settings of a new run."""
    from digen.presets import resolve

    if algorithm is None:
        raise ConfigError("got no ALGORITHM; allowed: a name from `digen list` or path.py:Name, or --resume RUN")
    return resolve(algorithm, model, config, settings, os.environ)


def _resumed(run_dir: Path, words: Sequence[str], settings: Sequence[str], given: Sequence[str]) -> Any:
    """The settings of a run that goes on: its own, then the environment's, then those of the command line."""
    from digen.observe.files import RunFolder
    from digen.presets import algorithm_of, load

    if given:
        raise ConfigError(f"{given[0]} cannot be used with --resume, which goes on in the run's folder and settings")
    file = RunFolder.open(run_dir).config
    name = algorithm_of(file)
    here = [word for word in words[:1] if "=" not in word]
    if here and here != [name]:
        raise ConfigError(f"got {here[0]!r}, but {run_dir} is a run of {name!r}; leave it out")
    return load(file, [*settings, *words[len(here) :], f"run_dir={_quoted(run_dir)}"], os.environ)


def _quoted(value: object) -> str:
    """A flag's value as a setting's text: texts are quoted, so that they stay texts."""
    return json.dumps(str(value) if isinstance(value, Path) else value)


def _show_plan(config: Any, as_json: bool) -> None:
    """The resolved settings, in a form that `--config` reads, and the counts that follow from them."""
    from digen.presets import derived, dump, payload

    if as_json:
        _emit({"config": payload(config), "derived": derived(config)})
        return
    counts = "".join(f"# {name.replace('_', ' ')}: {count}\n" for name, count in derived(config).items())
    typer.echo(f"{dump(config)}\n{counts}", nl=False)


def _emit(document: Mapping[str, Any]) -> None:
    """One JSON object; a number that JSON does not have (a reward that never came) is null."""
    typer.echo(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn an error of ours into one block on stderr and its exit code, an interrupt into 130."""
    try:
        yield
    except DigenError as error:
        if debug:
            traceback.print_exc()
        _show_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def _show_error(error: DigenError) -> None:
    console = _console(stderr=True)
    if not console.is_terminal:
        typer.echo(f"error: {error}", err=True)
        return
    from rich.panel import Panel
    from rich.text import Text

    console.print(Panel(Text(str(error)), title=type(error).__name__, title_align="left", border_style="red"))
