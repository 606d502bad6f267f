"""LLM: the Python face, shaped like vLLM's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from tqdm.auto import tqdm

from samewise.config import EngineConfig, EngineSettings
from samewise.contract import Contract
from samewise.engine import Engine, build
from samewise.errors import BadParameter, BadPrompt
from samewise.llm.answers import Answer, Asked, Desk, Prompt, Score
from samewise.outputs import Chunk, RequestOutput, ScoreOutput
from samewise.params import SamplingParams
from samewise.receipts.receipt import Receipt, make
from samewise.receipts.signing import SigningKey

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers the same way every time.

    `model` is `"smollm2"` (built in), a folder of safetensors, a hub id or a GGUF file. Keywords are
    those of EngineConfig. Use it as a context manager, or call `close()`, to give its memory back.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **settings: Unpack[EngineSettings]) -> None:
        self._start(build(EngineConfig.of(model=os.fspath(model), **settings)))

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """The same face over an engine built by hand."""
        llm = cls.__new__(cls)
        llm._start(engine)  # noqa: SLF001 - an alternative constructor
        return llm

    def _start(self, engine: Engine) -> None:
        self._open: Desk | None = Desk(engine)

    # ---- asking

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt (text, token ids, or a list of either); answers in input order."""
        asked = self._ask_all(_as_list(prompts), sampling_params)
        return [answer.output() for answer in self._run(asked, use_tqdm=use_tqdm)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, under the model's own chat template."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise BadPrompt(
                "a conversation is a list of messages, mappings with 'role' and 'content', "
                f"not {type(messages).__name__}"
            )
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self._desk.chat_prompt(
                one,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for one in several
        ]
        if not prompts:
            raise BadPrompt("the conversation is empty; give at least one message")
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt, yielding what became final as it does. Leaving early aborts it."""
        (asked,) = self._ask_all([prompt], sampling_params)
        desk = self._desk
        answer = desk.submit(asked)
        try:
            while answer.pending or not answer.finished:
                if answer.pending:
                    yield answer.pending.popleft()
                else:
                    desk.step()
        finally:
            desk.abort(answer)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Answer one conversation, streamed."""
        return self.stream(self._desk.chat_prompt(messages), sampling_params)

    def chat_prompt(self, messages: Messages, **template: Any) -> list[int]:
        """Token ids of a conversation under the model's own chat template."""
        return self._desk.chat_prompt(messages, **template)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str | Sequence[int]], *, use_tqdm: bool = False
    ) -> list[ScoreOutput]:
        """Log-probabilities of given completions, read in parallel: bit-equal to generating them."""
        if isinstance(prompts, str) or isinstance(completions, str):
            raise BadParameter("score() takes lists: score([prompt], [completion])")
        if len(prompts) != len(completions):
            raise BadParameter(
                f"{len(prompts)} prompts and {len(completions)} completions; give as many of each"
            )
        pairs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            before = self._desk.ask(prompt, SamplingParams(max_tokens=1)).token_ids
            after = self._completion_ids(completion)
            self.engine.scheduler.refuse_misfit(len(before) + len(after), 0)
            pairs.append((before, after))
        return self._score(pairs, use_tqdm=use_tqdm)

    # ---- what it is

    @property
    def engine(self) -> Engine:
        """The engine underneath: `add`, `step`, `abort`."""
        return self._desk.engine

    @property
    def _desk(self) -> Desk:
        if self._open is None:
            raise BadParameter("this LLM was closed; make a new one")
        return self._open

    @property
    def contract(self) -> Contract:
        """The name of everything the bits depend on."""
        return self.engine.contract

    def receipts(
        self,
        output: RequestOutput,
        params: SamplingParams,
        *,
        hide_prompt: bool = False,
        key: SigningKey | None = None,
    ) -> list[Receipt]:
        """A receipt for each choice of an answer that `params` asked for: see receipts.make."""
        engine = self.engine
        return make(
            output, params, contract=engine.contract, model=engine.config.model, settings=engine.settings,
            hide_prompt=hide_prompt, key=key,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        return self.engine.stats()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of this model."""
        return self._desk.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults; what `generate` uses when given none."""
        return self._desk.default_params()

    def update_weights(self, update: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> Contract:
        """New weights, same process: see Engine.update_weights."""
        return self.engine.update_weights(update)

    def close(self) -> None:
        """Give the model's memory back. Closing twice is fine."""
        if self._open is not None:
            cuda = self._open.engine.device.type == "cuda"
            self._open = None
            if cuda:
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _ask_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Asked]:
        """Check everything before anything is queued."""
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams | Sequence):
            raise BadParameter(f"sampling_params={params!r}: give a SamplingParams or a list of them")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise BadParameter(
                f"{len(prompts)} prompts and {len(each)} SamplingParams; give one, or one each"
            )
        if not all(isinstance(one, SamplingParams) for one in each):
            raise BadParameter("sampling_params is a SamplingParams or a list of them")
        return [self._desk.ask(prompt, one) for prompt, one in zip(prompts, each, strict=True)]

    def _run(self, asked: list[Asked], *, use_tqdm: bool) -> list[Answer]:
        desk, answers = self._desk, []
        try:
            for one in asked:
                answers.append(desk.submit(one))  # noqa: PERF401 - what was submitted must be known if one fails
            with tqdm(total=len(answers), desc="Answers", disable=not use_tqdm, dynamic_ncols=True) as bar:
                left = dict.fromkeys(answers)
                while left:
                    for answer in desk.step():
                        if answer.finished and answer in left:
                            del left[answer]
                            bar.update()
        finally:
            for answer in answers:
                desk.abort(answer)  # only does something if the loop was left early
        return answers

    def _score(self, pairs: list[tuple[list[int], list[int]]], *, use_tqdm: bool) -> list[ScoreOutput]:
        desk = self._desk
        scores: list[Score] = []
        try:
            for before, after in pairs:
                scores.append(desk.submit_score(before, after))
            with tqdm(total=len(pairs), desc="Scores", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while not all(score.finished for score in scores):
                    desk.step()
                    bar.update(sum(score.finished for score in scores) - bar.n)
        finally:
            for score in scores:
                desk.drop_score(score)
        return [ScoreOutput(score.before, score.after, score.logprobs) for score in scores]

    def _completion_ids(self, completion: str | Sequence[int]) -> list[int]:
        if isinstance(completion, str):
            if self._desk.tokenizer is None:
                raise BadPrompt("this model has no tokenizer; give the completion as token ids")
            completion = self._desk.encode(completion, add_special_tokens=False)
        ids = self._desk.ask(completion, SamplingParams(max_tokens=0)).token_ids if completion else []
        if not ids:
            raise BadPrompt("the completion is empty; there is nothing to score")
        return ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several → several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadPrompt(f"prompts are text, token ids, or a list of either, not {type(prompts).__name__}")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") and not isinstance(item, bool) for item in listed):
        return [listed]  # type: ignore[list-item]
    if not listed:
        raise BadPrompt("no prompts were given; give text, token ids, or a list of either")
    return listed  # type: ignore[return-value]


__all__ = ["LLM", "Messages"]
