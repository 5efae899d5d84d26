"""Are the weights here? Asked before anything is started, and answered with the command that gets them.

Invariant: neither torch nor a model is imported, and nothing is downloaded: what a run needs is fetched once, on
purpose, not by every rank at the same time. The hub's cache is where its own variables (HF_HOME, HF_HUB_CACHE) say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from digen import plugins
from digen.config import ModelConfig
from digen.errors import ConfigError

_WITHOUT_WEIGHTS = ("scheduler", "tokenizer")


def check_weights(model: ModelConfig) -> None:
    """Look for every part of a model in its folder or in the hub's cache. Raises ConfigError with what is missing.

    A plugin that says nothing of its weights (`default_path`, `folders`) is not asked for them.
    """
    path = model.path or plugins.attribute("models", model.name, "default_path")
    parts = plugins.attribute("models", model.name, "folders")
    if not isinstance(path, str) or not path or not isinstance(parts, tuple):
        return
    local = Path(path).expanduser()
    if local.is_dir():
        if missing := missing_parts(local, parts):
            raise ConfigError(f"model.path: {local} is not complete; missing or without its weights: {_named(missing)}")
        return
    folder = cached(path)
    missing = missing_parts(folder, parts) if folder else list(parts)
    if missing:
        raise ConfigError(_report(model, path, parts, missing))


def check_packages(kind: plugins.Kind, name: str) -> None:
    """Look for what a plugin says that it needs: `packages` (distribution, version's beginning), `extra`.

    Raises ConfigError naming what is installed and what gets the right one.
    """
    needed, extra = (plugins.attribute(kind, name, key) for key in ("packages", "extra"))
    for package, wanted in needed if isinstance(needed, tuple) else ():
        found = _installed(package)
        if found is None or not f"{found}.".startswith(f"{wanted}."):
            got = f"got {package} {found}" if found else "which is not installed"
            needs = f"{kind.removesuffix('s')} {name!r} needs {package} {wanted}"
            raise ConfigError(f"{needs}, {got}: pip install 'digen[{extra}]'")


def _installed(package: str) -> str | None:
    """Version of a distribution; builds for CPUs may have a name of their own."""
    for name in (package, f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def missing_parts(folder: Path, parts: Sequence[str]) -> list[str]:
    """Parts of a diffusers folder that are not there, or whose weights are not all there."""
    return [part for part in parts if not _is_whole(folder / part, weights=not part.startswith(_WITHOUT_WEIGHTS))]


def _is_whole(part: Path, *, weights: bool) -> bool:
    if not part.is_dir() or not any(part.iterdir()):
        return False
    if not weights:
        return True
    files = list(_weight_files(part))
    return (part / "config.json").is_file() and bool(files) and all(file.is_file() for file in files)


def _weight_files(part: Path) -> Iterator[Path]:
    """Those that are there; with an index, all that it lists."""
    for index in part.glob("*.safetensors.index.json"):
        listed = json.loads(index.read_text("utf-8"))["weight_map"].values()
        yield from (part / name for name in sorted(set(listed)))
    yield from part.glob("*.safetensors")


def cached(repository: str) -> Path | None:
    """The folder of a hub repository that was downloaded before; None: it was not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _report(model: ModelConfig, path: str, parts: Sequence[str], missing: Sequence[str]) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    patterns = " ".join(f"--include '{pattern}'" for pattern in ("model_index.json", *(f"{part}/*" for part in parts)))
    lines = [
        f"the weights of {model.name} are not on this machine",
        f"  looked for  {path} in {HF_HUB_CACHE} (HF_HOME or HF_HUB_CACHE moves it)",
        f"  missing     {_named(missing)}",
        f"  get them    hf download {path} {patterns}",
    ]
    if plugins.attribute("models", model.name, "gated"):
        from huggingface_hub import get_token

        login = " (a token is here)" if get_token() else ", then `hf auth login`: there is no token here"
        lines.append(f"  licence     accept it at https://huggingface.co/{path}{login}")
    lines.append("  or          model.path=FOLDER, where they are in diffusers' format")
    return "\n".join(lines)


def _named(parts: Sequence[str]) -> str:
    return ", ".join(parts)
