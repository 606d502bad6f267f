"""Seeds of requests that give none: drawn for trainers, whose groups are equal requests; else derived."""

from typing import Any

import pytest
from served_app import CHAT, COMPLETIONS, run, served_app

from samewise.errors import BadParameter
from samewise.serve.settings import Keys, ServeSettings

KEYS = Keys.of(["secret"])
HEADERS = {"Authorization": "Bearer secret"}
TOKENS = [65, 66, 67]
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = {"max_tokens": 12, "temperature": 1.0}
NATIVE = {"max_new_tokens": 12, "temperature": 1.0}


def seed_of(reply: Any) -> int:
    """The seed that a reply of any route says."""
    if "meta_info" in reply:
        return int(reply["meta_info"]["seed"])
    if "seeds" in reply:
        return int(reply["seeds"][0])
    return int(reply["choices"][0]["seed"] if "choices" in reply else reply["seed"])


def answer_of(reply: Any) -> Any:
    """What a reply of any route says of the answer itself."""
    if "choices" in reply:
        (choice,) = reply["choices"]
        return choice.get("text") or choice.get("token_ids") or choice["message"]["content"]
    return next(
        reply[name] for name in ("output_ids", "completion_ids", "output", "content") if name in reply
    )


ROUTES: list[tuple[str, Any, Any]] = [  # a body, and how a seed is given in it
    (COMPLETIONS, {"prompt": TOKENS, **LONG}, lambda seed: {"seed": seed}),
    (CHAT, {"messages": MESSAGES, **LONG}, lambda seed: {"seed": seed}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 12, "temperature": 1.0}, lambda s: {"seed": s}),
    ("/v1/messages", {"messages": MESSAGES, "model": None, **LONG}, lambda seed: {"seed": seed}),
    ("/inference/v1/generate", {"token_ids": TOKENS, "sampling_params": LONG},
     lambda seed: {"sampling_params": LONG | {"seed": seed}}),
    ("/generate", {"input_ids": TOKENS, "sampling_params": NATIVE},
     lambda seed: {"sampling_params": NATIVE | {"sampling_seed": seed}}),
    ("/generate/", {"prompts": [TOKENS], **LONG}, lambda seed: {"generation_kwargs": {"seed": seed}}),
    ("/chat/", {"messages": [MESSAGES], **LONG}, lambda seed: {"generation_kwargs": {"seed": seed}}),
]  # fmt: skip


def test_equal_requests_of_a_trainer_get_different_answers_that_can_be_asked_for_again() -> None:
    async def scenario() -> None:
        settings = ServeSettings(training=True, keys=KEYS, model_names=("m",))
        async with served_app(settings, headers=HEADERS) as app:
            for path, body, seeded in ROUTES:
                sent = body | ({"model": "m"} if "model" in body else {})
                first, second = await app.post(path, sent), await app.post(path, sent)
                assert seed_of(first) != seed_of(second), path
                assert answer_of(first) != answer_of(second), path
                again = await app.post(path, sent | seeded(seed_of(first)))
                assert seed_of(again) == seed_of(first), path
                if path != "/v1/responses":  # its items have ids of their own
                    assert answer_of(again) == answer_of(first), path

    run(scenario())


def test_every_prompt_of_a_request_draws_a_seed_and_its_choices_differ() -> None:
    async def scenario() -> None:
        settings = ServeSettings(training=True, keys=KEYS)
        async with served_app(settings, headers=HEADERS) as app:
            reply = await app.post("/generate/", {"prompts": [TOKENS, TOKENS], "n": 2, **LONG})
            first, second, third, fourth = reply["seeds"]
            assert first == second != third == fourth
            assert len({tuple(ids) for ids in reply["completion_ids"]}) == 4
            greedy = [await app.complete(TOKENS) for _ in range(2)]
            assert seed_of(greedy[0]) == seed_of(greedy[1])

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "fresh"),
    [({}, False), ({"unseeded": "fresh"}, True), ({"unseeded": "prompt", "training": True}, False)],
)
def test_the_setting_decides(settings: Any, fresh: bool) -> None:
    async def scenario() -> None:
        async with served_app(ServeSettings(keys=KEYS, **settings), headers=HEADERS) as app:
            seeds = [seed_of(await app.complete(TOKENS, temperature=1.0)) for _ in range(2)]
            assert (seeds[0] != seeds[1]) == fresh

    run(scenario())


def test_another_word_is_refused() -> None:
    with pytest.raises(BadParameter, match="unseeded='never': choose one of fresh, prompt"):
        ServeSettings(unseeded="never")
