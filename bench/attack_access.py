"""Attacks on who may speak to the server and what it says: keys, web pages, prefixes, TLS, sockets, clocks."""

from __future__ import annotations

from attack_tools import Bench, Outcome, attack


@attack("F8", "an exception of the engine", "its text went to every client", server=False)
async def engine_exception(bench: Bench) -> Outcome:
    return Outcome(0, "to be written", ["to be written"])
