"""LLM over model folders and settings: what is loaded, what is refused."""

from pathlib import Path
from typing import Any

import pytest
from llm_cases import GREEDY, MESSAGES, PROMPT, bits, decode, first_choice, generate, greedy, save_model

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, CallerError, UnknownModel
from samewise.testing import tiny_engine, tiny_model


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_a_folder_answers_like_the_model_it_was_saved_from(shard: str, tmp_path: Path) -> None:
    save_model(tmp_path, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    params = greedy(max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, device="cpu", kv_memory=2**22, max_num_seqs=4) as llm:
        assert bits(generate(llm, PROMPT, params)) == bits(generate(LLM.over(tiny_engine()), PROMPT, params))
        assert decode(llm, llm.chat_prompt(MESSAGES)) == "<s>user: hello\n<s>assistant: "


def test_every_eos_token_of_a_list_ends_the_text(tmp_path: Path) -> None:
    save_model(tmp_path, generation={"eos_token_id": [257, 5], "temperature": 0.5, "top_k": 7})
    with LLM(str(tmp_path), device="cpu", kv_memory=2**22) as llm:
        for token in (257, 5):
            choice = first_choice(generate(llm, PROMPT, greedy(logit_bias={token: 100})))
            assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([token], "stop", None)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", kv_memory=2**22) as llm:
        assert first_choice(generate(llm, [1, 2, 3], greedy(ignore_eos=True, logprobs=1))).text == ""
        for use in (
            lambda: generate(llm, "text"),
            lambda: llm.score([[1]], ["text"]),
            lambda: llm.chat(MESSAGES),
        ):
            with pytest.raises(BadPrompt, match=r"no tokenizer|no chat template"):
                use()
        with pytest.raises(BadParameter, match="no tokenizer"):
            generate(llm, [1], greedy(bad_words=["x"]))
        with pytest.raises(CallerError, match="tokenizer"):
            generate(llm, [1], greedy(stop="x"))


def test_a_draft_model_must_have_the_models_vocabulary(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "kv_memory": "8MiB", "max_model_len": 256}
    settings["model"] = save_model(tmp_path / "model")
    for name, message, changes in (
        ("larger", "a vocabulary of 512, the model one of 320", {"vocab_size": 512}),
        ("swapped", "'a' is .* here and .* there", {"swapped": True}),
    ):
        other = save_model(tmp_path / name, **changes)
        with pytest.raises(BadParameter, match=f"draft_model='{other}' has .*{message}"):
            LLM(**settings, proposer="model", draft_model=other)
    with pytest.raises(UnknownModel):
        LLM(**settings, proposer="model", draft_model=str(tmp_path / "absent"))
    smaller = save_model(tmp_path / "smaller", num_hidden_layers=1)
    with LLM(**settings, proposer="model", draft_model=smaller) as drafted, LLM(**settings) as plain:
        assert bits(drafted.generate(PROMPT, GREEDY)) == bits(plain.generate(PROMPT, GREEDY))
        assert drafted.stats()["drafters"]["model"]["guessed"] > 0


def test_unknown_models_and_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(BadParameter, match="did you mean frame_rows"):
        LLM(tmp_path, frame_row=3)


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(BadParameter, match=r"max_model_len=513: this llama was trained for 512"):
        tiny_engine(max_model_len=513)
    with pytest.raises(BadParameter, match=r"kv_memory=100 is 100 bytes.*give at least 49152 bytes"):
        tiny_engine(kv_memory=100)
    with pytest.raises(BadParameter, match=r"attention='triton' does not run on cpu; use attention='auto'"):
        tiny_engine(attention="triton")
    with pytest.raises(BadParameter, match=r"proposer='magic': choose one of"):
        tiny_engine(proposer="magic")
