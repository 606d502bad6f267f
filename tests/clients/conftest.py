"""Fixtures of all client tests: a checkpoint folder and a server over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, make_folder, running_server


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for many tests, with so few KV pages that concurrent requests are preempted."""
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(folder, log, "--kv-memory", "768KiB", "--max-num-seqs", "16") as running:
        yield running
