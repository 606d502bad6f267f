"""Routes of the model itself: its names, and text as its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from samewise.anthropic.bodies import CountTokensReply
from samewise.anthropic.parse import parse_count
from samewise.errors import CallerError
from samewise.llm.aio import AsyncLLM
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.bodies import (
    DetokenizeBody,
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeBody,
    TokenizeReply,
)
from samewise.openai.errors import ApiError, invalid
from samewise.openai.json_body import validate
from samewise.openai.messages import conversation, template_kwargs
from samewise.openai.parse import template_tools, thinking_fields
from samewise.openai.replies import encode_slices
from samewise.openai.tokenizer_info import tokenizer_info
from samewise.openai.unsupported import refuse_unsupported
from samewise.serve.http import JsonResponse, SlicedResponse, until_disconnect
from samewise.serve.requests import Requests
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import Worker


class ModelRoutes:
    """The handlers of these routes."""

    def __init__(
        self, worker: Worker, settings: ServeSettings, requests: Requests, unread: UnreadBudget
    ) -> None:
        self._worker, self._settings, self._requests, self._unread = worker, settings, requests, unread
        self._started = int(time.time())

    async def models(self, _: Request) -> Response:
        """List the model's names."""
        llm = self._worker.llm
        reply: ModelList = {
            "object": "list",
            "data": [self._card(name, llm) for name in self._requests.names(llm)],
        }
        return JsonResponse(reply)

    async def model(self, request: Request) -> Response:
        """Describe one of the model's names."""
        llm = self._worker.llm
        return JsonResponse(self._card(self._requests.name(request.path_params["model_id"], llm), llm))

    def _card(self, name: str, llm: AsyncLLM) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "samewise",
            "root": llm.config.model,
            "parent": None,
            "max_model_len": llm.max_model_len,
            "contract": llm.contract.id,
        }

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        return await self._convert(request, self._tokenize)

    async def _convert(self, request: Request, convert: Callable[[bytes, AsyncLLM], Any]) -> Response:
        """The answer to a body, made in a thread."""
        llm, owner = self._worker.llm, self._requests.owner(request)
        with self._requests.body(request) as body:
            raw = await body.read(self._settings.limits.body_timeout)

            def work() -> list[bytes]:
                return list(encode_slices(convert(raw, llm)))

            converted = self._requests.run(work, owner)
            pieces = await until_disconnect(request.receive, converted)
        return SlicedResponse(pieces, unread=self._unread, owner=owner)

    def _tokenize(self, raw: bytes, llm: AsyncLLM) -> TokenizeReply:
        body = validate(TokenizeBody, self._requests.json(raw))
        self._requests.name(body.model, llm)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give a prompt or messages, one of them")
        try:
            if body.prompt is not None:
                special = body.add_special_tokens is not False
                llm.intake.refuse_endless(body.prompt)
                tokens = llm.intake.encode(body.prompt, add_special_tokens=special)
            else:
                refuse_unsupported(body, add_special_tokens=False)
                messages = conversation(body.messages or [])
                special = self._settings.special_tokens_in_content
                kwargs = template_kwargs(body, special=special) | template_tools(body.tools)
                if llm.intake.tokenizer is not None and llm.intake.tokenizer.chat_template:
                    kwargs |= thinking_fields(body, llm.intake.template())
                tokens = llm.intake.chat_prompt(messages, **kwargs)
        except CallerError as error:
            raise ApiError.of(error, prompt_field="messages" if body.messages else "prompt") from error
        reply: TokenizeReply = {
            "count": len(tokens),
            "max_model_len": llm.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = llm.intake.token_strings(tokens)
        return reply

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        return await self._convert(request, self._count_tokens)

    def _count_tokens(self, raw: bytes, llm: AsyncLLM) -> CountTokensReply:
        parsed = parse_count(self._requests.json(raw), self._requests.options())
        self._requests.name(parsed.model, llm)
        try:
            return {"input_tokens": len(llm.intake.chat_prompt(parsed.messages, **parsed.template))}
        except CallerError as error:
            raise ApiError.of(error, prompt_field="messages") from error

    async def get_tokenizer_info(self, _: Request) -> Response:
        """The tokenizer's configuration."""
        return JsonResponse(tokenizer_info(self._worker.llm.intake.tokenizer))

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        return await self._convert(request, self._detokenize)

    def _detokenize(self, raw: bytes, llm: AsyncLLM) -> DetokenizeReply:
        body = validate(DetokenizeBody, self._requests.json(raw))
        self._requests.name(body.model, llm)
        try:
            return {"prompt": llm.intake.decode(body.tokens)}
        except CallerError as error:
            raise ApiError.of(error, prompt_field="tokens") from error


__all__ = ["ModelRoutes"]
