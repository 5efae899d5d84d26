"""`digen reward serve`: the command line of the reward service. What is heavy is imported when it is asked for.

Invariant: nobody outside this machine can ask unless `--host` says so.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from digen.errors import ConfigError

if TYPE_CHECKING:
    from digen.rewards.base import RewardSet

app = typer.Typer(help="Serve a reward to runs elsewhere.", no_args_is_help=True)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback()
def _root() -> None: ...


@app.command()
def serve(
    name: Annotated[str, typer.Argument(help="Reward: a name from `digen list`, or path.py:name.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of waiting requests that are scored together.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all if not given.")] = None,
    token_env: Annotated[str | None, typer.Option(metavar="NAME", help="Variable with the token to ask for.")] = None,
    debug: Debug = False,
) -> None:
    """Score for the reward `remote` of other processes, until it is interrupted."""
    from digen.cli import _reported

    with _reported(debug):
        from digen.config import RewardTerm, ScoringConfig
        from digen.rewards.base import RewardSet
        from digen.settings import from_overrides

        token = os.environ.get(token_env, "") if token_env else ""
        if token_env and not token:
            raise ConfigError(f"--token-env: environment variable {token_env} is not set")
        settings = from_overrides(options or ())
        if nested := [".".join(s.path) for s in settings if len(s.path) > 1]:
            raise ConfigError(f"got {nested[0]}=...; allowed: OPTION=VALUE, with an option of {name}")
        term = RewardTerm.model_validate({s.path[0]: s.value for s in settings})
        rewards = RewardSet({name: term}, ScoringConfig().timeout_s, threads or os.cpu_count() or 1)
        rewards.check()
        _serve(name, rewards, host, port, batch_size, token)


def _serve(name: str, rewards: RewardSet, host: str, port: int, batch_size: int, token: str) -> None:
    """Load, listen, say where, score. Raises ConfigError when the packages are missing or the address is taken."""
    try:
        from digen.rewards.service import Service, server

        service = Service(name, rewards, batch_size, token)
        http, bound = server(service, host, port)
    except ImportError as error:
        raise ConfigError(f"digen reward serve needs {error.name}: pip install 'digen[serve]'") from error
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from error
    rewards.load()
    where = f"[{host}]" if ":" in host else host
    typer.echo(f"{name} at http://{where}:{bound.getsockname()[1]}")
    with suppress(KeyboardInterrupt):
        http.run(sockets=[bound])
