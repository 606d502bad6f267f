"""`strftime` as it is in the C locale, whatever the locale and the time zone of the process. Host only."""

from __future__ import annotations

import calendar
import datetime as dt
import re
from collections.abc import Callable

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

DIRECTIVE = re.compile(r"%([-_0^#]*)(\d*)[EO]?(.)", re.DOTALL)
"""A directive with glibc's flags: - no padding, _ spaces, 0 zeros, ^ capitals, # the other case."""

COMPOSED = {
    "c": "%a %b %e %H:%M:%S %Y",
    "D": "%m/%d/%y",
    "F": "%Y-%m-%d",
    "r": "%I:%M:%S %p",
    "R": "%H:%M",
    "T": "%H:%M:%S",
    "x": "%m/%d/%y",
    "X": "%H:%M:%S",
}
"""Directives that stand for several others."""

NAMES: dict[str, Callable[[dt.datetime], str]] = {
    "a": lambda day: DAYS[day.weekday()][:3],
    "A": lambda day: DAYS[day.weekday()],
    "b": lambda day: MONTHS[day.month - 1][:3],
    "B": lambda day: MONTHS[day.month - 1],
    "h": lambda day: MONTHS[day.month - 1][:3],
    "n": lambda _: "\n",
    "p": lambda day: "AM" if day.hour < 12 else "PM",
    "P": lambda day: "am" if day.hour < 12 else "pm",
    "t": lambda _: "\t",
    "z": lambda _: "",  # dates here have no time zone
    "Z": lambda _: "",
    "%": lambda _: "%",
}

NUMBERS: dict[str, tuple[Callable[[dt.datetime], int], str, int]] = {  # value, padding, width
    "C": (lambda day: day.year // 100, "0", 2),
    "d": (lambda day: day.day, "0", 2),
    "e": (lambda day: day.day, " ", 2),
    "f": (lambda day: day.microsecond, "0", 6),
    "g": (lambda day: day.isocalendar().year % 100, "0", 2),
    "G": (lambda day: day.isocalendar().year, "0", 4),
    "H": (lambda day: day.hour, "0", 2),
    "I": (lambda day: (day.hour - 1) % 12 + 1, "0", 2),
    "j": (lambda day: day.timetuple().tm_yday, "0", 3),
    "k": (lambda day: day.hour, " ", 2),
    "l": (lambda day: (day.hour - 1) % 12 + 1, " ", 2),
    "m": (lambda day: day.month, "0", 2),
    "M": (lambda day: day.minute, "0", 2),
    "s": (lambda day: calendar.timegm(day.timetuple()), "0", 1),
    "S": (lambda day: day.second, "0", 2),
    "u": (lambda day: day.isoweekday(), "0", 1),
    "U": (lambda day: _week(day, day.isoweekday() % 7), "0", 2),
    "V": (lambda day: day.isocalendar().week, "0", 2),
    "w": (lambda day: day.isoweekday() % 7, "0", 1),
    "W": (lambda day: _week(day, day.weekday()), "0", 2),
    "y": (lambda day: day.year % 100, "0", 2),
    "Y": (lambda day: day.year, "0", 4),
}


def format_date(day: dt.datetime, text: str) -> str:
    """The text with its directives replaced by parts of a date without a time zone, which counts as UTC.

    A directive that strftime does not know stays as it is.
    """
    return DIRECTIVE.sub(lambda found: _replaced(day, found), text)


def _replaced(day: dt.datetime, found: re.Match[str]) -> str:
    flags, width_text, letter = found.groups()
    if letter in COMPOSED:
        padding, width, value = " ", 0, format_date(day, COMPOSED[letter])
    elif letter in NAMES:
        padding, width, value = " ", 0, NAMES[letter](day)
    elif letter in NUMBERS:
        number, padding, width = NUMBERS[letter]
        value = str(number(day))
    else:
        return found[0]
    padding, width = _padding(flags, padding, width)
    value = value.rjust(int(width_text or width), padding)
    if letter == "P":
        return value
    if "#" in flags and letter not in COMPOSED:
        return value.lower() if letter == "p" else value.upper()
    return value.upper() if "^" in flags else value


def _padding(flags: str, padding: str, width: int) -> tuple[str, int]:
    """The padding and width that the last flag about them asks for, or the directive's own."""
    for flag in reversed(flags):
        if flag in "-_0":
            return ("0" if flag == "0" else " "), (0 if flag == "-" else width)
    return padding, width


def _week(day: dt.datetime, days_into_week: int) -> int:
    """The number of the week in its year, where week 1 begins with the year's first first-day-of-the-week."""
    return (day.timetuple().tm_yday + 6 - days_into_week) // 7


__all__ = ["format_date"]
