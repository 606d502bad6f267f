"""The roster keeps the contract of the replicas that run, and refuses another by the facts that differ."""

import asyncio

import pytest

from samewise.contract import Contract
from samewise.errors import GuaranteeLost
from samewise.scale.roster import LIMITS, Roster

ONE, OTHER = Contract.of({"dtype": "float32"}), Contract.of({"dtype": "bfloat16"})


def test_another_contract_is_refused_while_a_replica_runs() -> None:
    now = [0.0]

    async def main() -> None:
        roster = Roster(lambda: now[0])
        await roster.join("a", ONE)
        await roster.join("b", ONE)
        with pytest.raises(GuaranteeLost, match=r"replica c .*dtype is bfloat16, not float32"):
            await roster.join("c", OTHER)
        assert list(await roster.refused()) == ["c"]
        for second in range(40):
            now[0] = float(second)
            await roster.report("a", ONE, {"frames": second})
        with pytest.raises(GuaranteeLost):
            await roster.join("d", OTHER)
        assert await roster.stats() == {"a": {"frames": 39}}
        now[0] += LIMITS.silent + 1
        assert await roster.stats() == {}
        await roster.join("e", OTHER)  # none of the first contract is left
        with pytest.raises(GuaranteeLost):
            await roster.join("f", ONE)

    asyncio.run(main())


def test_a_roster_that_was_restarted_learns_the_contract_from_reports() -> None:
    async def main() -> None:
        roster = Roster()
        await roster.report("a", ONE, {})
        with pytest.raises(GuaranteeLost):
            await roster.join("b", OTHER)

    asyncio.run(main())


def test_an_application_is_orphaned_when_its_server_falls_silent() -> None:
    now = [0.0]

    async def main() -> None:
        roster = Roster(lambda: now[0])
        await roster.join("a", ONE)
        now[0] += 2 * LIMITS.orphaned
        await roster.stats()
        assert roster.orphan is None  # it belongs to no server
        await roster.keep("an application")
        now[0] += LIMITS.orphaned - 1
        assert roster.orphan is None
        await roster.keep("an application")
        now[0] += LIMITS.orphaned - 1
        await roster.report("a", ONE, {})
        assert roster.orphan is None
        now[0] += 1
        assert roster.orphan == "an application"

    asyncio.run(main())


def test_refusals_are_bounded() -> None:
    async def main() -> None:
        roster = Roster()
        await roster.join("a", ONE)
        for number in range(LIMITS.refused + 5):
            with pytest.raises(GuaranteeLost):
                await roster.join(f"b{number}", OTHER)
        assert len(await roster.refused()) == LIMITS.refused

    asyncio.run(main())
