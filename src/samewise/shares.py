"""How one resource is divided between owners that do not trust each other. Host only.

`within_share` is the rule, for places, bytes and sequences alike. SharedBudget counts units that are refused
beyond a share. FairQueue applies the rule to the sequences of an engine: requests of an owner that has its
share wait outside of the engine, so that a request of another owner finds a place there at once.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

GREED = 3
"""An owner may take up to this many times of what it leaves free: alone 3/4 of a resource, two owners 3/7
each. Set by hand: a smaller number leaves more idle, a larger one leaves less for the next owner."""

NO_OWNER = b""
"""The owner of requests that share with none."""


def within_share(own: int, used: int, total: int, wanted: int = 1) -> bool:
    """Whether an owner that holds `own` of the `used` units may take `wanted` more of `total`.

    These are dynamic thresholds (Choudhury and Hahne, 1998): a bound that needs no list of owners, and always
    leaves room for another one. An owner without any unit may take what is free, so that no request is too
    large for ever.
    """
    left = total - used - wanted
    return left >= 0 and (own == 0 or own + wanted <= GREED * left)


class SharedBudget:
    """Units of one resource, such as bytes or connections, with a share for each owner."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._owners: dict[object, int] = {}  # units by owner, none of them 0

    def take(self, owner: object, size: int = 1) -> bool:
        """Take units for an owner; False where its share, or the whole, would be exceeded."""
        own = self._owners.get(owner, 0)
        if not within_share(own, self.used, self.limit, size):
            return False
        if size:
            self.used += size
            self._owners[owner] = own + size
        return True

    def give_back(self, owner: object, size: int = 1) -> None:
        """Give units back."""
        self.used -= size
        left = self._owners.get(owner, 0) - size
        if left > 0:
            self._owners[owner] = left
        else:
            self._owners.pop(owner, None)


class FairQueue(Generic[T]):
    """Requests by owner, of which each owner has some running and others waiting for its share.

    `total` is the number of sequences that owners share. `most` run at once, those without an owner among
    them, which have no share; None: `total`. Owned by a StepLoop or a RemoteEngine.
    """

    def __init__(self, total: int, most: int | None = None) -> None:
        self.resize(total, most)
        self._owners: dict[int, bytes] = {}  # of every request, by its number
        self._waiting: dict[bytes, dict[int, tuple[int, T]]] = {}  # with priority, by owner and number
        self._running: dict[bytes, int] = {}  # counts by owner, none of them 0

    def resize(self, total: int, most: int | None = None) -> None:
        """Change how many run at once. Those that run beyond it go on."""
        self._total, self._most = total, total if most is None else most

    def push(self, owner: bytes, number: int, request: T, *, priority: int = 0) -> None:
        """Add a request under a number that is not in use. Later requests have larger numbers.

        Of an owner's requests the one of the lowest priority goes first, among equals the oldest.
        """
        self._owners[number] = owner
        self._waiting.setdefault(owner, {})[number] = priority, request

    def pop(self) -> T | None:
        """The next request that may run, which then counts as running; None: none may.

        The owner with the fewest running goes first, among equals the one whose oldest request is older.
        """
        used = sum(self._running.values())
        shared = used - self._running.get(NO_OWNER, 0)
        allowed = [
            (running, next(iter(requests)), owner)
            for owner, requests in self._waiting.items()
            for running in (self._running.get(owner, 0),)
            if owner == NO_OWNER or within_share(running, shared, self._total)
        ]
        if not allowed or used >= self._most:
            return None
        running, _, owner = min(allowed)
        self._running[owner] = running + 1
        return self._take(owner, self._first(owner))

    def _first(self, owner: bytes) -> int:
        """The number of an owner's request that goes first."""
        return min((priority, number) for number, (priority, _) in self._waiting[owner].items())[1]

    def forget(self, number: int) -> bool:
        """A request has ended or is not wanted any more; returns whether it was still waiting."""
        owner = self._owners.get(number)
        if owner is None:
            return False
        waited = self.waits(number)
        if waited:
            self._take(owner, number)
        else:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
        del self._owners[number]
        return waited

    def waits(self, number: int) -> bool:
        """Whether a request is still waiting."""
        return number in self._waiting.get(self._owners.get(number, b""), ())

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def _take(self, owner: bytes, number: int) -> T:
        requests = self._waiting[owner]
        _, request = requests.pop(number)
        if not requests:
            del self._waiting[owner]
        return request


__all__ = ["GREED", "NO_OWNER", "FairQueue", "SharedBudget", "within_share"]
