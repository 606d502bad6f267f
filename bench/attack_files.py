"""Attacks by files: caches that others may write, cut or linked files, altered receipts. No server runs."""

from __future__ import annotations

from attack_tools import Bench, Outcome, attack


@attack("F7", "another user's library in a shared cache", "it was loaded and ran", server=False)
async def foreign_library(bench: Bench) -> Outcome:
    return Outcome(0, "to be written", ["to be written"])
