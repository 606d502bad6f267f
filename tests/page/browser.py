"""Helpers for tests in a browser: reading the page, pressing keys, waiting."""

import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys as Key

Driver = webdriver.Chrome

ANNOUNCED = "return document.getElementById('announcement').textContent"
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


def emulate(driver: Driver, *, scheme: str, motion: str = "no-preference") -> None:
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": motion},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.02)
    return result


def all_of(driver: Driver, selector: str) -> list[Any]:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def text(driver: Driver, selector: str) -> str:
    elements = all_of(driver, selector)
    return elements[-1].text if elements else ""


def focused(driver: Driver) -> Any:
    return driver.switch_to.active_element


def press(driver: Driver, *keys: str) -> None:
    webdriver.ActionChains(driver).send_keys(*keys).perform()


def focus_backwards(driver: Driver, label: str) -> None:
    """Press Shift and Tab until the element with this accessible name has the focus."""
    for _ in range(30):
        webdriver.ActionChains(driver).key_down(Key.SHIFT).send_keys(Key.TAB).key_up(Key.SHIFT).perform()
        if focused(driver).accessible_name == label:
            return
    raise AssertionError(f"{label!r} cannot be reached by keyboard")


def set_max_tokens(driver: Driver, tokens: int = 32) -> None:
    driver.execute_script("document.getElementById('max-tokens').value = arguments[0]", tokens)


def wait_for_answers(driver: Driver, num: int = 1) -> None:
    wait_until(lambda: len(all_of(driver, ".answer:not(.busy)")) == num)


def ask(driver: Driver, question: str = "Why is the sky blue?", tokens: int = 32) -> None:
    set_max_tokens(driver, tokens)
    press(driver, question, Key.ENTER)
    wait_for_answers(driver)


def ask_under_load(driver: Driver) -> Any:
    """Ask again beside other requests; returns the panel with the comparison."""
    all_of(driver, ".ask-again")[-1].click()
    return wait_until(lambda: all_of(driver, ".comparison[data-same]"))[0]


def console_messages(driver: Driver) -> list[str]:
    """Errors and warnings in the browser's console."""
    return [one["message"] for one in driver.get_log("browser") if one["level"] in {"SEVERE", "WARNING"}]
