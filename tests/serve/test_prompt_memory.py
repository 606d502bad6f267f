"""The tokens of prompts lie in memory until an answer ends: bounded in all, and shared by key."""

import asyncio
from typing import Any

import pytest
from served_app import COMPLETIONS, run, served_app, wait_until

from samewise.serve.limits import ServeLimits
from samewise.serve.settings import Keys, ServeSettings

PROMPT = list(range(1, 41))
LIMIT = 200


@pytest.mark.parametrize("predicted", [0, 10])
def test_prompts_under_way_are_bounded_and_shared(predicted: int) -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["greedy", "modest"]), limits=ServeLimits(max_prompts=LIMIT))
        async with served_app(settings, max_num_seqs=1) as served:

            async def ask(key: str, **body: Any) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0} | body
                if predicted:
                    body["prediction"] = {"type": "content", "content": "abcdefghij"[:predicted]}
                return await served.client.post(COMPLETIONS, json=body, headers=headers)

            waiting = [asyncio.ensure_future(ask("greedy", max_tokens=400)) for _ in range(6)]
            await wait_until(lambda: any(one.done() for one in waiting))
            await wait_until(lambda: served.worker.num_preparing == 0)
            refused = [one.result() for one in waiting if one.done()]
            held = sum(not one.done() for one in waiting)
            assert held * (len(PROMPT) + predicted) <= LIMIT * 3 / 4
            assert held >= 2
            for response in refused:
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (429, "share_used")
                assert f"{LIMIT} of all (--max-prompt-tokens)" in error["message"]
                assert response.headers["retry-after"]
            short = await ask("modest", prompt=PROMPT[:10], max_tokens=1)  # there is room for another key
            assert short.status_code == 200
            whole = await ask("modest", prompt=PROMPT * 10)
            assert whole.status_code == 400
            assert "--max-prompt-tokens" in whole.json()["error"]["message"]
            answers = await asyncio.gather(*waiting)
            texts = {one.json()["choices"][0]["text"] for one in answers if one.status_code == 200}
            assert len(texts) == 1  # those that waited differ in nothing
            for _ in range(6):  # what has ended is not counted any more
                assert (await ask("greedy", max_tokens=1)).status_code == 200
            await served.check_idle()

    run(work())


def test_without_keys_prompts_are_bounded_in_all() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(limits=ServeLimits(max_prompts=LIMIT)), max_num_seqs=1) as served:
            body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
            asking = [asyncio.ensure_future(served.client.post(COMPLETIONS, json=body)) for _ in range(8)]
            answers = await asyncio.gather(*asking)
            codes = [one.json()["error"]["code"] for one in answers if one.status_code != 200]
            assert codes == ["prompts_full"] * 3

    run(work())
