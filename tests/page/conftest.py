"""A server over a tiny model, and a browser.

Needs selenium and Chrome or Chromium with its driver (Debian: chromium, chromium-driver). Without a browser
the tests of this folder are skipped.
"""

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from samewise import AsyncLLM
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.serve.app import make_app
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import Worker
from samewise.testing import Jitter, tiny

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SHOTS = os.environ.get("SAMEWISE_SHOTS") == "1"
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Slow(Jitter):
    """Drafts that are sometimes wrong, slowed down so that the page shows intermediate states."""

    pause = 0.004

    def propose(self, asks: list[Any]) -> list[Any]:
        time.sleep(self.pause)
        return super().propose(asks)


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that last long enough to be interrupted, whatever else the machine does."""
    monkeypatch.setattr(Slow, "pause", 0.03)


def letters_engine() -> Engine:
    """A tiny random model that generates letters: the weights of all other tokens are zero."""
    loaded = tiny()
    letters = [loaded.tokenizer.encode(c)[0] for c in "abcdefghiklmnoprstuvwy   ,.\n"]
    with torch.no_grad():
        weight = loaded.model.lm_head.weight
        kept = weight[letters].clone()
        weight.zero_()
        weight[letters] = kept
    config = EngineConfig.of(model="tiny-llama", kv_memory=2**24, device="cpu")
    return Engine(loaded, config, make_proposer=Slow)


class ThreadedServer:
    """A server on a free port, in a thread."""

    def __init__(self, llm: AsyncLLM, settings: ServeSettings) -> None:
        self.worker = Worker.over(llm)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(self.worker, settings),
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._listening = listening
        self.thread.start()

    def _run(self) -> None:
        self.loop.run_until_complete(self.server.serve([self._listening]))
        self.loop.close()

    def stop(self) -> None:
        """Drain, let the feeds end, then stop."""
        asyncio.run_coroutine_threadsafe(self.worker.drain(5), self.loop).result(10)
        time.sleep(0.4)
        self.server.should_exit = True
        self.thread.join(20)
        self._listening.close()


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("no browser found: the page is not tested (apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*ARGUMENTS, "--window-size=1360,1000"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    chrome.set_script_timeout(30)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def llm(driver: Any) -> Iterator[AsyncLLM]:
    engine = AsyncLLM("smollm2") if SHOTS else AsyncLLM.over(letters_engine())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def serve(llm: AsyncLLM) -> Callable[[ServeSettings], ThreadedServer]:
    return lambda settings: ThreadedServer(llm, settings)


@pytest.fixture(scope="session")
def url(serve: Callable[[ServeSettings], ThreadedServer]) -> Iterator[str]:
    server = serve(ServeSettings())
    yield server.url
    server.stop()


@pytest.fixture
def page(driver: Any, url: str) -> Iterator[Any]:
    """The page, newly loaded; anything it writes to the console fails the test."""
    from browser import console_messages, emulate, text, wait_until

    emulate(driver, scheme="light")
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get(url)
    wait_until(lambda: text(driver, "#contract").startswith("sw-"))
    yield driver
    assert console_messages(driver) == []
