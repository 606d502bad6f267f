"""A real server over a tiny model, and a real browser.

Debian's packages chromium and chromium-driver will do, or any Chrome with its driver; and selenium. Where
there is no browser only this folder is skipped.
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
    """Guesses that are sometimes wrong, at a pace one can watch."""

    def propose(self, asks: list[Any]) -> list[Any]:
        time.sleep(0.004)
        return super().propose(asks)


def talkative() -> Engine:
    """A tiny random model that speaks in letters: every other token has a flat, losing logit."""
    loaded = tiny()
    letters = [loaded.tokenizer.encode(c)[0] for c in "abcdefghiklmnoprstuvwy   ,.\n"]
    with torch.no_grad():
        weight = loaded.model.lm_head.weight
        kept = weight[letters].clone()
        weight.zero_()
        weight[letters] = kept
    config = EngineConfig.of(model="tiny-llama", kv_memory=2**24, device="cpu")
    return Engine(loaded, config, make_proposer=Slow)


class Served:
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
        """As a server ends: nobody more is admitted, feeds end, then it goes."""
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
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    found.set_script_timeout(30)
    yield found
    found.quit()


@pytest.fixture(scope="session")
def llm(driver: Any) -> Iterator[AsyncLLM]:
    found = AsyncLLM("smollm2") if SHOTS else AsyncLLM.over(talkative())
    yield found
    found.close()


@pytest.fixture(scope="session")
def serve(llm: AsyncLLM) -> Callable[[ServeSettings], Served]:
    return lambda settings: Served(llm, settings)


@pytest.fixture(scope="session")
def url(serve: Callable[[ServeSettings], Served]) -> Iterator[str]:
    served = serve(ServeSettings())
    yield served.url
    served.stop()


@pytest.fixture
def page(driver: Any, url: str) -> Iterator[Any]:
    """The page, fresh; whatever it writes to the console is a failure."""
    from hands import complaints, emulate, text, until

    emulate(driver, scheme="light")
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get(url)
    until(lambda: text(driver, "#contract").startswith("sw-"))
    yield driver
    assert complaints(driver) == []
