"""LLM: what goes in, what comes out, what is refused, and that nothing stays behind."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, CallerError, QueueFull, UnknownModel
from samewise.llm.step_loop import StepLoop
from samewise.outputs import CompletionOutput, RequestOutput
from samewise.testing import Scripted, byte_tokenizer, tiny_engine, tiny_model

PAGE_BYTES = 12288  # of the tiny llama
LETTERS = "abcdefgh "
PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


LETTER_IDS = ids(LETTERS)


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8} | given)


def lettered(**given: Any) -> SamplingParams:
    """Greedy over a few letters, so that the text is plain."""
    return greedy(allowed_token_ids=LETTER_IDS, **{"max_tokens": 16} | given)


def first(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[str]]]:
    return [(o.token_ids, [v.hex() for v in o.token_logprobs]) for out in outputs for o in out.outputs]


def assert_clean(llm: LLM) -> None:
    """Nothing running, nothing waiting, no page held."""
    llm.engine.check()
    assert llm.engine.scheduler.idle
    stats = llm.stats()
    assert stats["pages_available"] == stats["pages"]
    assert not llm._loop._open


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM.over(tiny_engine(eos=True, max_model_len=256))


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_clean(shared)


@pytest.fixture(scope="module")
def canary(shared: LLM) -> list[tuple[list[int], list[str]]]:
    return bits(shared.generate(PROMPT, GREEDY, use_tqdm=False))


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


# ---- prompts


def test_text_ids_mappings_and_lists_of_them_are_the_same_question(llm: LLM) -> None:
    tokens = ids(PROMPT)
    forms: list[Any] = [
        PROMPT,
        tokens,
        tuple(tokens),
        {"prompt": PROMPT},
        {"prompt": tokens},
        {"prompt_token_ids": tokens},
        {"prompt": "another word for it", "prompt_token_ids": tokens},
    ]
    alone = [bits(run(llm, form)) for form in forms]
    assert all(answer == alone[0] for answer in alone)
    together = run(llm, forms)
    assert bits(together) == [answer[0] for answer in alone]
    assert all(out.prompt_token_ids == tokens for out in together)
    assert [out.prompt for out in together] == [PROMPT, None, None, PROMPT, None, None, "another word for it"]


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    assert len(run(llm, "a")) == len(run(llm, [5, 6])) == len(run(llm, ["a"])) == len(run(llm, [[5, 6]])) == 1


def test_answers_come_in_the_order_of_questions(llm: LLM) -> None:
    prompts = [f"{'word ' * (7 - i)}{i}" for i in range(7)]
    lengths = [3, 17, 1, 9, 2, 12, 5]
    outputs = run(llm, prompts, [greedy(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [out.prompt for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    assert [out.finished for out in outputs] == [True] * 7
    assert len({out.request_id for out in outputs}) == 7
    alone = [
        bits(run(llm, p, greedy(max_tokens=n, ignore_eos=True)))[0]
        for p, n in zip(prompts, lengths, strict=True)
    ]
    assert bits(outputs) == alone


def test_one_parameter_set_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="2 prompts and 3 SamplingParams"):
        run(llm, ["a", "b"], [GREEDY] * 3)
    with pytest.raises(BadParameter, match="SamplingParams"):
        run(llm, ["a"], [{"temperature": 0}])


def test_none_given_means_the_checkpoints_defaults(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert bits(run(llm, PROMPT, None)) == bits(run(llm, PROMPT, SamplingParams()))


def test_a_progress_bar_is_drawn_on_request_only(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    run(llm, "a")
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capfd.readouterr().err


# ---- n, seeds


def test_n_choices_differ_and_the_first_is_the_one_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=7, ignore_eos=True)
    (out,) = run(llm, PROMPT, params.clone(n=4))
    assert [choice.index for choice in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in out.outputs}) == 4
    assert bits([out])[0] == bits(run(llm, PROMPT, params))[0]
    assert bits([out]) == bits(run(llm, PROMPT, params.clone(n=4)))
    assert [choice.seed for choice in out.outputs] == [7] * 4


def test_a_derived_seed_asks_for_the_same_answer_again(llm: LLM) -> None:
    once = run(llm, PROMPT, SamplingParams(max_tokens=12))
    again = run(llm, PROMPT, SamplingParams(max_tokens=12, seed=first(once).seed))
    assert bits(once) == bits(again) == bits(run(llm, PROMPT, SamplingParams(max_tokens=12)))


# ---- log-probabilities


@pytest.mark.parametrize("num", [0, 1, 5])
def test_logprobs_hold_the_chosen_token_first_and_the_best_in_order(llm: LLM, num: int) -> None:
    params = SamplingParams(max_tokens=6, seed=3, temperature=1.5, logprobs=num)
    found = first(run(llm, PROMPT, params))
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.token_ids)
    for token, value, position in zip(found.token_ids, found.token_logprobs, found.logprobs, strict=True):
        listed = list(position.items())
        assert listed[0][0] == token
        assert listed[0][1].logprob == value <= 0
        ranks = sorted(entry.rank for _, entry in listed if entry.rank is not None)
        assert ranks == list(range(1, num + 1))
        best = sorted((e for e in position.values() if e.rank is not None), key=lambda e: e.rank or 0)
        assert [e.logprob for e in best] == sorted((e.logprob for e in best), reverse=True)
        assert len(listed) == num + (listed[0][1].rank is None)
    assert found.cumulative_logprob == sum(found.token_logprobs)


def test_minus_one_is_the_whole_vocabulary(llm: LLM) -> None:
    found = first(run(llm, PROMPT, greedy(max_tokens=2, logprobs=-1)))
    assert found.logprobs is not None
    for position in found.logprobs:
        assert sorted(position) == list(range(320))
        assert sorted(e.rank for e in position.values() if e.rank) == list(range(1, 321))
        assert math.isclose(sum(math.exp(e.logprob) for e in position.values()), 1, rel_tol=1e-4)


def test_asking_for_logprobs_changes_no_bit(llm: LLM) -> None:
    plain = bits(run(llm, PROMPT))
    for num in (0, 3, -1):
        assert bits(run(llm, PROMPT, greedy(logprobs=num, prompt_logprobs=num))) == plain
    assert first(run(llm, PROMPT)).logprobs is None
    assert run(llm, PROMPT)[0].prompt_logprobs is None


@pytest.mark.parametrize("num", [0, 2, -1])
def test_prompt_logprobs_are_the_same_bits_warm_and_cold(num: int) -> None:
    llm = LLM.over(tiny_engine(frame_rows=16))
    prompt, params = PROMPT * 2, greedy(max_tokens=2, prompt_logprobs=num)
    (cold,), (warm,) = run(llm, prompt, params), run(llm, prompt, params)
    assert cold.prompt_logprobs is not None
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == len(cold.prompt_token_ids)
    entries = zip(cold.prompt_token_ids[1:], cold.prompt_logprobs[1:], strict=True)
    for token, position in entries:
        assert position is not None
        assert next(iter(position)) == token
        assert len(position) in {num, num + 1} or (num == -1 and len(position) == 320)
    (scored,) = llm.score([prompt[:1]], [prompt[1:]])
    assert scored.logprobs == [
        p[t].logprob for t, p in zip(cold.prompt_token_ids, cold.prompt_logprobs, strict=True) if p
    ]
    assert_clean(llm)


def test_prompt_logprobs_of_a_single_token_are_a_single_none(llm: LLM) -> None:
    assert run(llm, [65], greedy(prompt_logprobs=1))[0].prompt_logprobs == [None]


def test_prompt_logprobs_are_told_once_however_many_choices(llm: LLM) -> None:
    (out,) = run(llm, PROMPT, SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=0))
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_no_tokens_at_all_only_reads_the_prompt(llm: LLM) -> None:
    (out,) = run(llm, PROMPT, greedy(max_tokens=0, prompt_logprobs=0))
    assert out.outputs[0].token_ids == []
    assert out.outputs[0].text == ""
    assert out.outputs[0].finish_reason == "length"
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(ids(PROMPT))


# ---- where it ends


def test_a_stop_string_is_cut_off_or_kept(llm: LLM) -> None:
    whole = first(run(llm, PROMPT, lettered()))
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    cut = first(run(llm, PROMPT, lettered(stop=[stop, "never"])))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    kept = first(run(llm, PROMPT, lettered(stop=stop, include_stop_str_in_output=True)))
    assert (kept.text, kept.stop_reason) == (whole.text[: at + 3], stop)
    assert cut.token_ids == kept.token_ids == whole.token_ids[: at + 3]
    assert cut.token_logprobs == whole.token_logprobs[: at + 3]


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    stop = first(run(llm, PROMPT, lettered())).text[0]
    found = first(run(llm, PROMPT, lettered(stop=stop, min_tokens=5)))
    assert len(found.token_ids) > 5
    assert found.text.startswith(stop)


def test_a_stop_id_is_its_own_reason_and_not_part_of_the_text(llm: LLM) -> None:
    whole = first(run(llm, PROMPT, lettered()))
    stop = whole.token_ids[4]
    at = whole.token_ids.index(stop)
    cut = first(run(llm, PROMPT, lettered(stop_token_ids=[stop])))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert cut.text == whole.text[:at]
    kept = first(run(llm, PROMPT, lettered(stop_token_ids=[stop], include_stop_str_in_output=True)))
    assert kept.text == whole.text[: at + 1]


def test_end_of_text_ends_it_and_names_no_reason(llm: LLM) -> None:
    found = first(run(llm, PROMPT, greedy(logit_bias={257: 100})))
    assert (found.token_ids, found.text) == ([257], "")
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(llm: LLM) -> None:
    found = first(run(llm, PROMPT, greedy(logit_bias={257: 100}, ignore_eos=True)))
    assert (found.token_ids, found.finish_reason) == ([257] * 8, "length")


def test_an_end_of_text_id_the_caller_asked_for_is_a_reason(llm: LLM) -> None:
    """As in vLLM: with eos ignored, a stop id is a stop id, whatever it means to the model."""
    found = first(run(llm, PROMPT, greedy(logit_bias={257: 100}, ignore_eos=True, stop_token_ids=[257])))
    assert (found.finish_reason, found.stop_reason) == ("stop", 257)


def test_min_tokens_bars_every_way_to_end(llm: LLM) -> None:
    found = first(run(llm, PROMPT, greedy(logit_bias={257: 100}, min_tokens=5)))
    assert 257 not in found.token_ids[:5]
    assert found.token_ids[5:] == [257]


@pytest.mark.parametrize("verify", [True, False])
def test_no_limit_reaches_to_the_end_of_the_context(llm: LLM, verify: bool) -> None:
    found = first(run(llm, [65] * 200, greedy(max_tokens=None, ignore_eos=True, verify=verify)))
    assert (len(found.token_ids), found.finish_reason) == (56, "length")


def test_a_limit_past_the_context_is_the_context(llm: LLM) -> None:
    found = first(run(llm, [65] * 250, greedy(max_tokens=1000, ignore_eos=True)))
    assert len(found.token_ids) == 6


def test_truncation_keeps_the_last_tokens(llm: LLM) -> None:
    (out,) = run(llm, PROMPT, greedy(truncate_prompt_tokens=5))
    assert out.prompt_token_ids == ids(PROMPT)[-5:]
    assert bits([out]) == bits(run(llm, ids(PROMPT)[-5:]))
    (out,) = run(llm, [65] * 5000, greedy(truncate_prompt_tokens=20))
    assert len(out.prompt_token_ids) == 20
    (out,) = run(llm, PROMPT, greedy(truncate_prompt_tokens=5000))
    assert out.prompt_token_ids == ids(PROMPT)


# ---- text


def test_special_tokens_are_left_out_unless_wanted(llm: LLM) -> None:
    bias = {"logit_bias": {256: 100}, "max_tokens": 2}
    assert first(run(llm, PROMPT, greedy(**bias))).text == ""
    assert "<s>" in first(run(llm, PROMPT, greedy(skip_special_tokens=False, **bias))).text


def test_without_detokenizing_there_are_ids_only(llm: LLM) -> None:
    found = first(run(llm, PROMPT, lettered(detokenize=False)))
    assert found.text == ""
    assert found.token_ids == first(run(llm, PROMPT, lettered())).token_ids


def test_bad_words_do_not_appear(llm: LLM) -> None:
    text = first(run(llm, PROMPT, lettered())).text
    word = next(letter for letter in text if letter != " ")
    assert word not in first(run(llm, PROMPT, lettered(bad_words=[word]))).text


def test_a_stream_adds_up_to_the_whole(llm: LLM) -> None:
    params = lettered(stop="never", logprobs=2, max_tokens=20)
    (whole,) = run(llm, PROMPT, params)
    chunks = list(llm.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.outputs[0].token_ids
    assert [v for chunk in chunks for v in chunk.token_logprobs] == whole.outputs[0].token_logprobs
    assert [d for chunk in chunks for d in chunk.logprobs or ()] == whole.outputs[0].logprobs
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_a_stream_left_early_is_aborted(llm: LLM) -> None:
    for chunk in llm.stream(PROMPT, greedy(max_tokens=100)):
        assert chunk.token_ids
        break
    assert_clean(llm)


def test_two_streams_at_once_lose_nothing(shared: LLM) -> None:
    params = greedy(max_tokens=12, ignore_eos=True)
    wanted = [bits(run(shared, p, params))[0][0] for p in ("one", "two")]
    found: list[list[int]] = [[], []]
    streams = [shared.stream("one", params), shared.stream("two", params)]
    live = [0, 1]
    while live:
        for i in list(live):
            chunk = next(streams[i], None)
            if chunk is None:
                live.remove(i)
            else:
                found[i] += chunk.token_ids
    assert found == wanted


def test_a_question_during_a_stream_loses_nothing(shared: LLM, canary: list[Any]) -> None:
    params = greedy(max_tokens=12, ignore_eos=True)
    wanted = bits(run(shared, "one", params))[0][0]
    stream = shared.stream("one", params)
    found = list(next(stream).token_ids)
    assert bits(run(shared, PROMPT)) == canary
    found += [token for chunk in stream for token in chunk.token_ids]
    assert found == wanted


def test_scoring_during_a_stream_neither_hangs_nor_loses_anything() -> None:
    left = [300]

    def watchdog(_: object) -> list[int]:
        return []

    class Watchdog(Scripted):
        def propose(self, asks: list[Any]) -> list[Any]:
            left[0] -= 1
            if left[0] < 0:
                raise TimeoutError("the stream waits for a request that ended unseen")
            return super().propose(asks)

    llm = LLM.over(tiny_engine(make_proposer=lambda _: Watchdog(watchdog)))
    params = greedy(max_tokens=6)
    wanted = bits(run(llm, "one", params))[0][0]
    stream = llm.stream("one", params)
    found = list(next(stream).token_ids)
    llm.score(["a"], ["b" * 60])
    found += [token for chunk in stream for token in chunk.token_ids]
    assert found == wanted


# ---- chat

MESSAGES = [{"role": "user", "content": "hello"}]
GUARDED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no date{% endif %}"
BARE = "today is {{ strftime_now('%Y-%m-%d') }}"


def read(llm: LLM, tokens: list[int]) -> str:
    return llm.get_tokenizer().decode(tokens)


def test_chat_is_the_template_and_nothing_else(llm: LLM) -> None:
    tokens = llm.chat_prompt(MESSAGES)
    assert read(llm, tokens) == "<s>user: hello\n<s>assistant: "
    assert tokens.count(256) == 2  # and no further begin-of-text
    assert bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False)) == bits(run(llm, tokens))
    assert read(llm, llm.chat_prompt(MESSAGES, add_generation_prompt=False)) == "<s>user: hello\n"


def test_several_conversations_at_once(llm: LLM) -> None:
    other = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
    both = llm.chat([MESSAGES, other], GREEDY, use_tqdm=False)
    assert bits(both) == bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False)) + bits(
        llm.chat(other, GREEDY, use_tqdm=False)
    )


def test_stream_chat(llm: LLM) -> None:
    tokens = [t for chunk in llm.stream_chat(MESSAGES, GREEDY) for t in chunk.token_ids]
    assert tokens == bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False))[0][0]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "the conversation is empty"),
        ([[]], "the conversation is empty"),
        (["hello"], "'role' and 'content'"),
        ("hello", "'role' and 'content'"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"content": "x"}], "'role' and 'content'"),
    ],
)
def test_a_conversation_that_is_none_is_refused(llm: LLM, messages: Any, says: str) -> None:
    with pytest.raises(BadPrompt, match=says):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_template_arguments_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", "{{ mood }}!")
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs={"mood": "gay"})
    assert read(llm, out.prompt_token_ids) == "gay!"


def test_a_template_may_not_ask_the_clock(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", GUARDED)
    assert read(llm, llm.chat_prompt(MESSAGES)) == "no date"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", BARE)
    with pytest.raises(BadPrompt, match="date"):
        llm.chat_prompt(MESSAGES)


def test_a_configured_date_is_the_date() -> None:
    llm = LLM.over(tiny_engine(date="2024-07-26"))
    llm.get_tokenizer().chat_template = GUARDED
    assert read(llm, llm.chat_prompt(MESSAGES)) == "26 Jul 2024"
    llm.get_tokenizer().chat_template = BARE
    assert read(llm, llm.chat_prompt(MESSAGES)) == "today is 2024-07-26"
    assert dict(llm.contract.facts)["date"] == "2024-07-26"


def test_a_template_that_refuses_says_why(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadPrompt, match="roles must alternate"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(BadPrompt, match=r"no chat template; use generate\(\)"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)


# ---- score


def test_scores_are_the_bits_of_generating(llm: LLM) -> None:
    prompts = [PROMPT, "x", "a longer prompt " * 6]
    outputs = run(llm, prompts, SamplingParams(max_tokens=24, seed=5, ignore_eos=True))
    scored = llm.score(prompts, [out.outputs[0].token_ids for out in outputs])
    for out, score in zip(outputs, scored, strict=True):
        assert score.logprobs == out.outputs[0].token_logprobs
        assert score.token_ids == out.outputs[0].token_ids
        assert score.prompt_token_ids == out.prompt_token_ids
        assert score.cumulative_logprob == out.outputs[0].cumulative_logprob
    assert llm.score(prompts, [out.outputs[0].token_ids for out in outputs]) == scored  # from the cache


def test_a_completion_may_be_text(llm: LLM) -> None:
    assert llm.score(["ab"], ["cd"]) == llm.score([ids("ab")], [ids("cd")])
    assert len(llm.score(["ab"], ["cd"])[0].logprobs) == 2


@pytest.mark.parametrize(
    ("prompts", "completions", "says"),
    [
        (["a"], [], "1 prompts and 0 completions"),
        (["a"], [""], "the completion is empty"),
        ([""], ["a"], "the prompt is empty"),
        (["a", "b"], ["c", [999]], "999"),
        (["a" * 200], ["b" * 100], "300 tokens and max_model_len is 256"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm: LLM, prompts: Any, completions: Any, says: str) -> None:
    with pytest.raises(CallerError, match=says):
        llm.score(prompts, completions)


def test_the_longest_that_can_be_scored_is_the_context(llm: LLM) -> None:
    assert len(llm.score([[65] * 200], [[66] * 56])[0].logprobs) == 56


# ---- mistakes


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty; give some text"),
        ([], "no prompts were given"),
        ([[]], "the prompt is empty; give at least one token"),
        ([""], "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"text": "a"}, r"needs 'prompt' or 'prompt_token_ids', not \['text'\]"),
        ({"prompt": None}, "not NoneType"),
        ({"prompt_token_ids": None}, "token ids"),
        ({"prompt_token_ids": 5}, "token ids"),
        ([b"bytes"], "not bytes"),
        ([None], "not NoneType"),
        ([3.5], "not float"),
        ([320], "holds 320; token ids of this model are 0 to 319"),
        ([-1], "holds -1"),
        ([[1, 2.5]], r"holds 2\.5"),
        ([[1, True]], "holds True"),
        ([["a", "b"]], "holds 'a'"),
        ([65] * 256, r"256 tokens and max_model_len is 256; shorten it, set truncate_prompt_tokens"),
        (["fine", [65] * 300], "300 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_is_answered(
    llm: LLM, prompt: Any, says: str, canary: list[Any]
) -> None:
    with pytest.raises(BadPrompt, match=says):
        run(llm, prompt)
    assert_clean(llm)
    assert bits(run(llm, PROMPT)) == canary


def test_text_that_is_no_text_is_refused(llm: LLM, canary: list[Any]) -> None:
    with pytest.raises(BadPrompt):
        run(llm, "half a pair \ud800")
    assert bits(run(llm, PROMPT)) == canary


@pytest.mark.parametrize("bad", [[320], [-1], [[1, 2.5]], {"prompt_token_ids": [1, 999]}])
def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(bad: Any) -> None:
    llm = LLM.over(tiny_engine(max_model_len=64))
    wanted = bits(run(llm, PROMPT))
    with pytest.raises(BadPrompt):
        run(llm, [PROMPT, "another", bad[0] if isinstance(bad, list) and isinstance(bad[0], list) else bad])
    assert_clean(llm)
    assert bits(run(llm, PROMPT)) == wanted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"n": 0}, "n=0: give a whole number, 1 or more"),
        ({"temperature": math.nan}, "temperature=nan: give a finite number"),
        ({"top_p": 0}, "top_p=0: give more than 0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
    ],
)
def test_a_bad_parameter_never_becomes_one(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        SamplingParams(**given)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_parameters_are_checked_against_the_vocabulary(llm: LLM, name: str, canary: list[Any]) -> None:
    with pytest.raises(BadParameter, match=rf"{name}=\[400\]: this model's token ids are 0 to 319"):
        run(llm, [PROMPT, "b"], [GREEDY, greedy(**{name: [3, 400]})])
    assert_clean(llm)
    assert bits(run(llm, PROMPT)) == canary


def test_a_request_that_can_never_fit_is_refused(canary: list[Any]) -> None:
    llm = LLM.over(tiny_engine(eos=True, kv_memory=6 * PAGE_BYTES, max_model_len=256))
    with pytest.raises(BadPrompt, match=r"grow to 143 tokens and the KV cache holds 80; lower max_tokens"):
        run(llm, PROMPT, greedy(max_tokens=100))
    assert_clean(llm)
    assert bits(run(llm, PROMPT)) == canary


@pytest.mark.parametrize("params", [greedy(), greedy(n=2)])
def test_a_full_queue_refuses_and_then_answers(params: SamplingParams, canary: list[Any]) -> None:
    llm = LLM.over(tiny_engine(eos=True, max_queued=3, max_num_seqs=1, max_model_len=256))
    with pytest.raises(QueueFull, match="max_queued is 3"):
        run(llm, ["a", "b", "c", "d"], params)
    assert_clean(llm)
    assert bits(run(llm, PROMPT)) == canary


def test_a_tiny_cache_preempts_and_answers_the_same() -> None:
    prompts = [f"{i} {PROMPT}" for i in range(5)]
    params = greedy(max_tokens=30, ignore_eos=True)
    tight = LLM.over(tiny_engine(kv_memory=10 * PAGE_BYTES, max_model_len=100))
    roomy = LLM.over(tiny_engine(max_model_len=100))
    assert bits(run(tight, prompts, params)) == bits(run(roomy, prompts, params))
    assert tight.stats()["preempted"] > 0
    assert_clean(tight)


def test_a_stop_string_found_as_its_sequence_is_preempted_leaves_nobody_running() -> None:
    """Pages may be taken away in the very step that publishes the stop string."""
    text = first(run(LLM.over(tiny_engine()), PROMPT, lettered())).text
    at = next(i for i in range(3, len(text)) if text[i] not in text[:i])
    made: list[LLM] = []

    def preempt(ask: Any) -> list[int]:
        if len(ask.tokens) - ask.prompt_len == at + 1:
            made[0].engine.scheduler.preempt(ask.seq_id)
        return []

    made.append(LLM.over(tiny_engine(make_proposer=lambda _: Scripted(preempt))))
    found = first(run(made[0], PROMPT, lettered(stop=text[at])))
    assert (found.text, found.stop_reason) == (text[:at], text[at])
    assert_clean(made[0])


def test_an_interrupt_leaves_no_page_held() -> None:
    calls = [0]

    def interrupt(_: object) -> list[int]:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return []

    llm = LLM.over(tiny_engine(make_proposer=lambda _: Scripted(interrupt)))
    with pytest.raises(KeyboardInterrupt):
        run(llm, ["a", "b", "c"], greedy(max_tokens=30))
    assert_clean(llm)
    plain = LLM.over(tiny_engine())
    assert bits(run(llm, PROMPT)) == bits(run(plain, PROMPT))


def test_an_unverified_request_gives_ordinary_answers(llm: LLM, canary: list[Any]) -> None:
    (out,) = run(llm, PROMPT, greedy(verify=False, logprobs=2))
    assert out.outputs[0].token_ids == canary[0][0]
    assert llm.stats()["unverified_tokens"] > 0


# ---- weights


def other_weights() -> dict[str, torch.Tensor]:
    return dict(tiny_model(seed=1).state_dict())


@pytest.mark.parametrize("how", ["tensors", "folder", "sharded folder"])
def test_new_weights_answer_like_a_fresh_engine(how: str, tmp_path: Path) -> None:
    llm, fresh = LLM.over(tiny_engine()), LLM.over(tiny_engine(seed=1))
    prompt, params = PROMPT * 2, greedy(max_tokens=20, logprobs=1)
    before, old = run(llm, prompt, params), llm.contract
    update: Any = other_weights()
    if how != "tensors":
        size = "100KB" if how == "sharded folder" else "5GB"
        tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size=size)
        update = tmp_path
    contract = llm.update_weights(update)
    assert contract == llm.contract == fresh.contract
    assert contract.id != old.id
    after = run(llm, prompt, params)
    assert bits(after) == bits(run(fresh, prompt, params)) != bits(before)
    assert after[0].num_cached_tokens == 0  # the cache knew only the old weights
    assert after[0].contract == contract.id
    llm.update_weights(dict(tiny_model(seed=0).state_dict()))
    assert llm.contract == old
    assert bits(run(llm, prompt, params)) == bits(before)
    assert_clean(llm)


def test_one_tensor_is_enough(llm: LLM) -> None:
    old = llm.engine.runner.model.get_parameter("lm_head.weight").clone()
    before, contract = bits(run(llm, PROMPT)), llm.contract
    llm.update_weights({"lm_head.weight": old.flip(0)})
    assert bits(run(llm, PROMPT)) != before
    llm.update_weights({"lm_head.weight": old})
    assert (bits(run(llm, PROMPT)), llm.contract) == (before, contract)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("lm_head.wait", (320, 64), "has no tensor 'lm_head.wait'; names are those of its state dict"),
        ("lm_head.weight", (64, 320), r"lm_head.weight has shape \(64, 320\), the model's has \(320, 64\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    llm: LLM, name: str, shape: tuple[int, int], says: str
) -> None:
    before, contract = bits(run(llm, PROMPT)), llm.contract
    good = {"model.norm.weight": torch.full((64,), 7.0)}
    with pytest.raises(BadParameter, match=says):
        llm.update_weights(good | {name: torch.zeros(shape)})
    assert (bits(run(llm, PROMPT)), llm.contract) == (before, contract)


def test_a_folder_without_weights_is_refused(llm: LLM, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UnknownModel, match="safetensors"):
            llm.update_weights(folder)


def test_weights_stay_while_a_request_runs(llm: LLM) -> None:
    stream = llm.stream(PROMPT, greedy(max_tokens=5))
    next(stream)
    with pytest.raises(CallerError, match="while requests are running; finish or abort"):
        llm.update_weights({})
    assert sum(len(chunk.token_ids) for chunk in stream) == 4
    llm.update_weights({})


@pytest.mark.parametrize("how", ["stop string", "left early"])
def test_weights_may_change_as_soon_as_the_last_answer_is_there(how: str) -> None:
    """The frame still in flight belongs to nobody any more."""
    llm = LLM.over(tiny_engine())
    if how == "stop string":
        run(llm, PROMPT, lettered(stop=list(LETTERS), max_tokens=50))
    else:
        for _ in llm.stream(PROMPT, greedy(max_tokens=50)):
            break
    assert llm.update_weights(other_weights()) == llm.contract


# ---- closing


def test_a_context_gives_the_model_back() -> None:
    with LLM.over(tiny_engine()) as llm:
        run(llm, "a")
    llm.close()  # closing twice is fine


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: run(llm, "a"),
        lambda llm: list(llm.stream("a")),
        lambda llm: llm.stats(),
        lambda llm: llm.contract,
        lambda llm: llm.update_weights({}),
        lambda llm: llm.get_default_sampling_params(),
        lambda llm: llm.chat(MESSAGES),
        lambda llm: list(llm.stream_chat(MESSAGES)),
        lambda llm: llm.chat_prompt(MESSAGES),
        lambda llm: llm.score(["a"], ["b"]),
        lambda llm: llm.get_tokenizer(),
    ],
)
def test_after_closing_every_call_says_so(use: Any, closed: LLM) -> None:
    with pytest.raises(BadParameter, match="this LLM was closed; make a new one"):
        use(closed)


@pytest.fixture(scope="module")
def closed() -> LLM:
    llm = LLM.over(tiny_engine())
    llm.close()
    return llm


def test_closing_under_an_open_stream_is_quiet() -> None:
    llm = LLM.over(tiny_engine())
    stream = llm.stream("a", greedy(max_tokens=50))
    next(stream)
    llm.close()
    stream.close()  # type: ignore[attr-defined]


# ---- what it says of itself


def test_stats_have_stated_keys(llm: LLM) -> None:
    before = llm.stats()
    run(llm, PROMPT * 2, greedy(max_tokens=4, ignore_eos=True))
    run(llm, PROMPT * 2, greedy(max_tokens=4, ignore_eos=True))
    stats = llm.stats()
    assert {
        *("requests", "finished", "aborted", "preempted", "prompt_tokens", "cached_tokens", "output_tokens"),
        *("unverified_tokens", "frames", "rows", "padded_rows", "guessed", "accepted", "rolled_back"),
        *("tokens_per_frame", "proposer", "running", "waiting", "pages", "pages_available", "pages_indexed"),
        *("contract", "uptime"),
    } <= stats.keys()
    assert stats["requests"] - before["requests"] == 2
    assert stats["finished"] - before["finished"] == 2
    assert stats["output_tokens"] - before["output_tokens"] == 8
    assert stats["prompt_tokens"] - before["prompt_tokens"] == 2 * len(ids(PROMPT * 2))
    assert stats["cached_tokens"] - before["cached_tokens"] >= 64
    assert (stats["running"], stats["waiting"]) == (0, 0)
    json.dumps(stats)


def test_an_output_tells_its_contract_its_cache_and_its_times(llm: LLM) -> None:
    prompt = "a prompt nobody has asked before " * 3
    (cold,), (warm,) = run(llm, prompt), run(llm, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (len(ids(prompt)) - 1) // 16 * 16)
    assert cold.contract == llm.contract.id
    for out in (cold, warm):
        metrics = out.metrics
        assert metrics.num_output_tokens == len(out.outputs[0].token_ids)
        assert metrics.time_to_first_token is not None
        assert metrics.time_to_first_token >= 0
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.finished_time


def test_an_output_tells_what_guessing_did_for_it() -> None:
    two = SamplingParams(n=2, temperature=0, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, verify=False)
    llm = LLM.over(tiny_engine(proposer="ngram"))
    out, plain = llm.generate([list(range(8)) * 4] * 2, [two, free])
    told = out.metrics
    assert told.num_output_tokens == 48
    assert told.num_guessed_tokens == told.num_accepted_tokens + told.num_rolled_back_tokens > 0
    assert told.drafters == {"ngram": (told.num_guessed_tokens, told.num_accepted_tokens)}
    assert told.num_output_tokens == told.num_frames + told.num_accepted_tokens
    assert told.tokens_per_frame == 48 / told.num_frames
    assert told.recomputed_share == told.num_rolled_back_tokens / told.num_guessed_tokens
    assert plain.metrics.num_guessed_tokens == 0
    assert plain.metrics.tokens_per_frame is None
    assert not plain.metrics.drafters


def saved(path: Path, *, swapped: bool = False, **overrides: Any) -> str:
    """A model and its tokenizer in a folder; `swapped`: two of its tokens have each other's place."""
    tiny_model(**overrides).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    if swapped:
        told = json.loads((path / "tokenizer.json").read_text())
        vocab = told["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (path / "tokenizer.json").write_text(json.dumps(told))
    return str(path)


def test_a_draft_model_has_the_models_vocabulary(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "kv_memory": "8MiB", "max_model_len": 256}
    settings["model"] = saved(tmp_path / "model")
    for name, told, changes in (
        ("larger", "a vocabulary of 512, the model one of 320", {"vocab_size": 512}),
        ("swapped", "'a' is .* here and .* there", {"swapped": True}),
    ):
        other = saved(tmp_path / name, **changes)
        with pytest.raises(BadParameter, match=f"draft_model='{other}' has .*{told}"):
            LLM(**settings, proposer="model", draft_model=other)
    with pytest.raises(UnknownModel):
        LLM(**settings, proposer="model", draft_model=str(tmp_path / "absent"))
    smaller = saved(tmp_path / "smaller", num_hidden_layers=1)
    with LLM(**settings, proposer="model", draft_model=smaller) as guided, LLM(**settings) as plain:
        assert bits(guided.generate(PROMPT, GREEDY)) == bits(plain.generate(PROMPT, GREEDY))
        assert guided.stats()["drafters"]["model"]["guessed"] > 0


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        ({}, SamplingParams()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=40),
        ),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0)),
        ({"do_sample": True, "temperature": None}, SamplingParams()),
        (
            {"repetition_penalty": 1.1, "max_new_tokens": 99},
            SamplingParams(repetition_penalty=1.1, max_tokens=99),
        ),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5"}, SamplingParams()),
    ],
)
def test_defaults_come_from_the_generation_config(
    shared: LLM, generation: dict[str, Any], params: SamplingParams
) -> None:
    engine = copy.copy(shared.engine)
    engine.loaded = dataclasses.replace(engine.loaded, generation=generation)
    assert StepLoop(engine).intake.default_params() == params
    assert LLM.over(engine).get_default_sampling_params() == params


# ---- folders


def save(folder: Path, *, shard: str = "5GB", **generation: Any) -> Path:
    tiny_model().save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_a_folder_answers_like_the_model_it_was_saved_from(shard: str, tmp_path: Path) -> None:
    save(tmp_path, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    params = greedy(max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, device="cpu", kv_memory=2**22, max_num_seqs=4) as llm:
        assert bits(run(llm, PROMPT, params)) == bits(run(LLM.over(tiny_engine()), PROMPT, params))
        assert read(llm, llm.chat_prompt(MESSAGES)) == "<s>user: hello\n<s>assistant: "


def test_a_list_of_eos_ids_all_end_the_text(tmp_path: Path) -> None:
    save(tmp_path, eos_token_id=[257, 5], temperature=0.5, top_k=7)
    with LLM(str(tmp_path), device="cpu", kv_memory=2**22) as llm:
        for token in (257, 5):
            found = first(run(llm, PROMPT, greedy(logit_bias={token: 100})))
            assert (found.token_ids, found.finish_reason, found.stop_reason) == ([token], "stop", None)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)


def test_a_folder_without_a_tokenizer_speaks_in_ids(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", kv_memory=2**22) as llm:
        assert first(run(llm, [1, 2, 3], greedy(ignore_eos=True, logprobs=1))).text == ""
        for use in (lambda: run(llm, "text"), lambda: llm.score([[1]], ["text"]), lambda: llm.chat(MESSAGES)):
            with pytest.raises(BadPrompt, match=r"no tokenizer|no chat template"):
                use()
        with pytest.raises(BadParameter, match="no tokenizer"):
            run(llm, [1], greedy(bad_words=["x"]))
        with pytest.raises(CallerError, match="tokenizer"):
            run(llm, [1], greedy(stop="x"))  # or it would never stop


def test_unknown_models_and_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(BadParameter, match="did you mean frame_rows"):
        LLM(tmp_path, frame_row=3)


def test_settings_are_refused_against_the_model() -> None:
    with pytest.raises(BadParameter, match=r"max_model_len=513: llama here was made for 512"):
        tiny_engine(max_model_len=513)
    with pytest.raises(BadParameter, match=r"kv_memory=100 is 100 bytes.*give at least 49152 bytes"):
        tiny_engine(kv_memory=100)
    with pytest.raises(BadParameter, match=r"attention='triton' does not run on cpu; use attention='auto'"):
        tiny_engine(attention="triton")
    with pytest.raises(BadParameter, match=r"proposer='magic': choose one of"):
        tiny_engine(proposer="magic")
