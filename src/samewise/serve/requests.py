"""What is known of a request before its body is parsed, and what its body is parsed with.

The key it came with, the memory its body takes, the model's names and options, and the threads that parse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from samewise.llm.aio import AsyncLLM
from samewise.machine import num_cores
from samewise.openai.json_body import read_json
from samewise.openai.parse import served_name
from samewise.openai.request import ParseOptions
from samewise.serve.http import HeldBody, refuse_crowded
from samewise.serve.settings import ServeSettings
from samewise.serve.threads import FairThreads
from samewise.serve.worker import Worker
from samewise.shares import SharedBudget

T = TypeVar("T")

INTAKE_THREADS = max(2, min(4, num_cores()))
"""Requests that are parsed and tokenised at once. Set by hand: more would take turns on the interpreter's
lock, and delay the event loop by as much."""

MAX_TRAINING_LOGPROBS = 1024
"""Log-probabilities per token with `--enable-training`: distillation asks for 100. Set by hand."""


class Requests:
    """Reads the requests of one server. `bodies` is the memory that their bodies may take."""

    def __init__(self, worker: Worker, settings: ServeSettings, bodies: SharedBudget) -> None:
        self._worker, self._settings, self._bodies = worker, settings, bodies
        self._threads = FairThreads(INTAKE_THREADS)
        self._options: ParseOptions | None = None  # of the current contract

    async def run(self, work: Callable[[], T], owner: bytes | None) -> T:
        """The result of `work`, which parses or tokenises, in a thread."""
        return await self._threads.run(work, owner=owner)

    def owner(self, request: Request) -> bytes | None:
        """The key that a request came with, where requests of several keys share the server."""
        digest: bytes = request.state.key_digest
        return digest if self._settings.several_owners else None

    def body(self, request: Request) -> HeldBody:
        """The body, to be read and held in a `with`."""
        return HeldBody(request, self._bodies, max_body=self._settings.max_body, owner=self.owner(request))

    def json(self, raw: bytes) -> Any:
        """A body as JSON. Raises ApiError."""
        refuse_crowded(raw, self._settings.limits.max_values)
        return read_json(raw)

    def options(self) -> ParseOptions:
        """The options of the model as it is now."""
        llm, options = self._worker.llm, self._options
        if options is None or options.contract_id != llm.contract.id:  # new weights are another contract
            options = self._options = ParseOptions.of(
                llm.intake,
                proposer=llm.config.proposer,
                contract_id=llm.contract.id,
                special_tokens_in_content=self._settings.special_tokens_in_content,
            )
            defaults = replace(options.defaults, logprobs_mode=self._settings.logprobs_mode)
            limit = MAX_TRAINING_LOGPROBS if self._settings.training else options.max_logprobs
            options = self._options = replace(
                options, defaults=defaults, max_logprobs=limit, fresh_seeds=self._settings.fresh_seeds
            )
        return options

    def names(self, llm: AsyncLLM) -> tuple[str, ...]:
        """The model's names."""
        return self._settings.model_names or (llm.config.model,)

    def name(self, requested: str | None, llm: AsyncLLM) -> str:
        """The model's name in an answer. Raises 404 for a name that is not one of its own."""
        return served_name(requested, self.names(llm))


__all__ = ["Requests"]
