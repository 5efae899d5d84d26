"""What holds for every test on the real engine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_socket_is_left_among_temporary_files() -> Iterator[None]:
    """Processes of an engine talk over sockets with random names, which stay where an engine is killed."""
    before = sockets()
    yield
    assert sockets() <= before


def sockets() -> set[Path]:
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}
