"""What the clients share: a checkpoint folder and a server over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from house import House, make_folder, opened


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def house(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One server for many tests: few pages, so that a crowd is preempted."""
    log = tmp_path_factory.mktemp("log") / "log"
    with opened(folder, log, "--kv-memory", "768KiB", "--max-num-seqs", "16") as made:
        yield made
