"""Many requests from a file, in OpenAI's batch format, answered into another: resumable at any moment.

Each answer is appended as one line and is on the disk before the next; whoever is killed finds, when run
again, all that was finished, cuts off a line that was torn, and goes on with the rest. The engine is kept
full: requests join it as others end, so the order of the answers is that in which they were finished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from samewise.engine import Engine
from samewise.errors import BadParameter, CallerError
from samewise.jobs.batch_file import Line, Record, Results, read_lines, survey, went_well
from samewise.llm.answers import Answer, Desk
from samewise.openai.errors import ApiError
from samewise.openai.parse import Parsed, Terms, parse, respond
from samewise.openai.parsed import CHAT, Dialect
from samewise.openai.replies import refuse_aborted
from samewise.openai.toolbox import special_tokens
from samewise.outputs import RequestOutput
from samewise.receipts.receipt import make, whole
from samewise.receipts.signing import SigningKey


@dataclass(slots=True)
class Tally:
    """How a batch fared."""

    total: int = 0
    before: int = 0  # finished by an earlier run
    answered: int = 0
    bad: int = 0

    @property
    def done(self) -> int:
        """Lines that have an outcome by now."""
        return self.before + self.answered + self.bad


@dataclass(slots=True)
class _Job:
    """A request on its way. Owned by a Batch."""

    line: Line
    parsed: Parsed
    answers: list[Answer]

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)


class Batch:
    """Answers lines on one engine, as many together as it will take."""

    def __init__(self, engine: Engine, *, names: tuple[str, ...] = (), key: SigningKey | None = None) -> None:
        self._engine, self._desk, self._key = engine, Desk(engine), key
        self._names = (*names, engine.config.model)
        special = special_tokens(self._desk.tokenizer)
        self._terms = Terms(
            defaults=self._desk.default_params(),
            proposer=engine.config.proposer,
            receipts=True,
            dialect=Dialect(self._desk.template, special, engine.contract.id),
        )
        self._room = 2 * engine.config.max_num_seqs  # half of it waits, so that the engine never does
        self._busy = 0

    def run(self, lines: Iterator[Line]) -> Iterator[tuple[Line, Record]]:
        """A record for every line, as they are finished. Leaving early drops what is under way."""
        live: dict[Answer, _Job] = {}
        more = True
        try:
            while more or live:
                while more and self._busy < self._room:
                    line = next(lines, None)
                    more = line is not None
                    if line is not None:
                        begun = self._begin(line)
                        if isinstance(begun, _Job):
                            live |= dict.fromkeys(begun.answers, begun)
                            self._busy += len(begun.answers) * begun.parsed.params.n
                        else:
                            yield line, begun
                if live:
                    yield from self._step(live)
        finally:
            for answer in live:
                self._desk.abort(answer)
            self._busy = 0

    def _step(self, live: dict[Answer, _Job]) -> list[tuple[Line, Record]]:
        found: list[tuple[Line, Record]] = []
        for answer in self._desk.step():
            answer.pending.clear()
            job = live.get(answer)
            if job is not None and job.finished:
                for one in job.answers:
                    del live[one]
                self._busy -= len(job.answers) * job.parsed.params.n
                found.append((job.line, self._answered(job)))
        return found

    def _begin(self, line: Line) -> _Job | Record:
        if line.error is not None:
            return _broken(line, line.error)
        try:
            parsed = parse(line.url, line.body, self._terms)
            self._refuse(parsed)
            prompts = self._prompts(parsed)
            asked = [self._desk.ask(prompt, parsed.params) for prompt in prompts]
            salt = (parsed.cache_salt or "").encode(errors="surrogatepass")
            return _Job(line, parsed, [self._desk.submit(one, salt=salt) for one in asked])
        except (ApiError, CallerError) as error:
            told = ApiError.of(error, prompt="messages" if line.url == CHAT else "prompt")
            return _reply(line, told.status, told.body())

    def _refuse(self, parsed: Parsed) -> None:
        if parsed.stream:
            raise ApiError("stream: a batch is not streamed; leave it out", param="stream")
        if parsed.model is not None and parsed.model not in self._names:
            raise ApiError(
                f"the model {parsed.model!r} is not here; there is {', '.join(map(repr, self._names))}, "
                "and --served-model-name gives it another name",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def _prompts(self, parsed: Parsed) -> list[Any]:
        if not parsed.chat:
            return list(parsed.prompts)
        return [self._desk.chat_prompt(parsed.messages, **parsed.template)]

    def _answered(self, job: _Job) -> Record:
        outputs = [answer.output() for answer in job.answers]
        try:
            refuse_aborted(outputs)
        except ApiError as error:
            return _reply(job.line, error.status, error.body())
        name = ("chatcmpl-" if job.parsed.chat else "cmpl-") + _name(job.line)
        body = respond(
            job.parsed, outputs, model=job.parsed.model or self._names[0], created=int(time.time()), id=name,
            decode=self._decode, spell=self._desk.spell, receipts=self._receipts(job.parsed, outputs),
        )  # fmt: skip
        return _reply(job.line, 200, body)

    def _receipts(self, parsed: Parsed, outputs: list[RequestOutput]) -> list[Record] | None:
        engine = self._engine
        if not parsed.receipt or not all(map(whole, outputs)):
            return None
        return [
            receipt.as_json()
            for output in outputs
            for receipt in make(
                output, parsed.params, contract=engine.contract, model=engine.config.model,
                settings=engine.settings, key=self._key,
            )
        ]  # fmt: skip

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._desk.tokenizer.decode(token_ids))


def run(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    make_engine: Callable[[], Engine],
    *,
    names: tuple[str, ...] = (),
    key: SigningKey | None = None,
    retry: bool = False,
    force: bool = False,
    progress: Callable[[Tally], None] = lambda _: None,
    complain: Callable[[int, str], None] = lambda *_: None,
) -> Tally:
    """Answer every line of `source` that has no outcome in `target` yet. The engine is made if any is left.

    `progress` is told after every line, `complain` of every line that went wrong, by its number.
    `retry`: lines that went wrong before are tried again. `force`: go on with a file that was begun under
    another contract.
    """
    known = survey(source)
    if Path(target).exists() and Path(target).samefile(source):
        raise BadParameter(f"{source} cannot be input and output; give another file for the answers")
    with Results(target, retry=retry) as results:
        if strange := sorted(map(str, results.done - known.keys())):
            raise BadParameter(
                f"{target} has an answer to {strange[0]!r}, which is not in {source}; give another file"
            )
        tally = Tally(total=len(known), before=len(results.done))
        progress(tally)
        if tally.before == tally.total:
            return tally
        batch = Batch(engine := make_engine(), names=names, key=key)
        if (others := results.contracts - {engine.contract.id}) and not force:
            raise BadParameter(
                f"{target} was begun under the contract {min(others)}, and this is "
                f"{engine.contract.id}; give another file, or --force to mix them"
            )
        left = (line for line in read_lines(source) if line.key not in results.done)
        for line, record in batch.run(left):
            results.append(record)
            if went_well(record):
                tally.answered += 1
            else:
                tally.bad += 1
                complain(line.number, _complaint(record))
            progress(tally)
    return tally


def _broken(line: Line, message: str) -> Record:
    """The outcome of a line that is no request."""
    error = {"code": "invalid_line", "message": message, "line": line.number}
    return {"id": "batch_req_" + _name(line), "custom_id": line.custom_id, "response": None, "error": error}


def _reply(line: Line, status: int, body: Record) -> Record:
    name = _name(line)
    response = {"status_code": status, "request_id": "req_" + name, "body": body}
    return {"id": "batch_req_" + name, "custom_id": line.custom_id, "response": response, "error": None}


def _name(line: Line) -> str:
    """The same every time, so that a resumed batch is the batch it would have been."""
    return sha256(repr(line.key).encode(errors="surrogatepass")).hexdigest()[:24]


def _complaint(record: Record) -> str:
    error = record["error"] or record["response"]["body"]["error"]
    return str(error["message"])


__all__ = ["Batch", "Tally", "run"]
