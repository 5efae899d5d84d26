"""Servers that a run starts for its judge: real processes, which answer, die, hang and refuse to go."""

import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from rich.console import Console

from digen import presets
from digen.config import RewardTerm
from digen.doctor import diagnose_settings
from digen.errors import ConfigError, RewardError
from digen.evaluate import evaluate
from digen.observe.files import read_rows
from digen.rewards import judge_server
from digen.rewards.base import RewardSet
from digen.rewards.judge import Judge
from digen.rewards.judge_server import ModelServer, Serve, check_devices, held_port, serving
from digen.run import check_rewards, run

STAND_IN = [sys.executable, "-I", str(Path(__file__).parent / "judge_stand_in.py")]
MEDIA: NDArray[np.uint8] = np.stack([np.full((8, 8, 3), 40 * k, np.uint8) for k in (1, 2, 3)])
LIMIT_S = 60.0
"""After which a test gives up on what must happen; usually it takes a small part of a second."""

Terms = Mapping[str, RewardTerm]


class Living:
    """Tells when every process is gone that a stand-in has started."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._file, self._said = path, os.open(path, os.O_RDONLY | os.O_NONBLOCK), b""

    def pids(self) -> list[list[int]]:
        """Of the server and its child, for each start; waits for the first."""
        while b"\n" not in self._said:
            self._said += self._read()
        return [[int(pid) for pid in line.split()] for line in self._said.splitlines()]

    def wait_until_gone(self) -> None:
        os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))  # it ends, even if nobody else has opened it
        while said := self._read():
            self._said += said
        os.close(self._file)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._file], [], [], LIMIT_S)
        assert ready, "a process lives on"
        return os.read(self._file, 4096)


@pytest.fixture(autouse=True)
def all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hides some here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def living(tmp_path: Path) -> Living:
    return Living(tmp_path / "fifo")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks as if there were a model in it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def options(model: Path, *args: str | Path | int, fifo: Living | None = None, **serve: Any) -> dict[str, Any]:
    words = [word if isinstance(word, int) else str(word) for word in args]
    words += ["--fifo", str(fifo.path)] if fifo else []
    return {"model": str(model), "retries": 0, "serve": {"command": STAND_IN, "args": words, **serve}}


def judged(model: Path, *args: str | Path, fifo: Living | None = None, **serve: Any) -> dict[str, RewardTerm]:
    return {"judge": RewardTerm.model_validate(options(model, *args, fifo=fifo, **serve))}


def during(
    terms: Terms, logs: Path, use: Callable[[Terms, list[str]], Awaitable[object]], backend: str = "asyncio"
) -> list[str]:
    """Do this while the servers are up. What was noted."""
    notes: list[str] = []

    async def main() -> None:
        with anyio.fail_after(LIMIT_S):
            async with serving(terms, logs, notes.append) as found:
                await use(found, notes)

    anyio.run(main, backend=backend)
    return notes


async def nothing(*_: object) -> None: ...


async def scores(terms: Terms) -> tuple[float, ...]:
    """What a worker gets."""
    rewards = RewardSet(terms, LIMIT_S)
    await anyio.to_thread.run_sync(rewards.load)
    return (await anyio.to_thread.run_sync(rewards.score, MEDIA, ["p"] * 3, [{}] * 3))["judge"]


async def answered(terms: Terms) -> int:
    """How many of three questions, whether or not the server is there."""
    judge = Judge(**{name: value for name, value in (terms["judge"].model_extra or {}).items() if name != "serve"})
    return sum(value is not None for value in await anyio.to_thread.run_sync(judge, MEDIA, ["p"] * 3, [{}] * 3))


# --- it is there when it is wanted, and gone afterwards ---


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_server_answers_in_the_block_and_ends_with_it(
    backend: str, model: Path, living: Living, tmp_path: Path
) -> None:
    async def use(terms: Terms, _: object) -> None:
        assert (terms["judge"].model_extra or {})["url"].startswith("http://127.0.0.1:")
        found = await scores(terms)
        assert len(set(found)) > 1
        assert all(0 <= value <= 1 for value in found)

    notes = during(judged(model, fifo=living, devices="cuda:3"), tmp_path / "logs", use, backend)
    living.wait_until_gone()
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name == "judge-server.log"
    assert log.read_text() == f"serving {model} on devices '3'\n"
    assert notes == [f"waiting for the server of reward 'judge'; it writes to {log}"]


@pytest.mark.slow
def test_rewards_that_want_the_same_server_share_it_and_others_have_their_own(model: Path, tmp_path: Path) -> None:
    terms = {
        "taste": {**options(model), "plugin": "judge"},
        "text": {**options(model), "plugin": "judge", "mode": "text"},
        "other": {**options(model, "--after", "1"), "plugin": "judge"},
        "small": {"plugin": "jpeg-compressibility"},
    }

    async def use(terms: Terms, _: object) -> None:
        urls = {name: (term.model_extra or {}).get("url") for name, term in terms.items()}
        assert urls["taste"] == urls["text"] != urls["other"]
        assert urls["small"] is None
        assert list(terms) == ["taste", "text", "other", "small"]

    during({name: RewardTerm.model_validate(term) for name, term in terms.items()}, tmp_path, use)
    assert {path.name for path in tmp_path.glob("*.log")} == {"taste-server.log", "other-server.log"}


def test_without_such_a_reward_nothing_happens(tmp_path: Path) -> None:
    terms = {"judge": RewardTerm.model_validate({"url": "http://x", "model": "m"}), "ocr": RewardTerm()}

    async def use(found: Terms, _: object) -> None:
        assert found == terms

    assert not during(terms, tmp_path / "logs", use)
    assert not (tmp_path / "logs").exists()


def test_a_held_port_is_given_to_nobody_but_a_server_that_asks_for_it() -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError) as error:  # noqa: PT011
            other.bind(("127.0.0.1", port))
        assert error.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", port)) as server:  # as servers do, with SO_REUSEADDR
            socket.create_connection(server.getsockname()).close()


# --- it does not come up ---


def test_a_server_that_ends_before_it_answers_is_an_error_with_the_end_of_its_log(
    model: Path, living: Living, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match="server of reward 'judge' ended with exit code 1") as error:
        during(judged(model, "--fault", "dies early", fifo=living), tmp_path, nothing)
    assert str(error.value).endswith("\n    no room for the weights")
    living.wait_until_gone()


def test_the_error_of_a_server_that_says_much_when_it_dies_has_what_failed_first(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"OutOfMemoryError: no room\n    \(server\)[^$]*see the cause above$"
    ) as error:
        during(judged(model, "--fault", "dies at length"), tmp_path, nothing)
    assert len(str(error.value).splitlines()) == 1 + 1 + judge_server.LAST_LINES


def test_a_server_that_does_not_answer_in_time_is_an_error_and_is_ended(
    model: Path, living: Living, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match=r"server of reward 'judge' did not answer within 0.3 s; "):
        during(judged(model, "--fault", "never listens", fifo=living, ready_s=0.3), tmp_path, nothing)
    living.wait_until_gone()


def test_a_program_that_cannot_be_run_is_told_by_its_name(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    term = {"model": str(model), "serve": {"command": [str(program)]}}
    with pytest.raises(RewardError, match=r"exit code 127; the end of .*:\n    .*not-a-program: "):
        during({"judge": RewardTerm.model_validate(term)}, tmp_path, nothing)


def test_waiting_for_a_server_can_be_cancelled(model: Path, living: Living, tmp_path: Path) -> None:
    async def wait() -> None:
        async with serving(judged(model, "--fault", "never listens", fifo=living), tmp_path, [].append):
            pytest.fail("it is not up")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.to_thread.run_sync(living.pids)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    living.wait_until_gone()


# --- however the run ends, so does the server ---


def test_what_the_block_raises_leaves_as_it_is_and_the_server_ends(model: Path, living: Living, tmp_path: Path) -> None:
    async def use(*_: object) -> None:
        living.pids()
        raise KeyError("of the run")

    with pytest.raises(KeyError, match="of the run"):
        during(judged(model, fifo=living), tmp_path, use)
    living.wait_until_gone()


def test_a_server_that_does_not_go_when_it_is_told_to_is_killed_with_its_children(
    model: Path, living: Living, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_server, "GRACE_S", 0.2)

    async def use(*_: object) -> None:
        living.pids()

    during(judged(model, "--fault", "stays", fifo=living), tmp_path, use)
    living.wait_until_gone()


def test_no_server_outlives_a_run_that_is_killed(model: Path, living: Living, tmp_path: Path) -> None:
    reward = json.dumps({"judge": options(model, "--fault", "never listens", fifo=living)})
    words = ["-m", "digen", "run", "flowgrpo", f"run_dir={tmp_path}/run", "engine.name=inline", f"reward={reward}"]
    driver = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    living.pids()
    driver.kill()
    driver.wait()
    living.wait_until_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel ends a child with its parent")
def test_a_server_whose_keeper_is_killed_ends_and_is_started_again(model: Path, living: Living, tmp_path: Path) -> None:
    async def use(terms: Terms, notes: list[str]) -> None:
        ((server, child),) = living.pids()
        file = os.pidfd_open(server)
        os.kill(psutil.Process(server).ppid(), signal.SIGKILL)
        await anyio.wait_readable(file)
        os.close(file)
        os.kill(child, signal.SIGKILL)
        while len(notes) < 2:  # noqa: ASYNC110 - a list tells nobody
            await anyio.sleep(0.01)

    notes = during(judged(model, fifo=living), tmp_path, use)
    assert "server of reward 'judge' was killed by SIGKILL and is started again (3 more times at most)" in notes[1]
    living.wait_until_gone()


# --- it dies in between ---


@pytest.mark.slow
def test_a_server_that_dies_is_started_again_at_the_same_address(model: Path, living: Living, tmp_path: Path) -> None:
    async def use(terms: Terms, notes: list[str]) -> None:
        assert all(map(math.isnan, await scores(terms)))
        while await answered(terms) < 3:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)
        assert len(notes) == 2

    terms = judged(model, "--fault", "dies", "--once", tmp_path / "once", fifo=living)
    notes = during(terms, tmp_path / "logs", use)
    assert "ended with exit code 3 and is started again (3 more times at most); the end of" in notes[1]
    assert notes[1].endswith("\n    out of memory")
    living.wait_until_gone()
    assert len(living.pids()) == 2


def test_a_server_that_dies_again_and_again_is_given_up_and_has_no_wrong_score(
    model: Path, living: Living, tmp_path: Path
) -> None:
    async def use(terms: Terms, notes: list[str]) -> None:
        while "not started again; its scores fail" not in notes[-1]:
            assert not await answered(terms)
            await anyio.sleep(0.02)
        assert not await answered(terms)

    notes = during(judged(model, "--fault", "dies", fifo=living), tmp_path, use)
    assert len(notes) == 1 + 1 + judge_server.RESTARTS
    living.wait_until_gone()


# --- what cannot be is said before anything is started ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "http://x"}, "reward.judge: url is required, or serve=true .* got both or neither"),
        ({"serve": False}, "reward.judge: url is required, or serve=true .* got both or neither"),
        (
            {"serve": {"device": "cuda:1"}},
            "reward.judge.serve: Extra inputs are not permitted; got {'device'",
        ),
        ({"serve": {"devices": "gpu"}}, "reward.judge.serve: String should match pattern"),
        ({"serve": {"command": ["no-such-program"]}}, "judge: serve needs the program 'no-such-program', which is not"),
        ({"serve": {"devices": "cuda:2", "command": STAND_IN}}, "devices=cuda:2: CUDA_VISIBLE_DEVICES=5,7 has 2"),
        ({"model": "nobody/nothing"}, "the weights of judge are not on this machine"),
        ({"model": "."}, "judge: model=. is not complete; missing: config.json, .*safetensors"),
    ],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    make_config: Callable[..., Any],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.chdir(tmp_path)
    config = make_config()
    term = RewardTerm.model_validate({**options(model), **changes})
    with pytest.raises(ConfigError, match=message):
        check_rewards(config.model_copy(update={"reward": {"judge": term}}))


@pytest.mark.parametrize(
    ("devices", "visible", "own"),
    [
        ("cpu", None, ""),
        ("cpu", "4,5", ""),
        ("cuda:1", None, "1"),
        ("cuda:0-2", None, "0,1,2"),
        ("cuda:1", "4, 6", "6"),
    ],
)
def test_a_server_sees_its_own_devices_alone_of_those_that_the_run_sees(
    devices: str, visible: str | None, own: str
) -> None:
    server = ModelServer("m", Serve(devices=devices))
    environ = {"A": "b"} if visible is None else {"A": "b", "CUDA_VISIBLE_DEVICES": visible}
    assert server.environment(environ) == {"A": "b", "CUDA_VISIBLE_DEVICES": own}


def test_several_devices_are_one_tensor_parallel_group_and_arguments_come_last() -> None:
    server = ModelServer("m", Serve(devices="cuda:0-3", command=("x", "y"), args=("--seed", "1")))
    assert " ".join(server.command(80)) == "x y m --host 127.0.0.1 --port 80 --tensor-parallel-size 4 --seed 1"


def test_a_device_is_not_shared_unless_it_is_said_how(make_config: Callable[..., Any]) -> None:
    def server(devices: str, *args: str) -> ModelServer:
        return ModelServer("m", Serve(devices=devices, args=args))

    config = make_config(
        "trainer.backend=fsdp", "trainer.devices=cuda:0-1", "trainer.ranks=2", "generator.devices=cuda:2"
    )
    with pytest.raises(ConfigError, match=r"reward.a.serve.devices=cuda:1: the trainer has cuda:1 too"):
        check_devices({"a": server("cuda:1")}, config)
    with pytest.raises(ConfigError, match=r"reward.b.serve.devices=cuda:3-4: reward 'a' has cuda:3 too"):
        check_devices({"a": server("cuda:3"), "b": server("cuda:3-4")}, config)
    check_devices({"a": server("cuda:3"), "b": server("cuda:3")}, config)  # it is one server
    check_devices({"a": server("cuda:1", "--gpu-memory-utilization=0.2")}, config)


def test_a_judge_that_wants_a_server_cannot_be_loaded_where_nobody_starts_one(model: Path) -> None:
    rewards = RewardSet(judged(model), 1.0)
    with pytest.raises(RewardError, match="judge: serve is for runs and their evaluation; start the server"):
        rewards.load()


# --- whole runs ---

SMALL = (
    "engine.name=inline",
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=4",
    "sampling.eval_num_steps=4",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def start(folder: Path, reward: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    words = [*SMALL, f"run_dir={folder}", f"reward={json.dumps({'judge': reward})}", *overrides]
    run(presets.resolve("flowgrpo", "glyph", None, words, {}), console=Console(quiet=True))
    return [dict(row) for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_and_its_evaluation_start_and_stop_their_own_judge(model: Path, living: Living, tmp_path: Path) -> None:
    reward = options(model, fifo=living)
    rows = start(tmp_path / "run", reward)
    assert [row["reward/failed"] for row in rows] == [0, 0]
    assert all(row["reward/std"] > 0 for row in rows)
    config = presets.load(tmp_path / "run" / "config.yaml")
    assert config.reward["judge"] == RewardTerm.model_validate(reward)
    report = evaluate(tmp_path / "run", console=Console(quiet=True))
    assert 0 <= report.base_reward <= 1
    assert (tmp_path / "run" / "logs" / "judge-server.log").read_text().count("serving") == 2
    living.wait_until_gone()
    assert len(living.pids()) == 2


def test_a_trial_of_the_doctor_starts_and_stops_its_judge(model: Path, living: Living) -> None:
    reward = json.dumps({"judge": options(model, "--seed", 1, fifo=living)})
    report = diagnose_settings("flowgrpo", "glyph", None, [*SMALL, f"reward={reward}"], {})
    (scores,) = (finding for finding in report.findings if finding.check == "scores")
    assert scores.level == "ok"
    living.wait_until_gone()


def test_a_run_whose_judge_keeps_dying_drops_groups_and_comes_to_its_end(model: Path, tmp_path: Path) -> None:
    """Of 16 samples 4 starts of the server score 8 at most."""
    reward = {**options(model, "--fault", "dies", "--after", "2"), "concurrency": 1}
    rows = start(tmp_path / "run", reward)
    assert sum(row["groups_dropped"] for row in rows) >= 2
    assert len(rows) == 2
    notes = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert "the server of reward 'judge' ended with exit code 3" in notes


def test_a_run_that_is_set_to_stop_when_its_judge_fails_does(model: Path, living: Living, tmp_path: Path) -> None:
    reward = options(model, "--fault", "refuses", "--after", "2", fifo=living)
    with pytest.raises(RewardError, match=r"after 2 retries; scoring.on_failure=stop"):
        start(tmp_path / "run", reward, "scoring.on_failure=stop")
    living.wait_until_gone()
