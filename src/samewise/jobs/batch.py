"""Answer a file of requests, in OpenAI's batch format, into another file; resumable after any interruption.

Each answer is appended as one line and is on disk before the next is begun. A run over an existing output
file keeps every finished answer, cuts off an incomplete last line and answers the rest. Requests join the
engine as others end, so answers are in the order in which they were finished.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from samewise.engine import Engine
from samewise.errors import BadParameter, CallerError, GuaranteeLost, RequestFailed, SamewiseError
from samewise.jobs.batch_file import BatchLine, OutputFile, OutputLine, is_answer, line_numbers, read_lines
from samewise.llm.answer import Answer
from samewise.llm.step_loop import StepLoop
from samewise.openai.errors import ApiError
from samewise.openai.parse import parse, served_name
from samewise.openai.replies import refuse_aborted, respond
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.outputs import RequestOutput
from samewise.receipts import SigningKey, is_complete
from samewise.text.compile_process import ChildLost

log = logging.getLogger("samewise")


@dataclass(slots=True)
class BatchSummary:
    """Counts of the lines of a batch."""

    total: int = 0
    done_before: int = 0  # by an earlier run
    answered: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Lines that have an output line by now."""
        return self.done_before + self.answered + self.failed


@dataclass(slots=True)
class _LiveLine:
    """A line whose request is running. Owned by a BatchRunner."""

    line: BatchLine
    parsed: ParsedRequest
    answers: list[Answer]

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def num_choices(self) -> int:
        return len(self.answers) * self.parsed.params.n


class BatchRunner:
    """Answers lines on one engine. Owns the engine's step loop."""

    def __init__(self, engine: Engine, *, names: tuple[str, ...] = (), key: SigningKey | None = None) -> None:
        self._loop, self._key = StepLoop(engine), key
        self._names = (*names, engine.config.model)
        self._options = ParseOptions.of(
            self._loop.intake, proposer=engine.config.proposer, contract_id=engine.contract.id
        )
        # Twice what runs at once: the engine's queue then never runs empty between two lines.
        self._max_choices = 2 * engine.config.max_num_seqs
        self._num_choices = 0

    def run(self, lines: Iterator[BatchLine]) -> Iterator[tuple[BatchLine, OutputLine]]:
        """The output of every line, as they are finished. Closing the iterator aborts what is running."""
        live: dict[Answer, _LiveLine] = {}
        more = True
        try:
            while more or live:
                while more and self._num_choices < self._max_choices:
                    line = next(lines, None)
                    more = line is not None
                    if line is not None:
                        started = self._start(line)
                        if isinstance(started, _LiveLine):
                            live |= dict.fromkeys(started.answers, started)
                            self._num_choices += started.num_choices
                        else:
                            yield line, started
                if live:
                    yield from self._step(live)
        finally:
            for answer in live:
                self._loop.abort(answer)
            self._num_choices = 0

    def _start(self, line: BatchLine) -> _LiveLine | OutputLine:
        if line.error is not None:
            return invalid_line(line, line.error)
        try:
            parsed = parse(line.url, line.body, self._options)
            self._refuse(parsed)
            checked = parsed.check(self._loop.intake)
            salt = (parsed.cache_salt or "").encode(errors="surrogatepass")
            return _LiveLine(line, parsed, self._submit_all(checked, salt))
        except (ApiError, CallerError) as error:
            return _failure(line, error)
        except ChildLost:  # of this line's grammar, in a process of its own
            log.exception("line %d failed", line.number)
            return _failure(line, RequestFailed("see the log"))
        except SamewiseError:
            raise  # of the machine or the engine: the other lines would fail too
        except Exception as error:
            log.exception("line %d failed", line.number)
            return _failure(line, error)

    def _submit_all(self, checked: list[Any], salt: bytes) -> list[Answer]:
        """The answers of all prompts of a line. If one prompt is refused, those before it are aborted."""
        answers: list[Answer] = []
        try:
            for one in checked:
                answers.append(self._loop.submit(one, salt=salt))  # noqa: PERF401 - kept up to an error
        except BaseException:
            for answer in answers:
                self._loop.abort(answer)
            raise
        return answers

    def _refuse(self, parsed: ParsedRequest) -> None:
        if parsed.stream:
            raise ApiError("stream: a batch is not streamed; leave it out", param="stream")
        served_name(parsed.model, self._names, remedy=", and --served-model-name gives it another name")

    def _step(self, live: dict[Answer, _LiveLine]) -> list[tuple[BatchLine, OutputLine]]:
        finished: list[tuple[BatchLine, OutputLine]] = []
        for answer in self._step_engine():
            entry = live.get(answer)
            if entry is not None and entry.finished:
                for one in entry.answers:
                    del live[one]
                self._num_choices -= entry.num_choices
                finished.append((entry.line, self._answer(entry)))
        return finished

    def _step_engine(self) -> list[Answer]:
        """One step. A request that makes it fail ends with an error, and the others are computed again."""
        try:
            return self._loop.step()
        except Exception as error:
            if self._loop.engine.lost is not None or isinstance(error, GuaranteeLost):
                raise
            log.exception("a step failed; its requests are computed again, one at a time")
            return self._loop.recover(blame=True)

    def _answer(self, entry: _LiveLine) -> OutputLine:
        if any(answer.failed for answer in entry.answers):
            return _failure(entry.line, RequestFailed("see the log"))
        try:
            return _response(entry.line, 200, self._respond(entry))
        except (ApiError, CallerError) as error:
            return _failure(entry.line, error)
        except SamewiseError:
            raise
        except Exception as error:
            log.exception("the answer to line %d cannot be written", entry.line.number)
            return _failure(entry.line, error)

    def _respond(self, entry: _LiveLine) -> Mapping[str, Any]:
        parsed, intake = entry.parsed, self._loop.intake
        outputs = [answer.output() for answer in entry.answers]
        refuse_aborted(outputs)
        return respond(
            parsed, outputs, model=parsed.model or self._names[0], created=int(time.time()),
            id=("chatcmpl-" if parsed.chat else "cmpl-") + _id(entry.line), decode=intake.decode,
            token_bytes=intake.token_bytes, receipts=self._receipts(parsed, outputs),
        )  # fmt: skip

    def _receipts(self, parsed: ParsedRequest, outputs: list[RequestOutput]) -> list[OutputLine] | None:
        if not parsed.receipt or not all(map(is_complete, outputs)):
            return None
        return [
            receipt.as_json()
            for output in outputs
            for receipt in self._loop.receipts(output, parsed.params, key=self._key)
        ]


AnswerLines = Callable[[Iterator[BatchLine], Callable[[str], None]], Iterator[tuple[BatchLine, OutputLine]]]
"""Answers lines, in any order. The second argument is called with the contract of the engines, before the
first answer: it raises BadParameter where the output was begun under another one."""


def run(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    make_engine: Callable[[], Engine],
    *,
    names: tuple[str, ...] = (),
    key: SigningKey | None = None,
    retry: bool = False,
    force: bool = False,
    on_progress: Callable[[BatchSummary], None] = lambda _: None,
    on_error: Callable[[int, str], None] = lambda *_: None,
) -> BatchSummary:
    """Answer every line of `source` that `target` has no output for. The engine is made only if one is left.

    Further parameters are those of `answer_file`.
    """

    def answer(
        lines: Iterator[BatchLine], check_contract: Callable[[str], None]
    ) -> Iterator[tuple[BatchLine, OutputLine]]:
        engine = make_engine()
        check_contract(engine.contract.id)
        yield from BatchRunner(engine, names=names, key=key).run(lines)

    return answer_file(
        source, target, answer, retry=retry, force=force, on_progress=on_progress, on_error=on_error
    )


def answer_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    answer: AnswerLines,
    *,
    retry: bool = False,
    force: bool = False,
    on_progress: Callable[[BatchSummary], None] = lambda _: None,
    on_error: Callable[[int, str], None] = lambda *_: None,
) -> BatchSummary:
    """Answer every line of `source` that `target` has no output for; `answer` is called only if one is left.

    `on_progress` is called after every line, `on_error` with the number and error of every line that failed.
    `retry`: lines that failed before are tried again. `force`: continue a file of another contract.
    """
    numbers = line_numbers(source)
    if Path(target).exists() and Path(target).samefile(source):
        raise BadParameter(
            f"{source} cannot be input and output; give another file for the answers", param="target"
        )
    with OutputFile(target, retry=retry) as output:
        if unknown := sorted(map(str, output.done - numbers.keys())):
            raise BadParameter(
                f"{target} has an answer to {unknown[0]!r}, which is not in {source}; give another file",
                param="target",
            )
        summary = BatchSummary(total=len(numbers), done_before=len(output.done))
        on_progress(summary)
        if summary.done_before == summary.total:
            return summary

        def check_contract(contract_id: str) -> None:
            if (others := output.contracts - {contract_id}) and not force:
                raise BadParameter(
                    f"{target} was begun under the contract {min(others)}, and this is "
                    f"{contract_id}; give another file, or --force to mix them",
                    param="target",
                )

        done_before = frozenset(output.done)
        left = (line for line in read_lines(source) if line.key not in done_before)
        for line, result in answer(left, check_contract):
            output.append(result)
            if is_answer(result):
                summary.answered += 1
            else:
                summary.failed += 1
                on_error(line.number, _error_message(result))
            on_progress(summary)
    return summary


def invalid_line(line: BatchLine, message: str) -> OutputLine:
    """The output of a line that is not a request."""
    error = {"code": "invalid_line", "message": message, "line": line.number}
    return {"id": "batch_req_" + _id(line), "custom_id": line.custom_id, "response": None, "error": error}


def _response(line: BatchLine, status: int, body: Mapping[str, Any]) -> OutputLine:
    line_id = _id(line)
    response = {"status_code": status, "request_id": "req_" + line_id, "body": body}
    return {"id": "batch_req_" + line_id, "custom_id": line.custom_id, "response": response, "error": None}


def _failure(line: BatchLine, error: Exception) -> OutputLine:
    reply = ApiError.of(error)
    return _response(line, reply.status, reply.body())


def _id(line: BatchLine) -> str:
    """A function of the line's key, so that a resumed batch has the ids of an uninterrupted one."""
    return sha256(repr(line.key).encode(errors="surrogatepass")).hexdigest()[:24]


def _error_message(result: OutputLine) -> str:
    error = result["error"] or result["response"]["body"]["error"]
    return str(error["message"])


__all__ = ["AnswerLines", "BatchRunner", "BatchSummary", "answer_file", "invalid_line", "run"]
