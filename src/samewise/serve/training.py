"""The routes of a trainer: pauses, new weights, tokens in and out. Only with `--enable-training` and a key.

Their shapes are those that vLLM's, SGLang's, TRL's and prime-rl's clients send and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from samewise.llm.gate import check_mode
from samewise.openai import training as wire
from samewise.openai.bodies import CHAT, COMPLETIONS
from samewise.openai.errors import ApiError, invalid, unavailable
from samewise.openai.json_body import read_json
from samewise.outputs import RequestOutput
from samewise.serve.http import HeldBody, JsonResponse
from samewise.serve.worker import Names
from samewise.shares import SharedBudget

if TYPE_CHECKING:
    import torch

    from samewise.serve.app import Service

MAX_PIECE = 2**31
"""Bytes of a body with a tensor, and of all such bodies together: an embedding of 128,000 tokens by 4,096 in
bfloat16 takes 1.4 GB in base64. Set by hand."""

SGLANG_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""SGLang's ways to pause. `retract` frees the memory of what runs when the cache is flushed."""


Tensors = dict[str, "torch.Tensor"]


class TrainingRoutes:
    """The handlers, and the tensors that have come for updates in pieces."""

    def __init__(self, service: Service) -> None:
        self._service, self._answers = service, service.answers
        self._bodies = SharedBudget(MAX_PIECE)
        self._begun: Tensors | None = None  # between /start_weight_update and its finish
        self._single: Tensors = {}  # that came one by one without it, and are not in use yet
        self._single_mode = "keep"
        self._using: asyncio.Task[None] | None = None  # the replacement of single tensors that is under way
        self._labels: dict[int, str] = {}  # versions that trainers named, by number
        self._lock = asyncio.Lock()  # one update at a time

    def routes(self) -> list[Route]:
        """All routes, each with and without a slash at its end unless the two differ."""
        post: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/abort_request": self.abort_request,
            "/update_weights": self.update_weights,
            "/start_weight_update": self.start_weight_update,
            "/finish_weight_update": self.finish_weight_update,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/inference/v1/generate": self.generate_tokens,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/flush_cache": self.flush_cache,
            "/chat": self.chat_trl,
            "/get_sequence_logprobs": self.sequence_logprobs,
            "/update_named_param": self.update_named_param,
            "/init_communicator": self.init_communicator,
            "/init_weight_transfer_engine": self.init_communicator,
            "/close_communicator": self.close_communicator,
        }
        get: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
            "/get_weight_version": self.weight_info,
            "/get_world_size": self.get_world_size,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/flush_cache": self.flush_cache,
            "/v1/loads": self.loads,
            "/health_generate": self._service.ready,
        }
        routes = [Route("/health/", self._service.health, methods=["GET"])]
        for method, handlers in (("POST", post), ("GET", get)):
            for path, handler in handlers.items():
                routes += [Route(one, handler, methods=[method]) for one in (path, f"{path}/")]
        routes.append(Route("/generate", self.generate_sglang, methods=["POST"]))
        routes.append(Route("/generate/", self.generate_trl, methods=["POST"]))
        return routes

    # ---- pauses

    async def pause(self, request: Request) -> Response:
        """Stop generating; `mode` as vLLM's, by default `abort`. An older flag of vLLM's is `wait`."""
        waits = request.query_params.get("wait_for_inflight_requests", "false").lower() in ("true", "1")
        await self._service.worker.llm.pause(_mode(request, "wait" if waits else "abort"))
        return JsonResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        """Go on."""
        await self.use_collected()
        await self._service.worker.llm.resume()
        return JsonResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        """Whether a pause was asked for."""
        return JsonResponse({"is_paused": self._service.worker.llm.paused})

    async def abort_requests(self, request: Request) -> Response:
        """End requests under way with the tokens they have: those of vLLM's list, without one all of them."""
        ids = (await self._body(request)).get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise invalid("request_ids", "give a list of request ids; leave it out for all")
        return await self._abort(None if not ids else wire.request_names(ids))

    async def abort_request(self, request: Request) -> Response:
        """The same as SGLang has it: the request of a `rid`, or with `abort_all` all of them."""
        body = await self._body(request)
        rid = body.get("rid") or ""
        if not isinstance(rid, str):
            raise invalid("rid", "give one request's rid, or abort_all")
        return await self._abort(None if body.get("abort_all") else wire.request_names([rid]))

    async def _abort(self, names: Collection[str] | None) -> Response:
        worker = self._service.worker
        aborted = await (worker.llm.abort_all() if names is None else worker.abort(names))
        return JsonResponse({"status": "aborted", "aborted": aborted})

    async def pause_generation(self, request: Request) -> Response:
        """SGLang's pause, by default `abort`."""
        mode = (await self._body(request)).get("mode", "abort")
        if mode not in SGLANG_MODES:
            raise invalid("mode", f"choose one of {', '.join(SGLANG_MODES)}")
        await self._service.worker.llm.pause(SGLANG_MODES[mode])
        return JsonResponse({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, _: Request) -> Response:
        """The end of SGLang's pause."""
        await self.use_collected()
        await self._service.worker.llm.resume()
        return JsonResponse({"status": "ok", "message": "Generation continued successfully."})

    # ---- weights

    async def update_weights(self, request: Request) -> Response:
        """New weights from a folder; or, after `/start_weight_update`, some tensors."""
        body = await self._body(request, large=True)
        folder = wire.folder_of(body)
        if folder is None:
            await self._add_pieces(body)
            return JsonResponse({"message": "Weights received"})
        await self._replace_all(folder, _mode(request, "keep"), None)
        return JsonResponse({"status": "ok", "message": "Weights updated", **self._version()})

    async def update_weights_from_disk(self, request: Request) -> Response:
        """The same as SGLang has it."""
        body = await self._body(request)
        folder = wire.required(body, "model_path", str, "a folder of safetensors")
        mode = "abort" if body.get("abort_all_requests") else _mode(request, "keep")
        await self._replace_all(folder, mode, body.get("weight_version"))
        message = "Succeeded to update model weights."
        return JsonResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def start_weight_update(self, _: Request) -> Response:
        """Begin an update in pieces. The old weights serve until it is finished."""
        await self.use_collected()
        self._begun = {}
        return JsonResponse({"message": "Weight update started"})

    async def finish_weight_update(self, request: Request) -> Response:
        """Replace the tensors that were sent, all at once."""
        body = await self._body(request)
        begun, self._begun = self._begun, None  # a tensor that comes from now on is refused
        if begun is not None:
            try:
                await self._replace(begun, _mode(request, "keep"), body.get("weight_version"))
            except BaseException:
                self._begun = begun if self._begun is None else self._begun  # to be finished again
                raise
        elif self._single:
            self._single_mode = _mode(request, self._single_mode)
            await self.use_collected()
            self._name_version(body.get("weight_version"))
        else:
            raise ApiError("there is no update to finish; call /start_weight_update", code="invalid_value")
        return JsonResponse({"message": "Weight update finished", **self._version()})

    async def update_named_param(self, request: Request) -> Response:
        """One tensor in the body. Used together with the others, see `use_collected`."""
        body, mode = await self._body(request, large=True), _mode(request, "keep")
        collected = self._single if self._begun is None else self._begun
        await self._collect(collected, [body])
        if collected is self._single:
            self._single_mode = mode
        message = f"Request received, {len(collected)} parameters wait to be updated together"
        return JsonResponse({"message": message, **self._version()})

    async def use_collected(self) -> None:
        """Replace the tensors that came one by one without `/start_weight_update`, all at once.

        Before an answer is begun, the cache is emptied or a pause ends: each replacement alone would be
        packed, probed and certified, and weights of which a part is new would be served. It goes on if the
        client whose request began it leaves; where it fails the tensors are kept for the next request.
        """
        while self._single:
            if self._using is None or self._using.done():
                self._using = asyncio.create_task(self._use_single())
                self._using.add_done_callback(_retrieve)
            await asyncio.shield(self._using)

    async def _use_single(self) -> None:
        async with self._lock:
            used = dict(self._single)
            if used:
                await self._service.worker.llm.update_weights(used, mode=self._single_mode)
                self._forget_single(used)

    def _forget_single(self, used: Tensors) -> None:
        """Drop the tensors that are in use now; one that came meanwhile under the same name stays."""
        for name, tensor in used.items():
            if self._single.get(name) is tensor:
                del self._single[name]

    async def _collect(self, collected: Tensors, bodies: list[Any]) -> None:
        """Add tensors to those of an update, after they were checked."""
        tensors = await asyncio.to_thread(lambda: _tensors(bodies))
        await self._service.worker.llm.check_update(tensors)
        if collected is not self._single and collected is not self._begun:
            raise ApiError(
                "the update ended while these tensors were read; send all of them before it is finished",
                param="tensors", code="invalid_value",
            )  # fmt: skip
        collected |= tensors

    async def _add_pieces(self, body: wire.Json) -> None:
        tensors = wire.as_object(body.get("update_info") or {}).get("tensors")
        if not isinstance(tensors, list):
            raise invalid(
                "update_info", "give weight_dir, a folder of safetensors, or tensors, a list of "
                "{name, dtype, shape, data} after /start_weight_update"
            )  # fmt: skip
        if self._begun is None:
            raise ApiError(
                "tensors come between /start_weight_update and /finish_weight_update", param="tensors"
            )
        await self._collect(self._begun, tensors)

    async def _replace_all(self, folder: str, mode: str, label: object) -> None:
        """Replace every parameter, after which tensors that came one by one before are of no use."""
        older = dict(self._single)
        await self._replace(folder, mode, label)
        self._forget_single(older)

    async def _replace(self, update: Any, mode: str, label: object) -> None:
        llm = self._service.worker.llm
        async with self._lock:
            await llm.update_weights(update, mode=mode)
            self._name_version(label)

    def _name_version(self, label: object) -> None:
        if label is not None:
            self._labels[self._service.worker.llm.weights_version] = str(label)[:200]

    def _label(self, version: int) -> str:
        return self._labels.get(version, str(version))

    def _version(self) -> wire.Json:
        llm = self._service.worker.llm
        return {"weight_version": self._label(llm.weights_version), "contract": llm.contract.id}

    async def weight_info(self, _: Request) -> Response:
        """The weights' version, as the trainer named it, and their contract."""
        return JsonResponse(self._version())

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Empty the prefix cache, if nothing runs."""
        await self.use_collected()
        return JsonResponse({"success": await self._service.worker.llm.reset_prefix_cache()})

    async def flush_cache(self, _: Request) -> Response:
        """The same as SGLang has it: 400 while requests run."""
        await self.use_collected()
        if await self._service.worker.llm.reset_prefix_cache():
            return Response("Cache flushed.\n", media_type="text/plain")
        raise ApiError(
            "the cache was not flushed: requests run; pause, or let them end", code="invalid_value"
        )

    # ---- what it is

    async def get_world_size(self, _: Request) -> Response:
        """One: the engine is one process."""
        return JsonResponse({"world_size": 1})

    async def loads(self, _: Request) -> Response:
        """SGLang's loads, of one rank: slime ends requests until there are none."""
        worker = self._service.worker
        stats = await worker.llm.stats()
        waiting = stats["waiting"] + worker.num_preparing
        load = {"dp_rank": 0, "num_running_reqs": stats["running"], "num_waiting_reqs": waiting}
        return JsonResponse({"version": self._service.version, "loads": [load]})

    async def server_info(self, _: Request) -> Response:
        """The fields that trainers read of vLLM's and SGLang's."""
        llm = self._service.worker.llm
        model, facts = llm.config.model, dict(llm.contract.facts)
        return JsonResponse({
            "vllm_config": {
                "model_config": {
                    "model": model, "dtype": f"torch.{facts['dtype']}", "max_model_len": llm.max_model_len,
                    "logprobs_mode": self._service.settings.logprobs_mode,
                },
                "parallel_config": {"world_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1},
                "weight_transfer_config": None,
            },
            "model_path": model, "dtype": facts["dtype"], "context_length": llm.max_model_len, "tp_size": 1,
            "dp_size": 1, "pp_size": 1, "version": self._service.version, "stats": await llm.stats(),
        } | self._version())  # fmt: skip

    async def init_communicator(self, request: Request) -> Response:
        """Refused: there is no NCCL."""
        raise wire.without_nccl(request.url.path)

    async def close_communicator(self, _: Request) -> Response:
        """Nothing is open."""
        return JsonResponse({"message": "there is no communicator"})

    # ---- tokens

    async def generate_tokens(self, request: Request) -> Response:
        """vLLM's token-in token-out route."""
        body = await self._body(request)
        request_id = str(body.get("request_id") or request.state.request_id)[:200]
        (output,) = await self._answers.complete(
            request, COMPLETIONS, wire.token_request(body), whole_context=True,
            names=Names(frozenset({request_id})),
        )  # fmt: skip
        return JsonResponse(wire.token_reply(request_id, output))

    async def generate_sglang(self, request: Request) -> Response:
        """SGLang's route, which slime sends to."""
        body = await self._body(request)
        completion, many = wire.sglang_request(body)
        names = Names(*wire.sglang_names(body))
        outputs = await self._answers.complete(request, COMPLETIONS, completion, names=names)
        scored, scoring = outputs, wire.sglang_scoring(body, completion)
        if scoring is not None:
            scored = await self._answers.complete(request, COMPLETIONS, scoring, names=names)
            if [one.contract for one in scored] != [one.contract for one in outputs]:
                raise unavailable(
                    "the weights were replaced before the prompt was scored", "weights_replaced"
                )
        start = wire.sglang_start(body)
        replies = [
            wire.sglang_reply(output, choice, self._label(output.weights_version), start, prompt)
            for output, prompt in zip(outputs, scored, strict=True)
            for choice in output.outputs
        ]
        return JsonResponse(replies if many else replies[0])

    async def generate_trl(self, request: Request) -> Response:
        """TRL's route for prompts."""
        (completion,) = wire.trl_request(await self._body(request))
        return JsonResponse(wire.trl_reply(await self._answers.complete(request, COMPLETIONS, completion)))

    async def chat_trl(self, request: Request) -> Response:
        """TRL's route for conversations."""
        bodies = wire.trl_request(await self._body(request))
        answers = [self._answers.complete(request, CHAT, body) for body in bodies]
        outputs: list[RequestOutput] = [output for each in await _all(answers) for output in each]
        return JsonResponse(wire.trl_reply(outputs))

    async def sequence_logprobs(self, request: Request) -> Response:
        """TRL's route for the log-probabilities of given sequences."""
        completion, lengths, num = wire.sequence_request(await self._body(request))
        outputs = await self._answers.complete(request, COMPLETIONS, completion)
        return JsonResponse(wire.sequence_reply(outputs, lengths, num))

    async def _body(self, request: Request, *, large: bool = False) -> wire.Json:
        """The body, a JSON object; empty where there is none.

        Clients send some requests without a body, and then without a Content-Type.
        """
        if _has_no_body(request):
            return {}
        settings = self._service.settings
        limit = MAX_PIECE // 2 if large else settings.max_body
        with HeldBody(request, self._bodies, max_body=limit, owner=None) as held:
            raw = await held.read(settings.limits.body_timeout)
            if not raw.strip():
                return {}
            return wire.as_object(await asyncio.to_thread(read_json, raw))


async def _all(answers: Sequence[Awaitable[list[RequestOutput]]]) -> list[list[RequestOutput]]:
    """All answers, or the first error after the others were ended."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark a task's error as retrieved: the requests that waited for it may all have left."""
    if not task.cancelled():
        task.exception()


def _has_no_body(request: Request) -> bool:
    """Whether the headers say that no body follows."""
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def _mode(request: Request, default: str) -> str:
    return check_mode(request.query_params.get("mode", default))


def _tensors(bodies: list[Any]) -> dict[str, torch.Tensor]:
    """Tensors from the wire, by name."""
    import torch

    pieces = [wire.piece_of(wire.as_object(body)) for body in bodies]
    return {
        piece.name: torch.frombuffer(bytearray(piece.data), dtype=getattr(torch, piece.dtype)).view(
            piece.shape
        )
        for piece in pieces
    }


__all__ = ["MAX_PIECE", "SGLANG_MODES", "TrainingRoutes"]
