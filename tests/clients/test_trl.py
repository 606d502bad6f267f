"""GRPO with TRL: rollout and trainer agree to the last bit; TRL's own client against a server."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import CLIENT_ENV, make_folder, running_server

from samewise.errors import BadParameter
from samewise.rl.alias import set_attention
from samewise.testing import byte_tokenizer, tiny_model

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import chat_template_utils
    from trl.generation import vllm_client
    from trl.trainer import grpo_trainer

    from samewise.rl.trl import OVERRIDDEN, GRPOTrainer, check_trl

pytestmark = pytest.mark.filterwarnings("ignore")
SEED: Any = {"generation_kwargs": {"seed": 5}}
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
PROMPTS = ["hello", "the quick brown fox", "x", "one two"]


def reward(completions: list[str], **_: Any) -> list[float]:
    texts = [one if isinstance(one, str) else str(one[-1]["content"]) for one in completions]
    return [float(sum(letter.isalpha() for letter in text)) for text in texts]


def trainer(
    folder: Path,
    *,
    max_steps: int = 3,
    model: Any = None,
    tokenizer: Any = None,
    prompts: list[Any] = PROMPTS,
    tools: Any = None,
    rollout_func: Any = None,
    **options: Any,
) -> GRPOTrainer:
    if not isinstance(model, str):
        model = tiny_model(eos_token_id=257, **(model or {}))
        set_attention(model, "sdpa")
    config = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "use_cpu": True,
        "bf16": False, "learning_rate": 1e-3, "report_to": "none", "logging_steps": 1, "seed": 3,
        "save_strategy": "steps", "save_steps": 1, "per_device_eval_batch_size": 4,
        "max_steps": max_steps, "disable_tqdm": True,
    }  # fmt: skip
    return GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(str(folder), **config | options),
        train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:1]}),
        processing_class=tokenizer or byte_tokenizer(),
        tools=tools,
        rollout_func=rollout_func,
        engine_settings={"kv_memory": 2**24},
    )


def test_rollout_and_trainer_agree_exactly_for_three_steps(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    assert [one.step for one in run.agreements] == [0, 1, 2]
    for one in run.agreements:
        assert (one.max_difference, one.min_ratio, one.max_ratio, one.same_weights) == (0.0, 1.0, 1.0, True)
    assert len({one.contract for one in run.agreements}) == 3
    assert run.llm.weights_version >= 2
    losses = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert all(value > 0 for value in losses)


def test_a_forward_pass_of_a_callback_does_not_keep_weights_from_the_engine(tmp_path: Path) -> None:
    """It follows the trainer's weights; the next rollout has to notice them all the same."""

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.forward_of(run.model).logprobs(torch.tensor([[1, 2, 3]]))

    run = trainer(tmp_path, save_strategy="no")
    run.add_callback(Look())
    run.train()
    assert [one.max_difference for one in run.agreements] == [0.0] * 3
    assert len({one.contract for one in run.agreements}) == 3


def test_a_batch_of_masked_answers_is_a_step_like_others(tmp_path: Path) -> None:
    """Without an end every answer is cut off, and masked."""
    run = trainer(tmp_path, mask_truncated_completions=True, max_completion_length=1, save_strategy="no")
    run.train()
    assert [(one.max_difference, one.max_ratio) for one in run.agreements] == [(0.0, 1.0)] * 3


def test_micro_batches_and_inner_steps_agree_while_the_weights_are_the_same(tmp_path: Path) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=2, num_iterations=2, max_steps=4, save_strategy="no")
    run.train()
    same = [one for one in run.agreements if one.same_weights]
    other = [one for one in run.agreements if not one.same_weights]
    assert len(same) == len(other) == 4
    assert all((one.max_difference, one.min_ratio, one.max_ratio) == (0.0, 1.0, 1.0) for one in same)
    assert all(one.max_difference > 0.0 for one in other)


def test_a_resumed_run_has_the_same_curve_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    names = ("loss", "reward", "grad_norm", "completions/mean_length", "entropy")

    def curve(run: GRPOTrainer) -> list[list[float]]:
        return [[entry[name] for name in names] for entry in run.state.log_history if "reward" in entry]

    assert curve(again) == curve(whole)
    assert again.agreements == whole.agreements[1:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name


def test_a_resumed_run_need_not_repeat_evaluations(tmp_path: Path) -> None:
    """Those before its checkpoint change no seed of the steps after it."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "num_iterations": 2, "max_steps": 4}
    whole, again = (trainer(tmp_path, **evaluated) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name
    assert all((one.max_difference == 0.0) == one.same_weights for one in whole.agreements)
    assert again.agreements == whole.agreements[-len(again.agreements) :]


def test_answers_after_a_tools_result_agree_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model calls no tool, so every first answer is read as a call."""
    asked: list[str] = []

    def look_up(word: str) -> str:
        """Look a word up.

        Args:
            word: The word.

        Returns:
            Its meaning.
        """
        asked.append(word)
        return "a greeting"

    def parse(_: Any, ids: list[int], *, prefix: list[int], tools: Any) -> dict[str, Any]:
        del tools
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "hi"}}}
        first = b"a greeting" not in bytes(one for one in prefix if one < 256)
        return {"role": "assistant", "content": "."} | ({"tool_calls": [call]} if first else {})

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template_utils.qwen3_training_chat_template
    tokenizer.response_template = {}
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    run = trainer(
        tmp_path, tools=[look_up], tokenizer=tokenizer, prompts=prompts, max_completion_length=160,
        save_strategy="no", max_steps=2, model={"max_position_embeddings": 2048},
    )  # fmt: skip
    run.train()
    assert len(asked) == 8
    assert [one.max_difference for one in run.agreements] == [0.0] * 2
    assert all(entry["tools/call_frequency"] == 1.0 for entry in run.state.log_history if "reward" in entry)


def test_the_divergence_from_a_reference_model_has_the_engines_bits(tmp_path: Path) -> None:
    """It is exactly 0 while policy and reference are one model."""
    folder = tmp_path / "model"
    tiny_model(eos_token_id=257).save_pretrained(folder)
    run = trainer(tmp_path / "out", model=str(folder), beta=0.1, save_strategy="no")
    run.train()
    divergences = [entry["kl"] for entry in run.state.log_history if "kl" in entry]
    assert divergences[0] == 0.0
    assert all(value > 0.0 for value in divergences[1:])
    assert len(divergences) == 3
    assert [one.max_difference for one in run.agreements] == [0.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9"), ({"top_k": 5}, "top_k=5"), ({"min_p": 0.1}, "min_p"),
        ({"generation_kwargs": {"typical_p": 0.9}}, "generation_kwargs"),
        ({"rollout_func": reward}, "rollout_func"),
    ],
)  # fmt: skip
def test_filters_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        trainer(tmp_path, **options)


def test_a_version_of_trl_without_what_is_replaced_is_refused() -> None:
    """The list names all methods of TRL's trainer that this one has too."""
    own = {name for name, value in vars(GRPOTrainer).items() if callable(value)}
    assert set(OVERRIDDEN) == {name for name in own & set(dir(trl.GRPOTrainer)) if name[:2] != "__"}

    class Other(trl.GRPOTrainer):  # type: ignore[misc]
        _compute_loss = None

    with pytest.raises(ImportError, match=r"trl 9.0: its GRPOTrainer has no _compute_loss, which"):
        check_trl(Other, "9.0")


def test_the_example_agrees_draws_a_picture_and_repeats_its_curve(tmp_path: Path) -> None:
    def run(*options: str) -> list[str]:
        command = [sys.executable, str(EXAMPLE), "--steps", "4", "--out", str(tmp_path), *options]
        return subprocess.run(
            command, env=os.environ | CLIENT_ENV, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    lines = [line.split() for line in run() if line.startswith("step")]
    assert [line[1] for line in lines] == ["1", "2", "3", "4"] * 2
    differences = [float(line[3]) for line in lines]
    assert differences[:4] == [0.0] * 4
    assert all(differences[4:])
    assert all(line[4:8] == ["ratio", "1.0", "to", "1.0"] for line in lines[:4])
    assert (tmp_path / "grpo.png").stat().st_size > 1000
    again = [line for line in run("--resume") if "bit for bit" in line]
    assert again == ["from checkpoint-2: the same curve, bit for bit: True"] * 2


# -- TRL's own client ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's client, over `samewise serve --enable-training`; it needs nothing of vLLM here."""
    folder = make_folder(tmp_path_factory.mktemp("trl"))
    options = ("--enable-training", "--api-key", "secret", "--logprobs-mode", "processed_logprobs")
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(folder, log, *options) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
        yield vllm_client.VLLMClient(server.url.replace("http://", "http://any:secret@"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_client_generates_with_log_probabilities(client: Any, temperature: float) -> None:
    """Scored again, the answers have the values of generation, bit for bit."""
    prompts = [[65, 66, 67], [70]]
    out = client.generate(prompts, n=2, temperature=temperature, max_tokens=6, **SEED)
    assert out["prompt_ids"] == [[65, 66, 67], [70]]
    assert [len(row) for row in out["logprobs"]] == [len(ids) for ids in out["completion_ids"]]
    of_answers = [prompts[0], prompts[0], prompts[1], prompts[1]]
    sequences = [[*prompt, *answer] for prompt, answer in zip(of_answers, out["completion_ids"], strict=True)]
    scored = client.get_sequence_logprobs(
        sequences, [len(prompt) for prompt in of_answers], top_logprobs=30, temperature=temperature
    )
    assert scored["actual_token_ids"] == [[[token] for token in ids] for ids in out["completion_ids"]]
    assert scored["actual_logprobs"] == out["logprobs"]
    assert len(scored["logprobs"][0][0]) == 30


def test_its_client_chats(client: Any) -> None:
    out = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=4, **SEED)
    assert len(out["completion_ids"][0]) <= 4


def test_its_client_is_told_that_there_is_no_nccl(client: Any) -> None:
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["dtype"] == "torch.float32"
    client.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        client.init_communicator(device="cpu")


def test_its_asynchronous_trainers_client_pauses_and_resumes(client: Any) -> None:
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState(cpu=True)  # its logger asks for one
    remote = VLLMClient(client.base_url)
    remote.wait_for_server_ready()
    assert (remote.get_world_size(), remote.get_dtype()) == (1, "torch.float32")
    assert remote.get_max_model_len() == 1024
    remote.pause()
    assert client._get(f"{client.base_url}/is_paused") == {"is_paused": True}
    remote.start_weight_update()
    remote.finish_weight_update()
    remote.resume()
    assert client._get(f"{client.base_url}/weight_info")["weight_version"] == "1"
    assert client.generate([[65]], max_tokens=2, **SEED)["completion_ids"]
