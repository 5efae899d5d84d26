"""What docs/security.md promises: nothing is unpickled or evaluated, names stay in their folder, secrets stay out."""

import ast
import base64
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import digen
from digen import presets
from digen.checkpoint import manifest
from digen.conflicts import SECRET
from digen.errors import CheckpointError, ConfigError
from digen.rewards import wire
from digen.rewards.http import Endpoint, Limits
from digen.settings import from_file

SOURCE = Path(digen.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNNING = {"eval", "exec", "compile", "__import__"}
LOADING = {"torch.load", "np.load", "yaml.unsafe_load", "yaml.full_load"}
OWN_CHILDREN = "engines"
"""Where calls and answers are pickled: between the driver and processes that it started, over sockets of their own."""


def calls(file: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_nothing_is_unpickled_but_what_the_driver_and_its_own_processes_say_to_each_other() -> None:
    found = {file.relative_to(SOURCE).parts[0] for file in FILES if imported(file) & UNPICKLING}
    assert found == {OWN_CHILDREN}


def test_nothing_is_evaluated_and_no_shell_is_asked() -> None:
    for file in FILES:
        for call in calls(file):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            assert name not in RUNNING, f"{file}:{call.lineno}"
            keywords = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
            assert not keywords.get("shell"), f"{file}:{call.lineno}"
            assert not keywords.get("trust_remote_code"), f"{file}:{call.lineno}"


def test_torch_files_are_not_loaded_and_yaml_makes_plain_values_only() -> None:
    for file in FILES:
        for call in calls(file):
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                name = f"{call.func.value.id}.{call.func.attr}"
                assert name not in LOADING, f"{file}:{call.lineno}"
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        from_file("run_dir: !!python/object/apply:os.getcwd []", "config.yaml")


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/../../b"])
def test_a_checkpoint_lists_files_of_its_own_folder_alone(name: str, tmp_path: Path) -> None:
    record = {"name": name, "nbytes": 1, "sha256": "0" * 64}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": [record]}))
    with pytest.raises(CheckpointError, match="is no file in"):
        manifest.check(tmp_path)


def huge_png(side: int) -> bytes:
    """A small file that claims to be a picture of side x side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def test_pictures_that_unpack_to_more_than_the_limit_are_refused_before_they_are_unpacked() -> None:
    frames = [base64.b64encode(huge_png(8000)).decode()] * 5
    sent = wire.SentSample.model_validate({"id": "x", "prompt": "p", "frames": frames, "video": True})
    with pytest.raises(ValueError, match=r"sample x: 320000000 pixels; allowed: 268435456"):
        wire.pixels(sent)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "my_secret")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "KEYBOARD")),
    ],
)
def test_secrets_are_refused_where_they_would_be_written_down(name: str, secret: bool) -> None:
    assert bool(SECRET.search(name)) == secret
    if secret:
        with pytest.raises(ConfigError, match=rf"generator\.env\.{name} looks like a secret") as caught:
            presets.resolve("flowgrpo", "glyph", None, [f"generator.env={{{name}: hunter2}}"], {})
        assert "hunter2" not in str(caught.value)


def test_a_url_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="token_env") as caught:
        Endpoint("https://me:hunter2@example.org/v1", Limits())
    assert "hunter2" not in str(caught.value)


def test_a_token_is_named_in_the_settings_and_never_in_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGEN_TEST_TOKEN", "hunter2")
    reward = "reward={remote: {url: 'http://127.0.0.1:8100', token_env: DIGEN_TEST_TOKEN}}"
    config = presets.resolve("flowgrpo", "glyph", None, [reward], {})
    written = presets.dump(config) + json.dumps(presets.payload(config), default=str)
    assert "DIGEN_TEST_TOKEN" in written
    assert "hunter2" not in written


def test_no_library_tells_anybody_that_it_is_used(tmp_path: Path) -> None:
    """onnxruntime shows it: where it reports, it keeps a file about itself in the folder for temporary files."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", *digen.SILENCED)}
    code = "import digen, onnxruntime, os; print(*(os.environ[name] for name in digen.SILENCED))"
    command = [sys.executable, "-c", code]
    given = {**environment, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCE.parent)}
    said = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1"] * len(digen.SILENCED)
    assert list(tmp_path.iterdir()) == []
