"""Replay receipts and compare, bit for bit.

The recorded answer is drafted to an ordinary engine, many tokens at a time, with the prefix cache off. The
verifier then computes every token and log-probability itself, in parallel frames, at the speed of prefill;
the ordinary `judge` accepts the draft up to its first wrong token, and the ordinary rules end the sequence.
So an audit has no second implementation of sampling, penalties or stops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samewise.config import EngineConfig
from samewise.contract import ABSENT, ENGINE_VERSION, Contract
from samewise.engine import Engine, build
from samewise.errors import BadParameter, CallerError, GuaranteeLost, MachineError, UnknownModel
from samewise.jobs.compare import Comparison, Difference
from samewise.jobs.finding import Case, Finding, Status
from samewise.jobs.replay import RecordedTokens, make_recorded_tokens
from samewise.llm.answer import Answer
from samewise.llm.intake import Prompt
from samewise.llm.step_loop import StepLoop
from samewise.model.resolve import local_name
from samewise.params import SamplingParams
from samewise.receipts import Receipt, prompt_digest
from samewise.receipts.store import Entry
from samewise.text import grammar
from samewise.text.grammar import Pace

PACE = Pace(first=1.0, per_token=0.01)
"""Processor time that a receipt's grammar may take. Twice a server's, whose machine may be faster."""

MAX_REPLAYS = 32
"""Receipts replayed at once: enough to fill a frame, whatever the lengths of their answers. Set by hand."""


SLOW_GRAMMAR = "it cannot be replayed: its grammar takes too much time to follow"


@dataclass(slots=True)
class _Replay:
    """A receipt being replayed. Owned by the Auditor."""

    case: Case
    answer: Answer
    comparison: Comparison
    difference: Difference | None = None

    def finding(self, contract: Contract) -> Finding:
        difference, details = self.difference, list[str]()
        if difference is not None:
            where = "" if difference.position is None else f"position {difference.position}: "
            details.append(where + difference.description)
        if self.case.receipt.contract != contract:
            details.append(f"replayed under another contract, {contract.id}")
        if difference is None:
            return self.case.finding(Status.SAME, *details)
        return self.case.finding(Status.DIFFERENT, *details, position=difference.position)


class Auditor:
    """Replays receipts on one engine, built with `make_recorded_tokens` and without the prefix cache."""

    def __init__(self, engine: Engine) -> None:
        proposer = engine.proposer
        if not isinstance(proposer, RecordedTokens) or engine.config.enable_prefix_caching:
            raise BadParameter(
                "an Auditor's engine is built with make_proposer=make_recorded_tokens and "
                "enable_prefix_caching=False",
                param="engine",
            )
        self._recorded = proposer
        self._loop = StepLoop(engine)
        self._loop.intake.bound_grammars(PACE)

    @classmethod
    def load(cls, model: str, settings: Mapping[str, Any]) -> Auditor:
        """An auditor with an engine of the settings that a receipt records."""
        config = EngineConfig.of(**{"max_num_seqs": MAX_REPLAYS} | dict(settings) | {"model": model})
        config = replace(config, proposer="none", draft_tokens=4096, enable_prefix_caching=False)
        return cls(build(config, make_proposer=make_recorded_tokens))

    @property
    def contract(self) -> Contract:
        """The contract of the replay."""
        return self._loop.engine.contract

    def audit(
        self,
        cases: Iterable[Case],
        *,
        force: bool = False,
        prompts: Sequence[Prompt] = (),
        signed_by: str | None = None,
    ) -> Iterator[Finding]:
        """A finding for every case, as they are finished. `prompts` serve receipts that hold only a digest.

        A receipt of another contract is replayed only with `force`.
        """
        prompt_ids = {prompt_digest(ids): ids for ids in map(self._token_ids, prompts)}
        waiting = iter(cases)
        replays: dict[Answer, _Replay] = {}
        more = True
        try:
            while more or replays:
                while more and len(replays) < MAX_REPLAYS:
                    case = next(waiting, None)
                    more = case is not None
                    if case is not None:
                        started = self._start(case, prompt_ids, signed_by, force=force)
                        if isinstance(started, Finding):
                            yield started
                        else:
                            replays[started.answer] = started
                yield from self._step(replays)
        finally:
            for answer in replays:
                self._loop.abort(answer)

    def _start(
        self, case: Case, prompt_ids: Mapping[str, Sequence[int]], signed_by: str | None, *, force: bool
    ) -> Finding | _Replay:
        receipt = case.receipt
        if (finding := case.check_unreplayed(signed_by)) is not None:
            return finding
        differences = receipt.contract.differences(self.contract)
        if differences and not force:
            return case.finding(Status.OTHER_CONTRACT, *map(_describe_fact, differences))
        prompt = receipt.prompt_token_ids or prompt_ids.get(receipt.prompt_digest)
        if prompt is None:
            return case.finding(
                Status.UNREADABLE, "it has only its prompt's digest, and no prompt given has that digest"
            )
        params = receipt.params.clone(
            logprobs=None, prompt_logprobs=None, logprob_token_ids=None, speculate=True
        )
        try:
            checked = self._loop.intake.check(list(prompt), params)
            answer = self._loop.submit(checked, only=receipt.index, streamed=True)
        except CallerError as error:
            return case.finding(Status.UNREADABLE, f"it cannot be replayed: {error}")
        self._recorded.record(answer.choices[0].engine_id, receipt.token_ids)
        return _Replay(case, answer, Comparison(receipt, self._show))

    def _step(self, replays: dict[Answer, _Replay]) -> list[Finding]:
        findings: list[Finding] = []
        for answer in self._loop.step() if replays else ():
            replay = replays.get(answer)
            if replay is None:
                continue  # of another `audit` call that was not run to its end
            failed = False
            while answer.pending and replay.difference is None and not failed:
                chunk = answer.pending.popleft()
                failed = chunk.finish_reason == "error"
                replay.difference = None if failed else replay.comparison.add(chunk)
            if failed:
                del replays[answer]
                self._loop.abort(answer)
                findings.append(replay.case.finding(Status.UNREADABLE, SLOW_GRAMMAR))
            elif replay.difference is not None or answer.finished:
                del replays[answer]
                self._loop.abort(answer)  # a replay that differs is still running
                findings.append(replay.finding(self.contract))
        return findings

    def _show(self, tokens: Sequence[int]) -> str:
        tokenizer = self._loop.intake.tokenizer
        return "" if tokenizer is None or not tokens else repr(tokenizer.decode(list(tokens)))

    def _token_ids(self, prompt: Any) -> list[int]:
        """The token ids of a prompt: token ids, a text, or the messages of a chat."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            return self._loop.intake.chat_prompt(prompt)
        return self._loop.intake.check(prompt, SamplingParams(max_tokens=0)).token_ids


def audit_files(
    entries: Sequence[Entry],
    *,
    model: str | None = None,
    prompts: Sequence[Prompt] = (),
    signed_by: str | None = None,
    force: bool = False,
    **settings: Any,
) -> Iterator[Finding]:
    """Audit what `store.read` returned: one engine after another, each for the receipts that describe it.

    `model` and `settings` take precedence over those that receipts record. A model that only a receipt names
    is not fetched from a hub. What the receipts of one engine lead to ends no other one's audit.
    """
    groups: dict[str, list[Case]] = {}
    for entry in entries:
        if entry.receipt is None:
            yield Finding(entry.where, Status.UNREADABLE, (entry.error,))
            continue
        case = Case(entry.where, entry.receipt)
        if (finding := case.check_unreplayed(signed_by)) is not None:
            yield finding
        elif (differences := _known_differences(case.receipt, settings)) and not force:
            yield case.finding(Status.OTHER_CONTRACT, *map(_describe_fact, differences))
        else:
            engine = [model or case.receipt.model, {**case.receipt.settings, **settings}]
            groups.setdefault(json.dumps(engine, sort_keys=True), []).append(case)
    for key, cases in groups.items():
        left = list(cases)
        try:
            named, options = json.loads(key)
            auditor = Auditor.load(model or _local(named, options.get("revision")), options)
            for finding in auditor.audit(cases, force=force, prompts=prompts):
                left.remove(next(case for case in left if case.where == finding.where))
                yield finding
        except (CallerError, MachineError, GuaranteeLost) as error:
            yield from (case.finding(Status.UNREADABLE, f"it cannot be replayed: {error}") for case in left)


def _local(model: str, revision: str | None) -> str:
    """Where a receipt's model is on this machine. A receipt must not make an auditor download."""
    try:
        return local_name(model, revision=revision)
    except UnknownModel as error:
        raise UnknownModel(
            f"{error}, and a model that only a receipt names is not downloaded; name it with --model",
            param="model",
        ) from None


def _known_differences(receipt: Receipt, settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(fact, in the receipt, here) of facts that differ whatever the engine is; found before one is built.

    `settings` are the caller's, which take precedence over the receipt's.
    """
    facts, own = dict(receipt.contract.facts), receipt.settings
    here = {"engine": ENGINE_VERSION, "grammar": grammar.version()}
    for name, fact in (("dtype", "dtype"), ("max_model_len", "context"), ("frame_rows", "frame rows")):
        if name not in settings and fact in facts:
            here[fact] = str(own.get(name))
    if "compile" not in settings and own.get("compile") and facts.get("compile", "off") == "off":
        here["compile"] = "on"
    recorded = {fact: facts.get(fact, ABSENT) for fact in here}
    return [(fact, recorded[fact], here[fact]) for fact in sorted(here) if recorded[fact] != here[fact]]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts from JSON lines: token ids, a text, or the messages of a chat."""
    prompts: list[Prompt] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"cannot read {path}: {error}", param="prompts") from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(json.loads(line))
        except ValueError as error:
            raise BadParameter(f"{path}, line {number} is not JSON: {error}", param="prompts") from None
    return prompts


def _describe_fact(difference: tuple[str, str, str]) -> str:
    fact, recorded, present = difference
    hint = f" (to try: {fact}={recorded})" if fact.isupper() else ""  # an environment variable
    return f"{fact}: {recorded} in the receipt, {present} here{hint}"


__all__ = [
    "MAX_REPLAYS",
    "Auditor",
    "Case",
    "Finding",
    "Status",
    "audit_files",
    "make_recorded_tokens",
    "read_prompts",
]
