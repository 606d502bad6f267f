"""LLM: the synchronous Python interface, shaped like vLLM's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from tqdm.auto import tqdm

from samewise.config import EngineConfig, settings_signature
from samewise.contract import Contract
from samewise.engine import Engine, build
from samewise.engine.recovery import entry, refuse_nested
from samewise.engine.weights import WeightUpdate
from samewise.errors import BadParameter, BadPrompt
from samewise.llm.answer import Answer
from samewise.llm.gate import check_mode
from samewise.llm.intake import CheckedRequest, CheckedScore, Prompt
from samewise.llm.step_loop import Score, StepLoop
from samewise.outputs import Chunk, RequestOutput, ScoreOutput
from samewise.params import SamplingParams
from samewise.receipts.receipt import Receipt
from samewise.text.chat_template import Messages


class LLM:
    """A model that answers the same way every time.

    `model` is `"smollm2"` (built in), a folder of safetensors, a hub id or a GGUF file. Keywords are those of
    EngineConfig. `close()` it, or leave its context, to free its memory.
    """

    __signature__ = settings_signature()

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **settings: Any) -> None:
        self._begin(build(EngineConfig.of(model=os.fspath(model), **settings)))

    @classmethod
    def over(cls, engine: Engine) -> Self:
        """The same interface over an engine that was built already."""
        llm = cls.__new__(cls)
        llm._begin(engine)  # noqa: SLF001 - an alternative constructor
        return llm

    def _begin(self, engine: Engine) -> None:
        self._open: StepLoop[Engine] | None = StepLoop(engine)

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt (text, token ids, or a list of either); answers in input order."""
        checked = self._check_all(_as_list(prompts), sampling_params)
        return [answer.output() for answer in self._run(checked, use_tqdm=use_tqdm)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_content: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, under the model's own chat template.

        `special_tokens_in_content=False`: control tokens in messages, such as `<|im_end|>`, are read as text.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise BadPrompt(
                "a conversation is a list of messages, mappings with 'role' and 'content', "
                f"not {type(messages).__name__}",
                param="messages",
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = dict(chat_template_kwargs or {}, special_tokens_in_content=special_tokens_in_content)
        prompts = [
            self.chat_prompt(conversation, add_generation_prompt=add_generation_prompt, **template)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        if not prompts:
            raise BadPrompt("the conversation is empty; give at least one message", param="messages")
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt, yielding chunks as they become final. Leaving early aborts the request."""
        (checked,) = self._check_all([prompt], sampling_params)
        loop, answers = self._loop, list[Answer]()
        try:
            answer = loop.submit(checked, streamed=True, into=answers)
            while answer.pending or not answer.finished:
                if answer.pending:
                    yield answer.pending.popleft()
                else:
                    loop.step()
        finally:
            for answer in answers:
                loop.abort(answer)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Answer one conversation, streamed."""
        return self.stream(self.chat_prompt(messages), sampling_params)

    def chat_prompt(self, messages: Messages, /, **template: Any) -> list[int]:
        """Token ids of a conversation under the model's own chat template."""
        return self._loop.intake.chat_prompt(messages, **template)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | Sequence[int]],
        *,
        temperature: float = 1.0,
        use_tqdm: bool = False,
    ) -> list[ScoreOutput]:
        """Log-probabilities of given completions, read in parallel: bit-equal to generating them.

        At another `temperature` than 1: to generating at it with `logprobs_mode="processed_logprobs"`.
        """
        if isinstance(prompts, str) or isinstance(completions, str):
            raise BadParameter("score() takes lists: score([prompt], [completion])", param="prompts")
        if len(prompts) != len(completions):
            raise BadParameter(
                f"{len(prompts)} prompts and {len(completions)} completions; give as many of each",
                param="completions",
            )
        check = self._loop.intake.check_score
        pairs = zip(prompts, completions, strict=True)
        checked = [check(prompt, completion, temperature) for prompt, completion in pairs]
        return self._score(checked, use_tqdm=use_tqdm)

    # ---- what it is

    @property
    def engine(self) -> Engine:
        """The engine underneath: `add`, `step`, `abort`."""
        return self._loop.engine

    @property
    def contract(self) -> Contract:
        """Everything the output bits depend on."""
        return self.engine.contract

    def receipts(self, output: RequestOutput, params: SamplingParams, **options: Any) -> list[Receipt]:
        """A receipt for each choice of an answer; options are those of `StepLoop.receipts`."""
        return self._loop.receipts(output, params, **options)

    @property
    def weights_version(self) -> int:
        """How often the weights were replaced."""
        return self.engine.weights_version

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        return self.engine.stats()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of this model."""
        return self._loop.intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults; what `generate` uses when given none."""
        return self._loop.intake.default_params()

    @entry
    def update_weights(self, update: WeightUpdate, *, mode: str | None = None) -> Contract:
        """Replace the weights in this process: see Engine.update_weights.

        `mode` says what becomes of streams that are open: `wait` reads them to their end first, `abort` ends
        them, `keep` goes on with them under the new weights. Without it there may be none.
        """
        loop = self._begin_call()
        if mode is None:
            return self.engine.update_weights(update)
        check_mode(mode)
        checked = self.engine.read_update(update)  # before any stream is aborted
        if mode == "abort":
            loop.abort_all()
        while mode == "wait" and not loop.idle:
            loop.step()
        return loop.update_weights(checked)

    def close(self) -> None:
        """Free the model's memory. Closing twice is fine."""
        if self._open is not None:
            on_cuda = self._open.engine.device.type == "cuda"
            self._open = None
            if on_cuda:
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    @property
    def _loop(self) -> StepLoop[Engine]:
        if self._open is None:
            raise BadParameter("this LLM was closed; make a new one")
        return self._open

    def _begin_call(self) -> StepLoop[Engine]:
        """Begin a call that ends its requests: one at a time runs, so what an earlier one left is dropped."""
        refuse_nested(self)
        self._loop.abort_orphans()
        return self._loop

    def _check_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[CheckedRequest]:
        """Check every request before any is queued."""
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams | Sequence):
            raise BadParameter(
                f"sampling_params={params!r}: give a SamplingParams or a list of them",
                param="sampling_params",
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise BadParameter(
                f"{len(prompts)} prompts and {len(each)} SamplingParams; give one, or one each",
                param="sampling_params",
            )
        if not all(isinstance(one, SamplingParams) for one in each):
            raise BadParameter(
                "sampling_params is a SamplingParams or a list of them", param="sampling_params"
            )
        check = self._loop.intake.check
        return [check(prompt, one) for prompt, one in zip(prompts, each, strict=True)]

    @entry
    def _run(self, requests: list[CheckedRequest], *, use_tqdm: bool) -> list[Answer]:
        loop, answers = self._begin_call(), list[Answer]()
        try:
            for checked in requests:
                loop.submit(checked, into=answers)
            with tqdm(total=len(answers), desc="Answers", disable=not use_tqdm, dynamic_ncols=True) as bar:
                unfinished = dict.fromkeys(answers)
                while unfinished:
                    # A stream that a signal handler reads between two steps may have got this call's answers.
                    for answer in loop.step() or list(unfinished):
                        if answer.finished and answer in unfinished:
                            del unfinished[answer]
                            bar.update()
        finally:
            for answer in answers:
                loop.abort(answer)  # does nothing for finished answers
        return answers

    @entry
    def _score(self, requests: list[CheckedScore], *, use_tqdm: bool) -> list[ScoreOutput]:
        loop, scores = self._begin_call(), list[Score]()
        try:
            for checked in requests:
                loop.submit_score(checked, into=scores)
            with tqdm(total=len(scores), desc="Scores", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while not all(score.finished for score in scores):
                    loop.step()
                    bar.update(sum(score.finished for score in scores) - bar.n)
        finally:
            for score in scores:
                loop.abort(score)
        return [ScoreOutput(one.checked.prompt, one.checked.completion, one.logprobs) for one in scores]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several → a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadPrompt(
            f"prompts are text, token ids, or a list of either, not {type(prompts).__name__}", param="prompts"
        )
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") and not isinstance(item, bool) for item in listed):
        return [listed]  # type: ignore[list-item]
    if not listed:
        raise BadPrompt("no prompts were given; give text, token ids, or a list of either", param="prompts")
    return listed  # type: ignore[return-value]


__all__ = ["LLM"]
