"""A person at the page: eyes, a keyboard, and patience. Shared by the tests beside it."""

import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys as Key

Driver = webdriver.Chrome

SAID = "return document.getElementById('said').textContent"
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


def emulate(driver: Driver, *, scheme: str, motion: str = "no-preference") -> None:
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": motion},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def all_of(driver: Driver, selector: str) -> list[Any]:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def text(driver: Driver, selector: str) -> str:
    found = all_of(driver, selector)
    return found[-1].text if found else ""


def focused(driver: Driver) -> Any:
    return driver.switch_to.active_element


def press(driver: Driver, *keys: str) -> None:
    webdriver.ActionChains(driver).send_keys(*keys).perform()


def go_back_to(driver: Driver, label: str) -> None:
    """Shift and Tab until something of this name has the focus."""
    for _ in range(30):
        webdriver.ActionChains(driver).key_down(Key.SHIFT).send_keys(Key.TAB).key_up(Key.SHIFT).perform()
        if focused(driver).accessible_name == label:
            return
    raise AssertionError(f"{label!r} cannot be reached by keyboard")


def shorten(driver: Driver, tokens: int = 32) -> None:
    driver.execute_script("document.getElementById('max-tokens').value = arguments[0]", tokens)


def answered(driver: Driver, num: int = 1) -> None:
    until(lambda: len(all_of(driver, ".answer:not(.busy)")) == num)


def ask(driver: Driver, question: str = "Why is the sky blue?", tokens: int = 32) -> None:
    shorten(driver, tokens)
    press(driver, question, Key.ENTER)
    answered(driver)


def ask_in_crowd(driver: Driver) -> Any:
    """Press the button; the panel that says how it went."""
    all_of(driver, ".again")[-1].click()
    return until(lambda: all_of(driver, ".compared[data-same]"))[0]


def complaints(driver: Driver) -> list[str]:
    """What the console holds."""
    return [one["message"] for one in driver.get_log("browser") if one["level"] in {"SEVERE", "WARNING"}]
