"""Prompts → engine requests; deltas → answers. What every face of the engine shares.

Text lives here: the engine speaks in token ids. Detokenising and stop strings run while the next frame
is on the device; a stop string found in the text ends its sequence a frame later, and what that frame
computed is dropped unread.
"""

from __future__ import annotations

import datetime as dt
import json
import operator
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

from samewise.engine import Engine
from samewise.errors import BadParameter, BadPrompt
from samewise.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from samewise.params import SamplingParams, derive_seed
from samewise.text.byte_tokens import TokenBytes
from samewise.text.detokenize import TextStream
from samewise.types import Delta, Finish, Sampling, TopLogprobs

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was checked and can be submitted without failing."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int


@dataclass(slots=True)
class _Choice:
    """One of n sequences on its way to text. Owned by its Answer."""

    index: int
    engine_id: int
    stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: int | str | None = None
    frames: int = 0
    accepted: int = 0
    guessed: int = 0
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # guessed and accepted, by whom


class Answer:
    """A request on its way. Owned by the Desk that submitted it."""

    def __init__(self, asked: Asked, request_id: str, desk: Desk, arrival: float) -> None:
        self.asked, self.request_id = asked, request_id
        self._desk = desk
        self._arrival = arrival
        self._first: float | None = None
        self._finished: float | None = None
        self.choices: list[_Choice] = []
        self.pending: deque[Chunk] = deque()  # final, not yet handed to a reader
        self._scores: list[float] = []
        self._score_tops: list[TopLogprobs] = []
        self._cached = 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    def take(self, choice: _Choice, delta: Delta) -> Chunk | None:
        """Fold a delta in; returns what became final, or None."""
        if choice.finish is not None:
            return None
        if choice.index == 0:
            self._scores += delta.scores
            self._score_tops += delta.score_tops
            self._cached = delta.num_cached
        text, num, finish, stop = self._read(choice, delta)
        if num and self._first is None:
            self._first = self._desk.clock()
        tokens, logprobs = list(delta.tokens[:num]), list(delta.logprobs[:num])
        tops = list(delta.tops[:num])
        choice.token_ids += tokens
        choice.logprobs += logprobs
        choice.tops += tops
        choice.text += text
        choice.frames += delta.frames
        if delta.guessed:
            choice.accepted += delta.accepted
            choice.guessed += delta.guessed
            guessed, accepted = choice.drafters.get(delta.drafter, (0, 0))
            choice.drafters[delta.drafter] = guessed + delta.guessed, accepted + delta.accepted
        choice.finish, choice.stop_reason = finish, stop
        if self.finished:
            self._finished = self._desk.clock()
        if not (tokens or text or finish):
            return None
        dicts = self._dicts(tokens, logprobs, tops) if self.asked.params.logprobs is not None else None
        return Chunk(
            choice.index, text, tokens, logprobs, dicts, finish, stop, delta.accepted, delta.guessed,
            self.asked.seed,
        )  # fmt: skip

    def prompt_output(self) -> RequestOutput:
        """What is known of the prompt alone. Once the first choice has spoken it changes no more, so any
        thread may ask."""
        return RequestOutput(
            self.request_id, self.asked.text, self.asked.token_ids, self._prompt_logprobs(), [], False,
            self._cached, self._desk.engine.contract.id, RequestMetrics(self._arrival, None, None, 0, 0),
        )  # fmt: skip

    def output(self) -> RequestOutput:
        """Everything so far."""
        ended = sum(len(choice.token_ids) for choice in self.choices)
        return RequestOutput(
            self.request_id,
            self.asked.text,
            self.asked.token_ids,
            self._prompt_logprobs(),
            [self._completion(choice) for choice in self.choices],
            self.finished,
            self._cached,
            self._desk.engine.contract.id,
            RequestMetrics(
                self._arrival,
                self._first,
                self._finished,
                ended,
                sum(choice.accepted for choice in self.choices),
                sum(choice.guessed for choice in self.choices),
                sum(choice.frames for choice in self.choices),
                self._drafters(),
            ),
        )

    def _drafters(self) -> dict[str, tuple[int, int]]:
        names = sorted({name for choice in self.choices for name in choice.drafters})
        fared = {name: [c.drafters.get(name, (0, 0)) for c in self.choices] for name in names}
        return {name: (sum(g for g, _ in some), sum(a for _, a in some)) for name, some in fared.items()}

    def _read(self, choice: _Choice, delta: Delta) -> tuple[str, int, str | None, int | str | None]:
        """(text, how many tokens count, why it ended, what stopped it), cutting at a stop string."""
        params, stream = self.asked.params, choice.stream
        text = ""
        stopped = delta.finish is Finish.STOP
        for i, token in enumerate(delta.tokens if stream else ()):
            assert stream is not None
            last = stopped and delta.stop_id is not None and i == len(delta.tokens) - 1
            if last and not params.include_stop_str_in_output:
                break  # the token that ends the text is not part of the text
            piece, match = stream.push(token)
            text += piece
            if match is not None:
                self._desk.engine.end(choice.engine_id)
                return text, i + 1, Finish.STOP.value, match
        if delta.finish is not None and stream is not None:
            text += stream.flush()
        finish = delta.finish.value if delta.finish is not None else None
        asked_for = delta.stop_id in (params.stop_token_ids or ())  # end-of-text by itself is no reason
        stop = delta.stop_id if stopped and asked_for else None
        return text, len(delta.tokens), finish, stop

    def _completion(self, choice: _Choice) -> CompletionOutput:
        wanted = self.asked.params.logprobs is not None
        return CompletionOutput(
            choice.index,
            choice.text,
            list(choice.token_ids),
            sum(choice.logprobs),
            self._dicts(choice.token_ids, choice.logprobs, choice.tops) if wanted else None,
            choice.finish,
            choice.stop_reason,
            list(choice.logprobs),
            self.asked.seed,
        )

    def _dicts(
        self, tokens: list[int], logprobs: list[float], tops: list[TopLogprobs]
    ) -> list[dict[int, Logprob]]:
        decode = self._desk.decode_token
        return [
            _alternatives(token, logprob, top, decode)
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.asked.params.prompt_logprobs is None:
            return None
        tokens = self.asked.token_ids[1 : 1 + len(self._scores)]
        return [None, *self._dicts(tokens, self._scores, self._score_tops)]


def _alternatives(
    token: int, logprob: float, top: TopLogprobs, decode: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The chosen token first, then the alternatives in order; each once."""
    ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
    found = {token: Logprob(logprob, ranks.get(token), decode(token))}
    for other, value in top:
        if other != token:
            found[other] = Logprob(value, ranks[other], decode(other))
    return found


@dataclass(slots=True)
class Score:
    """A completion being scored. Owned by the Desk."""

    before: list[int]
    after: list[int]
    engine_id: int = -1
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        raise BadPrompt(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    try:
        # numpy's whole numbers are as good as ours; True is not one, and is refused as it stands
        return [token if isinstance(token, bool) else operator.index(token) for token in prompt]
    except TypeError:
        odd = next(token for token in prompt if not hasattr(token, "__index__"))
        raise BadPrompt(f"the prompt holds {odd!r}; a prompt is text or a list of token ids") from None


class Desk:
    """Checks prompts, submits them, and hands deltas to the answers they belong to."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.clock = engine, clock
        self.tokenizer = engine.loaded.tokenizer
        self.eos_ids = engine.loaded.eos_ids
        self.spelling = TokenBytes.of(self.tokenizer)
        self._words: dict[int, str] = {}  # tokens as log-probabilities name them
        self._open: dict[int, tuple[Answer, _Choice]] = {}
        self._scoring: dict[int, Score] = {}
        self._count = 0

    # ---- in

    def default_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults, as far as it says anything."""
        generation = self.engine.loaded.generation
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            found["temperature"] = 0.0
        if generation.get("max_new_tokens"):
            found["max_tokens"] = generation["max_new_tokens"]
        return SamplingParams(**found)

    def ask(self, prompt: Prompt, params: SamplingParams) -> Asked:
        """Check a request. Raises before anything was queued."""
        text, ids = self._tokens(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        self.engine.refuse_unknown(ids)
        longest = self.engine.max_model_len
        limits = self.engine.scheduler.limits
        room = min(longest, (limits.num_pages - 1) * limits.page) - len(ids)
        most = max(1, room) if params.max_tokens is None else params.max_tokens
        self.engine.scheduler.refuse_misfit(len(ids), most)
        if params.stops and self.tokenizer is None:
            raise BadParameter(f"stop={params.stop!r}: this model has no tokenizer; use stop_token_ids")
        if params.grammar is not None:
            self.engine.grammars.check(params.grammar)
        seed = params.seed if params.seed is not None else derive_seed(self.engine.config.seed, ids, 0)
        self._sampling(params, seed, 0)
        return Asked(text, ids, params, most, seed)

    def submit(self, asked: Asked, *, salt: bytes = b"", only: int | None = None) -> Answer:
        """Queue a checked request: n sequences, the first of which reads the prompt for all.

        With `only`, that choice alone.
        """
        self._count += 1
        answer = Answer(asked, str(self._count), self, self.clock())
        try:
            for index in range(asked.params.n) if only is None else (only,):
                self._add(answer, index, salt)
        except BaseException:
            self.abort(answer)  # all of it or nothing: a full queue may refuse the last of n
            raise
        return answer

    def _add(self, answer: Answer, index: int, salt: bytes) -> None:
        asked, params = answer.asked, answer.asked.params
        engine_id = self.engine.add(
            asked.token_ids,
            self._sampling(params, asked.seed, index),
            max_tokens=asked.max_tokens,
            verify=params.verify,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            salt=salt,
            share=params.share,
            speculate=params.speculate,
            leader=answer.choices[0].engine_id if answer.choices else None,
        )
        choice = _Choice(index, engine_id, self._stream(asked))
        answer.choices.append(choice)
        self._open[engine_id] = (answer, choice)

    def submit_score(self, before: list[int], after: list[int]) -> Score:
        """Queue a completion to be scored after its prompt."""
        score = Score(before, after)
        score.engine_id = self.engine.add(before + after, Sampling(), max_tokens=0, score_from=len(before))
        self._scoring[score.engine_id] = score
        return score

    def drop_score(self, score: Score) -> None:
        """Forget a score that is not wanted any more; nothing happens if it is there."""
        if self._scoring.pop(score.engine_id, None) is not None:
            self.engine.abort(score.engine_id)

    def _sampling(self, params: SamplingParams, seed: int, index: int) -> Any:
        return params.resolve(
            vocab=self.engine.loaded.arch.vocab,
            eos_ids=self.eos_ids,
            encode=self._encode_word if self.tokenizer is not None else None,
            seed=seed,
            index=index,
        )

    def _encode_word(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _stream(self, asked: Asked) -> TextStream | None:
        params = asked.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self.tokenizer,
            asked.token_ids,
            stops=params.stops,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            spelling=self.spelling,
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise BadPrompt(
                    f"a prompt mapping needs 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
                )
            prompt = cast("str", prompt["prompt"])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadPrompt("this model has no tokenizer; give token ids instead of text")
            if not prompt:
                raise BadPrompt("the prompt is empty; give some text or token ids")
            return prompt, self.encode(prompt, add_special_tokens=True)
        return None, _ids(prompt)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text's token ids."""
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate, which no encoding holds
            raise BadPrompt(f"the text cannot be tokenised: {error}; is it valid Unicode?") from error

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template: Any
    ) -> list[int]:
        """Token ids of a conversation under the model's own chat template. The clock is not asked."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise BadPrompt("this model has no chat template; use generate() with a plain prompt")
        if not messages:
            raise BadPrompt("the conversation is empty; give at least one message")
        for message in messages:
            said = isinstance(message, Mapping) and ("content" in message or "tool_calls" in message)
            if not said or "role" not in message:
                raise BadPrompt(f"a message is a mapping with 'role' and 'content', not {message!r}")
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=pin_clock(self.template(tools=template.get("tools")), self.engine.config.date),
                **template,
            )
        except jinja2.exceptions.UndefinedError as error:
            raise BadPrompt(
                f"the chat template needs something it was not given: {error}; see date=…"
            ) from error
        except Exception as error:  # a template is the model's author's program: it may raise anything
            raise BadPrompt(f"the chat template refused the conversation: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def template(self, tools: Any = None) -> str:
        """The model's chat template; some have another one for conversations with tools."""
        return str(self.tokenizer.get_chat_template(tools=tools))

    # ---- out

    def step(self) -> list[Answer]:
        """One engine step. What became final waits in `pending` of the answers returned.

        Whoever steps, every answer gets its own: a stream left open loses nothing to a call beside it.
        """
        with _uninterrupted():
            return self._step()

    def _step(self) -> list[Answer]:
        news: dict[Answer, None] = {}  # in the order of the engine's deltas
        for delta in self.engine.step():
            score = self._scoring.get(delta.request_id)
            if score is not None:
                score.logprobs += delta.scores
                score.finished = delta.finish is not None
                if score.finished:
                    del self._scoring[delta.request_id]
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue
            answer, choice = entry
            chunk = answer.take(choice, delta)
            if choice.finish is not None:
                del self._open[delta.request_id]
            if chunk is not None:
                answer.pending.append(chunk)
                news[answer] = None
        return list(news)

    def abort(self, answer: Answer) -> None:
        """Drop what is left of an answer."""
        for choice in answer.choices:
            if choice.finish is None:
                self.engine.abort(choice.engine_id)
                self._open.pop(choice.engine_id, None)
                choice.finish = Finish.ABORT.value

    def decode_token(self, token: int) -> str | None:
        """A single token's text, for people who read log-probabilities."""
        if self.tokenizer is None:
            return None
        found = self._words.get(token)
        if found is None:
            found = self._words[token] = str(self.tokenizer.decode([token]))
        return found

    def spell(self, token: int) -> bytes | None:
        """The bytes a token stands for; None where they are not known apart from its neighbours'."""
        return None if self.spelling is None else self.spelling.bytes_of(token)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the step is done: between two steps nothing is half done, and nothing is lost."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *what: caught.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


def pin_clock(template: str, date: str | None) -> str:
    """A chat template that cannot ask the clock: it sees the configured date, or that there is none.

    transformers offers templates a `strftime_now`. A name set in the template itself goes before it.
    """
    if "strftime_now" not in template:
        return template
    if date is None:
        pinned = "{%- set strftime_now = there_is_no_clock_configure_a_date %}"
    else:
        day = dt.datetime.fromisoformat(date)
        formats = sorted({text for _, text in re.findall(r"strftime_now\(\s*(['\"])(.*?)\1", template)})
        days = json.dumps({text: day.strftime(text) for text in formats})
        pinned = (
            "{%- macro strftime_now(format) %}{%- if format not in " + days + " %}"
            "{{ raise_exception('the date format ' ~ format ~ ' is not written out in the template') }}"
            "{%- endif %}{{ " + days + "[format] }}{% endmacro %}"
        )
    # The newline after a block is dropped, so one that belongs to the template is written twice.
    return pinned + ("\n" if template.startswith("\n") else "") + template


__all__ = ["Answer", "Asked", "Desk", "Prompt", "Score", "pin_clock"]
