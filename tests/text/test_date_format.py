"""Dates in chat templates: the C locale's words in every locale."""

import datetime as dt
import locale
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samewise.text.chat_template import pin_date
from samewise.text.date_format import format_date

DAY = dt.datetime(2024, 3, 5, 14, 7, 9, 42)
FORMATS = {
    "%a": "Tue", "%A": "Tuesday", "%b": "Mar", "%B": "March", "%c": "Tue Mar  5 14:07:09 2024",
    "%C": "20", "%d": "05", "%D": "03/05/24", "%e": " 5", "%f": "000042", "%F": "2024-03-05", "%g": "24",
    "%G": "2024", "%h": "Mar", "%H": "14", "%I": "02", "%j": "065", "%k": "14", "%l": " 2", "%m": "03",
    "%M": "07", "%n": "\n", "%p": "PM", "%P": "pm", "%r": "02:07:09 PM", "%R": "14:07", "%s": "1709647629",
    "%S": "09", "%t": "\t", "%T": "14:07:09", "%u": "2", "%U": "09", "%V": "10", "%w": "2", "%W": "10",
    "%x": "03/05/24", "%X": "14:07:09", "%y": "24", "%Y": "2024", "%z": "", "%Z": "", "%%": "%",
    "%-d": "5", "%_m": " 3", "%0e": "05", "%^b": "MAR", "%#p": "pm", "%Ey": "24", "%Od": "05", "%4d": "0005",
    "%Q": "%Q", "no directive": "no directive", "100%": "100%", "%d %B %Y": "05 March 2024",
}  # fmt: skip
IN_ANOTHER_LOCALE = """
import datetime, locale, sys
from samewise.text.date_format import format_date
locale.setlocale(locale.LC_ALL, "xx_XX")
day = datetime.datetime(2024, 3, 5, 14, 7, 9)
print(ascii([day.strftime("%B"), format_date(day, "%A %B %c %x %X %p")]))
"""


@pytest.mark.parametrize("text", FORMATS)
def test_a_directive_is_replaced_as_in_the_c_locale(text: str) -> None:
    assert format_date(DAY, text) == FORMATS[text]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other C libraries know fewer directives")
@pytest.mark.parametrize("text", [text for text in FORMATS if "f" not in text and text != "%s"])
def test_every_day_is_formatted_as_the_c_library_does(text: str) -> None:
    assert locale.setlocale(locale.LC_TIME) == "C"
    for days in range(0, 3 * 366, 5):
        day = DAY + dt.timedelta(days=days, hours=days % 24)
        assert format_date(day, text) == day.strftime(text)


def test_a_template_gets_the_c_locales_words() -> None:
    assert '"%d %b %Y": "26 Jul 2024"' in pin_date("{{ strftime_now('%d %b %Y') }}", "2024-07-26")


@pytest.mark.skipif(shutil.which("localedef") is None, reason="localedef is not installed")
def test_another_locale_changes_nothing(tmp_path: Path) -> None:
    source = Path("/usr/share/i18n/locales/de_DE")
    if not source.exists():
        pytest.skip("no sources of locales")
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "xx_XX")], capture_output=True, check=False
    )
    if not (tmp_path / "xx_XX").exists():
        pytest.skip(f"localedef cannot make a locale here: {made.stderr!r}")
    env = os.environ | {"LOCPATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    out = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_LOCALE], env=env, capture_output=True, text=True, check=True
    ).stdout
    ours = format_date(DAY, "%A %B %c %x %X %p")
    assert out.strip() == ascii(["M\xe4rz", ours])


def test_the_c_librarys_names_are_not_asked_for() -> None:
    class Foreign(dt.datetime):
        def strftime(self, _: str) -> str:
            raise AssertionError("the process locale was asked")

    assert format_date(Foreign(2024, 3, 5), "%A %B %c %p") == "Tuesday March Tue Mar  5 00:00:00 2024 AM"
