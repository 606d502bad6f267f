"""The page's appearance: the engine panel, colour schemes, narrow windows, accessible names, pictures."""

import os
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: the page is not tested")

from browser import (
    ANNOUNCED,
    OPEN_ALL,
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
    wait_until,
)

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = (
    "Correct the spelling and return the whole text: The keepr of the lighthouse lit the lamp evry evening, "
    "and the keepr of the lighthouse slept evry morning. The keepr of the lighthouse was never late."
)
SHOTS = os.environ.get("SAMEWISE_SHOTS") == "1"

CONTRAST = """
const HIDDEN = ".visually-hidden, .skip, noscript, dialog, :disabled";
const parse = (colour) => {
  const parts = colour.match(/[\\d.]+/g).map(Number);
  return parts.length > 3 ? parts : [...parts, 1];
};
const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3])).concat(1);
const linear = (v) => (v <= 10.31475 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ground = (e) => {
  const layers = [];
  for (; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const poor = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || e.closest(HIDDEN) || !e.checkVisibility()) continue;
  const style = getComputedStyle(e);
  const back = ground(e);
  const [a, b] = [light(over(parse(style.color), back)), light(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
  if (ratio < least) poor.push([e.className, e.textContent.slice(0, 30), ratio]);
}
return poor;
"""
"""Texts whose contrast is below WCAG's 4.5, or 3 for large text."""

COLOURS = """
const c = document.getElementById("strip");
const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
return new Set(new Uint32Array(data.buffer)).size;
"""

PROPOSER = {
    "drafts": 2, "guessed": 4, "accepted": 3, "rate": 0.75, "nodes": 2.0, "depth": 1.5, "depths": [0, 1, 1],
    "tokens_per_second": 5,
}  # fmt: skip
"""A proposer's numbers in the live feed."""

COUNT_ANNOUNCEMENTS = """
window.announced = 0;
new MutationObserver(() => { window.announced++; })
  .observe(document.getElementById("announcement"), { childList: true });
"""

RING = """
const e = document.activeElement;
const style = getComputedStyle(e);
const field = e.closest(".field");
if (field) return getComputedStyle(field).boxShadow !== "none";
return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
"""


def test_frames_and_speed_are_shown_live(page: Driver) -> None:
    ask(page)
    strip = all_of(page, "#strip")[0]
    wait_until(lambda: strip.accessible_name != "No frames yet")
    assert "rows used by prompts" in strip.accessible_name
    wait_until(lambda: "slow" in text(page, "#proposers") or "jitter" in text(page, "#proposers"))
    assert "%" in text(page, "#key")
    assert "tokens per frame" in text(page, "#yield")
    page.execute_script("document.getElementById('strip').focus()")
    press(page, Key.ARROW_LEFT, Key.ARROW_LEFT)
    announcement_text = page.execute_script(
        "return document.getElementById('frame-announcement').textContent"
    )
    assert announcement_text.startswith("Frame ")
    assert "→" in announcement_text
    assert page.execute_script(COLOURS) > 3, "something is drawn"


def test_draft_trees_are_shown_with_their_size_and_accepted_depth(page: Driver) -> None:
    ask(page)
    wait_until(all_of(page, "#trees-card")[0].is_displayed)
    assert re.fullmatch(r"[\d.]+ guesses → [\d.]+ deep", text(page, "#trees-readout"))
    assert "an accepted depth of" in all_of(page, "#trees")[0].accessible_name
    bars = "return document.querySelector('#proposers .histogram').children.length"
    assert page.execute_script(bars) == 9  # in one call: the panel is drawn anew with every sample
    assert page.execute_script(COLOURS.replace("strip", "trees")) > 3, "something is drawn"


def test_the_timeline_is_shown_if_the_feed_has_one(page: Driver) -> None:
    assert not all_of(page, "#timeline-card")[0].is_displayed()
    empty, sets = {"attention": [], "mlp": []}, {"attention": [3], "mlp": [4]}
    page.execute_async_script(
        "const [one, done] = arguments;"
        "import('/samewise/page/engine-panel.js').then((panel) => { panel.show(one); done(); })",
        {
            "running": 1, "waiting": 0, "frames": [], "tokens_per_second": 5, "contract": "sw-0",
            "proposers": {"skip": PROPOSER},
            "timeline": [
                {"event": "accumulate", "tokens": 0, "score": 0.0, "rate": 0.0, "set": empty},
                {"event": "optimise", "tokens": 32, "score": 9.5, "rate": 0.5, "set": sets},
                {"event": "accelerate", "tokens": 40, "score": 31.44, "rate": 0.72, "set": sets},
            ],
        },
    )  # fmt: skip
    assert text(page, "#timeline-readout") == "accelerating"
    promised = "tokens/s promised, without attention 3, without MLP 4"
    assert [event.text for event in all_of(page, "#events li")] == [
        f"» accelerating at 40 tokens, 72% right, 31.4 {promised}",
        f"◇ searching layers at 32 tokens, 50% right, 9.5 {promised}",
        "▤ gathering context at 0 tokens",
    ]
    assert len(all_of(page, "#track i")) == 3


def test_the_page_is_readable_in_light_dark_and_narrow_windows(page: Driver) -> None:
    """With everything an answer can show: sufficient contrast, and nothing wider than the window."""
    ask(page, "x" * 90)
    page.execute_script(OPEN_ALL)
    ask_under_load(page)
    paper = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    for scheme in ("light", "dark"):
        emulate(page, scheme=scheme, motion="reduce")
        assert page.execute_script(CONTRAST) == []
        colour = page.execute_script(paper)
        assert (max(colour) < 60) if scheme == "dark" else (min(colour) > 200)
    moving = "return getComputedStyle(document.querySelector('button')).transitionProperty"
    assert page.execute_script(moving) == "none"
    metrics = {"width": 360, "height": 720, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wide = (
            "return [document.documentElement, document.getElementById('turns')]"
            ".map((e) => e.scrollWidth - e.clientWidth)"
        )
        assert page.execute_script(wide) == [0, 0]
        assert not all_of(page, ".engine")[0].is_displayed()
        focus_backwards(page, "Engine")
        press(page, Key.SPACE)
        assert all_of(page, ".engine")[0].is_displayed()
        assert not all_of(page, ".conversation")[0].is_displayed()
        assert focused(page).get_attribute("aria-pressed") == "true"
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
        assert page.execute_script(CONTRAST) == []
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_elements_have_accessible_names_and_answers_are_announced_once(page: Driver) -> None:
    page.execute_script(COUNT_ANNOUNCEMENTS)
    ask(page)
    assert 1 <= page.execute_script("return window.announced") <= 3, (
        "an answer is announced once, not token by token"
    )
    assert "32 tokens" in page.execute_script(ANNOUNCED)
    page.execute_script(OPEN_ALL)
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            seen.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "textbox", "spinbutton", "checkbox", "link", "image", "table", "complementary"):
        assert all(seen.get(role, ["?"])), f"a {role} has no name: {seen.get(role)}"
    assert {len(seen["main"]), len(seen["complementary"]), len(seen["banner"])} == {1}
    assert "Your question" in seen["textbox"]
    assert len(all_of(page, "h1")) == 1
    assert page.execute_script("return document.documentElement.lang") == "en"
    live = page.execute_script(
        "return [...document.querySelectorAll('[aria-live], [role=status], [role=log]')].map((e) => e.id)"
    )
    assert sorted(live) == ["announcement", "frame-announcement"]
    # The focus is visible on every element.
    page.execute_script("document.querySelector('.skip').focus()")
    for _ in range(12):
        press(page, Key.TAB)
        assert page.execute_script(RING), focused(page).get_attribute("outerHTML")


@pytest.mark.skipif(not SHOTS, reason="SAMEWISE_SHOTS=1 takes new pictures for docs/")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pictures_of_the_docs(page: Driver, scheme: str) -> None:
    emulate(page, scheme=scheme)
    page.set_window_size(1360, 1080)
    set_max_tokens(page, 120)
    press(page, QUESTION, Key.ENTER)
    wait_until(lambda: all_of(page, ".answer:not(.busy)"), 120)
    page.execute_script("document.querySelector('.ask-again').click()")
    wait_until(lambda: all_of(page, ".comparison[data-same]"), 120)
    page.execute_script("document.activeElement.blur()")
    time.sleep(0.5)
    page.save_screenshot(str(DOCS / f"page-{scheme}.png"))
