"""Conversations on the page: keyboard, marks, comparison under load, receipts, errors, keys."""

import hashlib
import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: the page is not tested")

from browser import (
    ANNOUNCED,
    By,
    Driver,
    Key,
    all_of,
    ask,
    ask_under_load,
    emulate,
    focus_backwards,
    focused,
    press,
    set_max_tokens,
    text,
    wait_for_answers,
    wait_until,
)

from samewise.serve.settings import Keys, ServeSettings

FLIP_A_BIT = """
const real = window.fetch;
const flip = (text) => {
  const value = new Float64Array([Number(text)]);
  new BigUint64Array(value.buffer)[0] ^= 1n;
  return String(value[0]);
};
window.fetch = async (...all) => {
  const response = await real(...all);
  if (!String(all[0]).includes("chat")) return response;
  const body = await response.text();
  const bent = body.replace(/("logprob":)(-?[\\d.e-]+)/, (_, name, value) => name + flip(value));
  return new Response(bent, response);
};
"""

DIGESTS = """
const [data, ids, floats, done] = arguments;
import("/samewise/page/digest.js").then((m) => done([
  data.map((one) => m.sha256(new Uint8Array(one))), m.ofIds(ids), m.ofFloats(floats.map(Number)),
  m.firstDifference({ids: [1], logprobs: [0]}, {ids: [1], logprobs: [-0]}),
  m.firstDifference({ids: [1], logprobs: [-1]}, {ids: [1, 2], logprobs: [-1, -1]}),
  m.firstDifference({ids: [1], logprobs: [-1]}, {ids: [1], logprobs: [-1]}),
]));
"""

WATCH = """
window.lengths = [];
new MutationObserver(() => {
  const growing = document.querySelector(".answer.busy .text");
  if (growing) window.lengths.push(growing.textContent.length);
}).observe(document.getElementById("turns"), { childList: true, subtree: true });
"""

ROWS = """
const rows = document.querySelectorAll(".bursts tbody tr");
return [...rows].map((row) => [...row.cells].map((cell) => cell.textContent));
"""


@pytest.mark.usefixtures("slower")
def test_a_question_is_asked_by_keyboard_and_again_under_load(page: Driver) -> None:
    """Drafted and rejected tokens are marked, and the answer under load is the same."""
    assert focused(page).get_attribute("id") == "question"
    set_max_tokens(page, 40)
    page.execute_script(WATCH)
    press(page, "Why is the sky blue?", Key.ENTER)
    wait_for_answers(page)
    assert len(set(page.execute_script("return window.lengths"))) > 5, "the answer is shown while it arrives"
    assert text(page, ".question p") == "Why is the sky blue?"
    assert len(all_of(page, ".burst")) > 5
    assert all_of(page, ".accepted"), "accepted drafts are underlined"
    marks = page.execute_script(
        "return [...document.querySelectorAll('.rejected')].map((one) => one.textContent)"
    )
    assert all(mark.startswith("↺") for mark in marks)
    summary = text(page, ".counts")
    assert "40 tokens in" in summary
    assert "✓" in summary
    assert "rolled back" in summary
    counts = {word: int(num) for num, word in re.findall(r"(\d+) (guessed|accepted|rolled back)", summary)}
    guessed, accepted, back = counts["guessed"], counts["accepted"], counts["rolled back"]
    assert guessed == accepted + back
    assert back == sum(int(mark[1:]) for mark in marks) > 0
    focus_backwards(page, "Burst by burst")
    press(page, Key.ENTER)
    rows = page.execute_script(ROWS)
    assert len(rows) == len(all_of(page, ".burst"))
    assert sum(int(row[2].lstrip("✓ ")) for row in rows if row[2] != "–") == accepted

    focus_backwards(page, "Ask again in a crowd")
    press(page, Key.ENTER)
    compared = wait_until(lambda: all_of(page, ".comparison[data-same]"))[0]
    assert compared.get_attribute("data-same") == "true"
    assert compared.find_element(By.CLASS_NAME, "verdict").text == (
        "✓ Same. 40 tokens and every bit of their log-probabilities."
    )
    digests = [code.get_attribute("title") for code in compared.find_elements(By.TAG_NAME, "code")]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert "8 others" in compared.text
    assert len(compared.find_elements(By.CSS_SELECTOR, ".cells .equal")) == 40
    assert page.execute_script(ANNOUNCED).startswith("✓ Same.")
    assert focused(page).accessible_name == "Ask again in a crowd", "the focus stays"


def test_a_single_differing_bit_is_reported(page: Driver) -> None:
    ask(page, tokens=12)
    page.execute_script(FLIP_A_BIT)
    compared = ask_under_load(page)
    assert compared.get_attribute("data-same") == "false"
    verdict = compared.find_element(By.CLASS_NAME, "verdict").text
    assert verdict.startswith("≠ Different from token 1 on (its log-probability).")
    assert compared.find_elements(By.CSS_SELECTOR, ".cells .other")


def test_digests_are_sha256_of_the_bits(page: Driver) -> None:
    data = [bytes(range(256)) * 4, b"", b"abc", *(b"x" * n for n in (55, 56, 63, 64, 65, 119, 120))]
    values = [-0.0, 0.0, -1.2345678806304932, -9999.0, 5e-324]
    arguments = [list(one) for one in data], [1, 2, 70000], [repr(value) for value in values]
    digests = page.execute_async_script(DIGESTS, *arguments)
    assert digests[0] == [hashlib.sha256(one).hexdigest() for one in data]
    assert digests[1] == hashlib.sha256(struct.pack("<3I", 1, 2, 70000)).hexdigest()
    assert digests[2] == hashlib.sha256(struct.pack("<5d", *values)).hexdigest()
    assert digests[3:] == [{"at": 0, "what": "log-probability"}, {"at": 1, "what": "token"}, None]


def test_a_receipt_can_be_downloaded(page: Driver, downloads: Path) -> None:
    ask(page, tokens=8)
    button = all_of(page, "button.receipt")[0]
    button.click()
    file = wait_until(lambda: list(downloads.glob("receipt-*.json")))[0]
    receipt = wait_until(lambda: json.loads(file.read_text(encoding="utf-8") or "null"))
    assert text(page, "#contract") in json.dumps(receipt)


@pytest.mark.usefixtures("slower")
def test_escape_stops_an_answer_and_the_conversation_continues(page: Driver) -> None:
    set_max_tokens(page, 440)
    press(page, "<img src=x onerror=alert(1)> & more", Key.ENTER)
    wait_until(lambda: len(all_of(page, ".burst")) > 2)
    press(page, Key.ESCAPE)
    wait_for_answers(page)
    assert "stopped" in text(page, ".counts")
    assert not all_of(page, ".ask-again")[0].is_enabled(), "an incomplete answer cannot be compared"
    assert text(page, ".question p") == "<img src=x onerror=alert(1)> & more", "a question is shown as text"
    set_max_tokens(page, 8)
    focused(page).send_keys("first", Key.SHIFT, Key.ENTER, Key.NULL, "second", Key.ENTER)
    wait_for_answers(page, 2)
    assert all_of(page, ".question p")[1].text == "first\nsecond"
    all_of(page, "#new-conversation")[0].click()
    assert all_of(page, "#welcome")
    assert not all_of(page, ".turn")
    all_of(page, ".example")[0].click()
    wait_for_answers(page)
    assert text(page, ".question p") == "Why is the sky blue?"


def test_an_error_is_shown_with_the_servers_message(page: Driver) -> None:
    set_max_tokens(page, 0)
    press(page, "anything", Key.ENTER)
    wait_for_answers(page)
    problem = text(page, ".problem")
    if problem:  # 0 is refused, or reads the prompt only
        assert "max_tokens" in problem
    page.execute_script("document.getElementById('question').value = 'x'.repeat(600)")
    press(page, Key.ENTER)
    wait_for_answers(page, 2)
    assert "max_model_len is 512" in text(page, ".problem")
    page.get_log("browser")  # the browser itself logs a refused request


def test_a_key_is_asked_for_and_a_lost_connection_is_shown(
    driver: Driver, serve: Callable[[ServeSettings], Any]
) -> None:
    server = serve(ServeSettings(keys=Keys.of(["right-key"])))
    try:
        emulate(driver, scheme="light")
        driver.get(server.url)
        wait_until(lambda: focused(driver).accessible_name == "API key")
        press(driver, Key.ESCAPE)
        time.sleep(0.1)  # it closes and opens again, since nothing works without a key
        wait_until(lambda: focused(driver).accessible_name == "API key")
        press(driver, "wrong-key", Key.ENTER)
        wait_until(lambda: "refused" in text(driver, "#key-why"))
        press(driver, "right-key", Key.ENTER)
        wait_until(lambda: text(driver, "#contract").startswith("sw-"))
        wait_until(lambda: text(driver, "#model"))
        assert focused(driver).get_attribute("id") == "question"
        ask(driver, tokens=8)
        assert "8 tokens" in text(driver, ".counts")
        assert driver.execute_script("return localStorage.length") == 0
    finally:
        server.stop()
    wait_until(
        lambda: driver.execute_script("return document.getElementById('status').dataset.state") == "lost"
    )
    driver.get_log("browser")  # the browser itself logs the refusals and the loss
