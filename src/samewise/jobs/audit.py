"""Is a receipt true? Replay what it says and compare, bit for bit.

The recorded answer is offered to an ordinary engine as guesses, many at a time, with the prefix cache
off. The replay then computes every token and log-probability itself, in parallel frames, at the speed of
reading a prompt; the ordinary judge accepts the guesses or names the first that is wrong, and the ordinary
rules end the sequence. So an audit knows nothing of sampling, penalties or stops that generating does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.draft.build import Parts
from samewise.engine import Engine, build
from samewise.errors import BadParameter, CallerError
from samewise.llm.answers import Answer, Desk, Prompt
from samewise.outputs import Chunk
from samewise.params import SamplingParams
from samewise.receipts.receipt import Receipt, logprob_check, logprob_digest, prompt_digest
from samewise.receipts.store import Entry
from samewise.types import Ask, Proposal, Verdict

TOGETHER = 32
"""Receipts that are replayed at once; enough to fill a frame, whatever the lengths of their answers."""


class Status(StrEnum):
    """What an audit may find."""

    SAME = "same"
    DIFFERENT = "different"
    ALTERED = "altered"
    OTHER_CONTRACT = "other contract"
    NO_PROMISE = "no promise"
    NOT_SIGNED = "not signed"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one receipt. `position` counts the answer's tokens from 0."""

    where: str
    status: Status
    details: tuple[str, ...] = ()
    position: int | None = None
    num_tokens: int = 0
    contract: str | None = None

    @property
    def good(self) -> bool:
        """Whether the answer was shown to be the one the engine gives."""
        return self.status is Status.SAME

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "receipt": self.where, "status": self.status.value, "position": self.position,
            "details": list(self.details), "num_tokens": self.num_tokens, "contract": self.contract,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A receipt to be audited, and where it came from."""

    where: str
    receipt: Receipt

    def finding(self, status: Status, *details: str, position: int | None = None) -> Finding:
        """What was found of it. A receipt with a flaw is altered, whatever else it may be."""
        flaws = _flaws(self.receipt)
        said = (*flaws, *details)
        status = Status.ALTERED if flaws else status
        num_tokens = len(self.receipt.token_ids)
        return Finding(self.where, status, said, position, num_tokens, self.receipt.contract.id)

    def look(self, signed_by: str | None) -> Finding | None:
        """What can be said without a replay, where none is of use."""
        signature = self.receipt.signature
        if signed_by is not None and (signature is None or signature.key != signed_by):
            signer = "nobody" if signature is None else signature.key
            return self.finding(Status.NOT_SIGNED, f"signed by {signer}, not by {signed_by}")
        if not self.receipt.verified:
            told = "the request was not verified, so its bits depended on the load"
            return self.finding(Status.NO_PROMISE, told)
        return None


class Recital:
    """Guesses what receipts say. The replay is asked about every token, and believes none of them."""

    name = "recital"
    quiet = False

    def __init__(self, frame_rows: int) -> None:
        self._rows = frame_rows
        self._answers: dict[int, tuple[int, ...]] = {}

    def learn(self, seq_id: int, answer: tuple[int, ...]) -> None:
        """The answer a sequence is said to have."""
        self._answers[seq_id] = answer

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """What comes next in the recorded answers: in pieces that share a frame, or whole frames of one."""
        piece = max(self._rows // 4, self._rows // max(1, len(asks))) - 1
        return [Proposal(ask.seq_id, self._next(ask, piece), drafter=self.name) for ask in asks]

    def _next(self, ask: Ask, piece: int) -> tuple[int, ...]:
        answer = self._answers.get(ask.seq_id, ())
        begin = len(ask.tokens) - ask.prompt_len + len(ask.draft)
        # The last token need not be guessed: the replay adds one of its own.
        return answer[begin : min(begin + piece, len(answer) - 1)]

    def observe(self, verdicts: list[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """The sequence is gone."""
        self._answers.pop(seq_id, None)


def reciting(parts: Parts) -> Recital:
    """What an engine that audits is built with."""
    return Recital(parts.runner.widest)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay and a receipt part, and how."""

    position: int | None
    what: str


@dataclass(slots=True)
class Comparison:
    """A replay beside its receipt, as it comes in. `show` turns token ids into something to read."""

    receipt: Receipt
    show: Callable[[Sequence[int]], str]
    logprobs: list[float] = field(default_factory=list)

    def take(self, chunk: Chunk) -> Difference | None:
        """Compare what became final; the first thing that differs, or None."""
        said = self.receipt.token_ids
        for token, logprob in zip(chunk.token_ids, chunk.token_logprobs, strict=True):
            at = len(self.logprobs)
            if at == len(said):
                return self._goes_on(at)
            if found := self._differs(at, token, logprob):
                return Difference(at, found)
            self.logprobs.append(logprob)
        at = len(self.logprobs)
        if chunk.finish_reason is not None:
            return self._end(at, chunk.finish_reason, chunk.stop_reason)
        return self._goes_on(at) if at == len(said) else None

    def _goes_on(self, at: int) -> Difference:
        return Difference(at, f"the receipt ends here ({self._ending}), the replay goes on")

    def _differs(self, at: int, token: int, logprob: float) -> str | None:
        receipt = self.receipt
        if token != receipt.token_ids[at]:
            return (
                f"the receipt says {self._token(receipt.token_ids[at])}, "
                f"the replay {self._token(token)}{self._after(at)}"
            )
        if logprob_check(logprob) != receipt.logprob_checks[at]:
            return (
                f"both say {self._token(token)}, but the bits of its log-probability differ: "
                f"the receipt has the checksum {receipt.logprob_checks[at]}, "
                f"the replay {logprob_check(logprob)} ({logprob!r}){self._after(at)}"
            )
        return None

    def _end(self, at: int, finish: str, stop: int | str | None) -> Difference | None:
        receipt = self.receipt
        if at < len(receipt.token_ids):
            following = self._token(receipt.token_ids[at])
            return Difference(
                at, f"the replay ends here ({_ending(finish, stop)}), the receipt goes on with {following}"
            )
        if (finish, stop) != (receipt.finish_reason, receipt.stop_reason):
            return Difference(
                at, f"the receipt ends by {self._ending}, the replay by {_ending(finish, stop)}"
            )
        digest = logprob_digest(self.logprobs)
        if digest != receipt.logprob_digest:
            return Difference(
                None,
                f"every position's checksum agrees, but the digest of the log-probability bits is {digest} "
                f"and not {receipt.logprob_digest}",
            )
        return None

    @property
    def _ending(self) -> str:
        return _ending(self.receipt.finish_reason, self.receipt.stop_reason)

    def _token(self, token: int) -> str:
        return f"token {token} {self.show([token])}".rstrip()

    def _after(self, at: int) -> str:
        """The words before, so that a reader finds the place."""
        text = self.show(self.receipt.token_ids[max(0, at - 12) : at])
        return f", after {text}" if text else ""


def _ending(finish: str, stop: int | str | None) -> str:
    return finish if stop is None else f"{finish} {stop!r}"


class Auditor:
    """Replays receipts on one engine, which must be built with `reciting` and without the prefix cache."""

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.proposer, Recital) or engine.scheduler.index.enabled:
            raise BadParameter("an Auditor's engine is built with make_proposer=reciting, no prefix caching")
        self._recital = engine.proposer
        self._desk = Desk(engine)

    @classmethod
    def load(cls, model: str, settings: Mapping[str, Any]) -> Auditor:
        """An engine as a receipt describes it."""
        config = EngineConfig.of(**{"max_num_seqs": TOGETHER} | dict(settings) | {"model": model})
        config = replace(config, proposer="none", draft_tokens=4096, enable_prefix_caching=False)
        return cls(build(config, make_proposer=reciting))

    @property
    def contract(self) -> Contract:
        """What the replay runs under."""
        return self._desk.engine.contract

    def audit(
        self,
        cases: Iterable[Case],
        *,
        force: bool = False,
        prompts: Sequence[Prompt] = (),
        signed_by: str | None = None,
    ) -> Iterator[Finding]:
        """A finding for every case, as they come. `prompts` are those of receipts that keep only a digest.

        A receipt of another contract is replayed only with `force`.
        """
        known = {prompt_digest(ids): ids for ids in map(self._ids, prompts)}
        waiting = iter(cases)
        live: dict[Answer, _Live] = {}
        more = True
        try:
            while more or live:
                while more and len(live) < TOGETHER:
                    case = next(waiting, None)
                    more = case is not None
                    if case is not None:
                        begun = self._begin(case, known, signed_by, force=force)
                        if isinstance(begun, Finding):
                            yield begun
                        else:
                            live[begun.answer] = begun
                yield from self._step(live)
        finally:
            for answer in live:
                self._desk.abort(answer)

    def _step(self, live: dict[Answer, _Live]) -> list[Finding]:
        found: list[Finding] = []
        for answer in self._desk.step() if live else ():
            entry = live.get(answer)
            if entry is None:
                continue  # another audit's, left in the middle
            while answer.pending and entry.difference is None:
                entry.difference = entry.comparison.take(answer.pending.popleft())
            if entry.difference is not None or answer.finished:
                del live[answer]
                self._desk.abort(answer)  # only does something where the replay went another way
                found.append(entry.finding(self.contract))
        return found

    def _begin(
        self, case: Case, known: Mapping[str, Sequence[int]], signed_by: str | None, *, force: bool
    ) -> Finding | _Live:
        receipt = case.receipt
        if (seen := case.look(signed_by)) is not None:
            return seen
        differences = receipt.contract.differences(self.contract)
        if differences and not force:
            return case.finding(Status.OTHER_CONTRACT, *map(_explain, differences))
        prompt = receipt.prompt_token_ids or known.get(receipt.prompt_digest)
        if prompt is None:
            told = "it keeps only a digest of its prompt, which is not among those given"
            return case.finding(Status.UNREADABLE, told)
        params = receipt.params.clone(logprobs=None, prompt_logprobs=None, speculate=True)
        try:
            asked = self._desk.ask(list(prompt), params)
            answer = self._desk.submit(asked, only=receipt.index)
        except CallerError as error:
            return case.finding(Status.UNREADABLE, f"it cannot be replayed: {error}")
        self._recital.learn(answer.choices[0].engine_id, receipt.token_ids)
        return _Live(case, answer, Comparison(receipt, self._show))

    def _show(self, tokens: Sequence[int]) -> str:
        if self._desk.tokenizer is None or not tokens:
            return ""
        return repr(self._desk.tokenizer.decode(list(tokens)))

    def _ids(self, prompt: Any) -> list[int]:
        """A prompt given beside receipts: token ids, a text, or the messages of a chat."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            return self._desk.chat_prompt(prompt)
        return self._desk.ask(prompt, SamplingParams(max_tokens=0)).token_ids


@dataclass(slots=True)
class _Live:
    """A receipt being replayed. Owned by the Auditor."""

    case: Case
    answer: Answer
    comparison: Comparison
    difference: Difference | None = None

    def finding(self, contract: Contract) -> Finding:
        """What came of it."""
        difference, details = self.difference, list[str]()
        if difference is not None:
            where = "" if difference.position is None else f"position {difference.position}: "
            details.append(where + difference.what)
        if self.case.receipt.contract != contract:
            details.append(f"replayed under another contract, {contract.id}")
        if difference is None:
            return self.case.finding(Status.SAME, *details)
        return self.case.finding(Status.DIFFERENT, *details, position=difference.position)


def audit_files(
    entries: Sequence[Entry],
    *,
    model: str | None = None,
    prompts: Sequence[Prompt] = (),
    signed_by: str | None = None,
    force: bool = False,
    **changes: Any,
) -> Iterator[Finding]:
    """Audit what `ledger.read` found: one engine after another, each for the receipts that describe it.

    `model` and `changes` go before what receipts say of model and settings.
    """
    groups: dict[str, list[Case]] = {}
    for entry in entries:
        if entry.receipt is None:
            yield Finding(entry.where, Status.UNREADABLE, (entry.error,))
            continue
        case = Case(entry.where, entry.receipt)
        if (seen := case.look(signed_by)) is not None:
            yield seen
        else:
            told = [model or case.receipt.model, {**case.receipt.settings, **changes}]
            groups.setdefault(json.dumps(told, sort_keys=True), []).append(case)
    for key, cases in groups.items():
        try:
            auditor = Auditor.load(*json.loads(key))
        except CallerError as error:
            yield from (case.finding(Status.UNREADABLE, f"it cannot be replayed: {error}") for case in cases)
        else:
            yield from auditor.audit(cases, force=force, prompts=prompts)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts, one a line in JSON: token ids, a text, or the messages of a chat."""
    found: list[Prompt] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(json.loads(line))
        except ValueError as error:
            raise BadParameter(f"{path}, line {number} is not JSON: {error}") from None
    return found


def _flaws(receipt: Receipt) -> tuple[str, ...]:
    """What is wrong with a receipt before anything is replayed."""
    flaws = []
    if not receipt.intact:
        flaws.append("it was changed after it was made: its digest does not fit what it says")
    if receipt.signature is not None and not receipt.signature_good:
        flaws.append("its signature is not good")
    return tuple(flaws)


def _explain(difference: tuple[str, str, str]) -> str:
    fact, there, here = difference
    hint = f" (to try: {fact}={there})" if fact.isupper() else ""  # an environment variable
    return f"{fact}: {there} in the receipt, {here} here{hint}"


__all__ = [
    "TOGETHER",
    "Auditor",
    "Case",
    "Comparison",
    "Difference",
    "Finding",
    "Recital",
    "Status",
    "audit_files",
    "read_prompts",
    "reciting",
]
