"""A trainer's log-probabilities have the bits of generation, and the gradients of ordinary arithmetic."""

import copy
from typing import Any

import pytest
import torch
from rl_cases import TEMPERATURE, Answers, gradients, largest_error, ordinary_logprobs, sampled, trained_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samewise import LLM, SamplingParams
from samewise.engine import assemble
from samewise.errors import BadParameter, GuaranteeLost, PromptTooLong
from samewise.model.linear import stack_siblings
from samewise.model.surgery import copy_modules
from samewise.rl import TrainingForward, llm_over, logprobs
from samewise.rl import gradients as rl_gradients
from samewise.rl.alias import refuse_other_card, set_attention
from samewise.testing import FAMILIES

GRADIENT_TOLERANCE = 1e-4  # of a parameter's largest gradient, in float32: rounding of two ways to sum


def engine_over(model: Any, **settings: Any) -> LLM:
    return llm_over(model, **{"kv_memory": 2**24} | settings)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, LLM, Answers, TrainingForward]:
    model = trained_model()
    llm = engine_over(model)
    return model, llm, sampled(llm, 12), TrainingForward(model, like=llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_generation_in_any_batch_and_gradients_are_right(family: str) -> None:
    model = trained_model(family)
    llm = engine_over(model)
    answers = sampled(llm, 200)
    forward = TrainingForward(model, like=llm)
    got = forward.logprobs(
        answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
        logits_to_keep=answers.num_columns,
    )  # fmt: skip
    assert torch.equal(got.detach(), answers.logprobs)
    few = Answers(
        answers.input_ids[:9], answers.attention_mask[:9], answers.num_columns, answers.logprobs[:9]
    )
    parts = [  # micro-batches of 4 and of 5
        forward.logprobs(
            few.input_ids[at], attention_mask=few.attention_mask[at], temperature=TEMPERATURE,
            logits_to_keep=few.num_columns,
        )
        for at in (slice(4), slice(4, 9))
    ]  # fmt: skip
    together = torch.cat(parts)
    assert torch.equal(together.detach(), few.logprobs)
    own = gradients(model, together)
    error = largest_error(own, gradients(model, ordinary_logprobs(model.eval(), few, TEMPERATURE)))
    assert error < GRADIENT_TOLERANCE
    scored = llm.score([[5, 6, 7]], [[8, 9, 10]])[0].logprobs
    alone = forward.logprobs(torch.tensor([[5, 6, 7, 8, 9, 10]]))
    assert alone[0, 3:].tolist() == scored
    assert alone[0, 0] == 0.0


LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)],
    },
    "original_max_position_embeddings": 64, "max_position_embeddings": 256,
}  # fmt: skip


def test_gradients_of_short_sequences_have_the_engines_rotary_frequencies() -> None:
    """The engine takes longrope's long frequencies for every length, transformers by the batch's longest."""
    model = trained_model("phi3", **LONGROPE)
    ids = torch.arange(3, 73)[None]
    own = TrainingForward(model).logprobs(ids[:, :20])[:, 1:]
    model.eval()
    logits = model(input_ids=ids).logits[:, :19]  # 70 tokens, of which 20 count
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:20, None])[..., 0]
    assert torch.allclose(own, expected, atol=1e-4)
    assert largest_error(gradients(model, own), gradients(model, expected)) < GRADIENT_TOLERANCE
    assert model.model.rotary_emb.rope_type == "longrope"


@pytest.mark.parametrize("forward_too", [False, True])
def test_mixed_precision_has_no_effect(llama: Any, forward_too: bool) -> None:
    model, _, _, forward = llama
    ids = torch.tensor([[3, 44, 5, 101, 17, 9]])
    expected = forward.logprobs(ids)
    exact = gradients(model, expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward_too):
        values = forward.logprobs(ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, values)
    assert torch.equal(values, expected)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_packed_sequences_have_the_values_of_separate_ones(llama: Any) -> None:
    model, _, _, forward = llama
    sequences = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [17, 18], [19, 20, 21]]
    packed = torch.tensor([[token for one in sequences for token in one]])
    positions = torch.tensor([[i for one in sequences for i in range(len(one))]])
    together = forward.logprobs(packed, position_ids=positions)
    alone = [forward.logprobs(torch.tensor([one])) for one in sequences]
    assert torch.equal(together, torch.cat(alone, 1))
    error = largest_error(gradients(model, together), gradients(model, torch.cat(alone, 1)))
    assert error < GRADIENT_TOLERANCE


def test_padding_on_either_side_changes_no_value(llama: Any) -> None:
    *_, forward = llama
    tokens = torch.tensor([[21, 22, 23, 24, 25]])
    alone = forward.logprobs(tokens)
    for left, right in ((0, 3), (4, 0), (2, 7)):
        ids = torch.nn.functional.pad(tokens, (left, right), value=99)
        mask = torch.nn.functional.pad(torch.ones_like(tokens), (left, right))
        padded = forward.logprobs(ids, attention_mask=mask)
        assert torch.equal(padded[:, left : left + 5], alone)
        assert not padded[:, :left].any()
        assert not padded[:, left + 5 :].any()


def test_raw_values_at_temperature_one() -> None:
    model = trained_model()
    llm = engine_over(model)
    answers = sampled(llm, 8, temperature=1.0)
    got = TrainingForward(model, like=llm).logprobs(
        answers.input_ids, attention_mask=answers.attention_mask, logits_to_keep=answers.num_columns
    )
    assert torch.equal(got.detach(), answers.logprobs)


class DoubleNorm(torch.nn.Module):
    """transformers' RMS norm computes in float32, whatever its dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(norm.weight.detach().clone()), norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def in_float64(model: Any) -> Any:
    """A copy of a llama that really computes in float64: no norm and no softmax in float32."""
    exact = copy.deepcopy(model).eval().double()
    set_attention(exact, "sdpa")
    for layer in exact.model.layers:
        layer.input_layernorm = DoubleNorm(layer.input_layernorm)
        layer.post_attention_layernorm = DoubleNorm(layer.post_attention_layernorm)
    exact.model.norm = DoubleNorm(exact.model.norm)
    return exact


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_product_of_a_layer_is_not_computed_again(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any gradient differ. Layers that norm it need its value."""
    model = trained_model(family)
    ids = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    forward = TrainingForward(model)

    def backward() -> tuple[int, dict[str, torch.Tensor]]:
        values = forward.logprobs(ids)
        with Products() as products:
            found = gradients(model, values)
        return products.num, found

    num, found = backward()
    monkeypatch.setattr(rl_gradients, "_without_last_product", lambda layer: layer)
    num_all, expected = backward()
    is_normed = family in ("gemma3_text", "olmo2")
    assert num_all - num == (0 if is_normed else model.config.num_hidden_layers)
    assert largest_error(found, expected) < GRADIENT_TOLERANCE


def test_gradients_agree_with_finite_differences_in_float64(llama: Any) -> None:
    model, _, _, forward = llama
    ids = torch.tensor([[3, 44, 5, 101, 17, 9]])
    exact = in_float64(model)

    def loss() -> float:
        with torch.no_grad():
            logits = exact(input_ids=ids).logits[:, :-1] / TEMPERATURE
            return float(logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum())

    model.zero_grad()
    forward.logprobs(ids, temperature=TEMPERATURE).sum().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in exact.named_parameters():
        own = model.get_parameter(name).grad.double()
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(1e-5 * direction)
            above = loss()
            parameter.sub_(2e-5 * direction)
            below = loss()
            parameter.add_(1e-5 * direction)
        slope, expected = float((own * direction).sum()), (above - below) / 2e-5
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-4 * float(own.norm())), name


@pytest.mark.parametrize("write", ["in place", "through .data", "signs through .data", "another tensor"])
def test_values_are_never_those_of_old_weights(write: str) -> None:
    model = trained_model()
    forward = TrainingForward(model)
    ids = torch.tensor([[3, 44, 5, 101, 17, 9]])
    before = forward.logprobs(ids).detach()
    assert (forward.num_refreshes, forward.refresh()) == (1, False)
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        if write == "in place":
            weight.mul_(1.5)
        elif write == "through .data":
            weight.data.mul_(1.5)
        elif write == "signs through .data":
            weight.data.neg_()
        else:
            weight.data = weight.data * 1.5
    after = forward.logprobs(ids).detach()
    assert not torch.equal(before, after)
    assert torch.equal(after, TrainingForward(model).logprobs(ids).detach())
    assert torch.equal(
        after, torch.tensor([[0.0, *engine_over(model).score([[3]], [[44, 5, 101, 17, 9]])[0].logprobs]])
    )


@pytest.mark.parametrize("write", ["in place", "through .data", "another tensor"])
def test_the_engine_over_a_model_serves_no_changed_weights(write: str) -> None:
    model = trained_model()
    llm, old = engine_over(model), engine_over(model).contract
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        if write == "in place":
            weight.mul_(1.5)
        elif write == "through .data":
            weight.data.mul_(1.5)
        else:
            weight.data = weight.data * 1.5
    calls: list[Any] = [
        lambda: llm.generate([[1, 2]], use_tqdm=False),
        lambda: llm.score([[1, 2]], [[3]]),
        lambda: next(llm.stream([1, 2])),
    ]
    for call in calls:
        with pytest.raises(GuaranteeLost, match=r"call update_weights\(model.state_dict\(\)\)"):
            call()
    assert llm.update_weights(model.state_dict()) == engine_over(model).contract != old
    for call in calls:
        call()


def test_parameters_that_became_other_objects_are_noticed() -> None:
    model, ids = trained_model(), torch.tensor([[3, 44, 5, 101]])
    forward, before = TrainingForward(model), logprobs(model, ids)
    model.load_state_dict(trained_model(seed=1).state_dict(), assign=True)
    with pytest.raises(GuaranteeLost, match=r"embed_tokens.weight is another tensor .* make a new one"):
        forward.logprobs(ids)
    after = logprobs(model, ids)  # makes one itself
    assert not torch.equal(after, before)
    assert torch.equal(after, TrainingForward(model).logprobs(ids))


class Reads(TorchFunctionMode):
    """Counts how often the host reads from a tensor: on CUDA it waits each time."""

    NAMES = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__")
    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += getattr(func, "__name__", "") in self.NAMES or func is torch.equal
        return func(*args, **(kwargs or {}))


def test_weights_are_compared_without_waiting_for_every_tensor(llama: Any) -> None:
    *_, forward = llama
    forward.refresh()
    with Reads() as reads:
        assert not forward.refresh()
        assert reads.num == 1
        for read in (torch.Tensor.tolist, torch.Tensor.item, int, float, bool):
            read(torch.ones(()))
    assert reads.num == 6


def test_weights_changed_between_the_passes_are_refused() -> None:
    model = trained_model()
    loss = TrainingForward(model).logprobs(torch.tensor([[3, 44, 5]])).sum()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def stacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where q, k, v and gate, up are copied into one weight each."""

    def stack(model: torch.nn.Module) -> torch.nn.Module:
        stack_siblings(model)
        return copy_modules(model)

    monkeypatch.setattr(assemble, "copy_modules", stack)


@pytest.mark.usefixtures("stacked_weights")
def test_copies_of_weights_do_not_count_as_written_by_the_trainer() -> None:
    model = trained_model()
    sizes: dict[str, Any] = {"linear": "torch", "attention": "torch", "frame_rows": 16, "frame_sizes": (16,)}
    llm = engine_over(model, proposer="none", **sizes)
    forward = TrainingForward(model, like=llm, frame_sizes=(16,))

    def agree() -> torch.Tensor:
        answers = sampled(llm, 3)
        got = forward.logprobs(
            answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
            logits_to_keep=answers.num_columns,
        )  # fmt: skip
        assert torch.equal(got.detach(), answers.logprobs)
        return got

    (agree() + agree()).sum().backward()
    assert forward.num_refreshes == 1
    got = agree()
    llm.update_weights(model.state_dict())  # between the passes, with the weights there are
    got.sum().backward()
    agree()
    assert forward.num_refreshes == 1
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.3)
    with pytest.raises(GuaranteeLost, match="written in place"):
        agree()
    llm.update_weights(model.state_dict())
    agree().sum().backward()
    assert forward.num_refreshes == 2
    llm.update_weights({name: tensor * 1.1 for name, tensor in model.state_dict().items()})
    sampled(llm, 1)


def test_an_optimizers_steps_are_followed_by_engine_and_trainer() -> None:
    model = trained_model()
    llm, forward = engine_over(model), TrainingForward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    contracts = {llm.contract.id}
    for _ in range(3):
        answers = sampled(llm, 6)
        got = forward.logprobs(
            answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
            logits_to_keep=answers.num_columns,
        )  # fmt: skip
        assert torch.equal(got.detach(), answers.logprobs)
        got.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(GuaranteeLost):
            llm.generate([[1, 2]], use_tqdm=False)
        contracts.add(llm.update_weights(model.state_dict()).id)
    assert len(contracts) == 4


def test_frozen_parameters_get_no_gradient() -> None:
    model = trained_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    TrainingForward(model).logprobs(torch.tensor([[3, 44, 5]])).sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_a_tied_head_gets_its_gradient_once() -> None:
    model = trained_model(tie_word_embeddings=True)
    ids = torch.tensor([[3, 44, 5, 101]])
    own = gradients(model, TrainingForward(model).logprobs(ids)[:, 1:])
    logits = model.eval()(input_ids=ids).logits[:, :-1]
    error = largest_error(own, gradients(model, logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]))
    assert error < GRADIENT_TOLERANCE


def test_without_gradients_nothing_is_kept(llama: Any) -> None:
    *_, forward = llama
    with torch.no_grad():
        values = forward.logprobs(torch.tensor([[3, 44, 5]]))
    assert values.grad_fn is None
    assert torch.equal(values, forward.logprobs(torch.tensor([[3, 44, 5]])).detach())


def test_entropy_is_that_of_the_distribution(llama: Any) -> None:
    model, _, _, forward = llama
    ids = torch.tensor([[3, 44, 5, 101]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[:, :-1] / TEMPERATURE
        expected = torch.distributions.Categorical(logits=logits).entropy()
    entropy = forward.score(ids, temperature=TEMPERATURE, entropy=True).entropy
    assert torch.allclose(entropy[:, 1:], expected, atol=1e-4)


def test_hooks_and_a_patched_forward_change_no_value(llama: Any) -> None:
    """Trainers patch the model's forward; the engine's bits are those of the class."""
    _, _, _, forward = llama
    model = trained_model()
    ids = torch.tensor([[3, 44, 5]])
    expected = forward.logprobs(ids).detach()
    model.forward = lambda *_, **__: None
    model.model.embed_tokens.register_forward_hook(lambda *_: 7.0)
    values = TrainingForward(model).logprobs(ids)
    assert torch.equal(values.detach(), expected)
    values.sum().backward()


def test_the_function_keeps_one_forward_pass_per_model() -> None:
    model = trained_model()
    ids = torch.tensor([[3, 44, 5]])
    assert torch.equal(logprobs(model, ids), TrainingForward(model).logprobs(ids))
    assert torch.equal(logprobs(model, ids), logprobs(model, ids))


def test_a_batch_without_targets_is_all_zero(llama: Any) -> None:
    *_, forward = llama
    assert not forward.logprobs(torch.tensor([[3], [4]])).any()
    assert not forward.logprobs(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.zeros(2, 3)).any()


def test_a_batch_without_targets_has_gradients_of_zero() -> None:
    """A trainer may mask every answer of a batch, and calls backward all the same."""
    model = trained_model()
    model.model.embed_tokens.requires_grad_(False)
    TrainingForward(model).logprobs(torch.tensor([[3, 4]]), logits_to_keep=0).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("model.embed_tokens"), name
        assert parameter.grad is None or not parameter.grad.any(), name
    with torch.no_grad():
        assert TrainingForward(model).logprobs(torch.tensor([[3]])).grad_fn is None


def test_more_sequences_than_pages_are_read_in_turns() -> None:
    model = trained_model()
    small, large = TrainingForward(model, kv_tokens=64), TrainingForward(model)
    ids = torch.arange(7 * 40).view(7, 40) % 250
    assert torch.equal(small.logprobs(ids), large.logprobs(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"give \[batch, tokens\]"),
        (
            {"input_ids": torch.tensor([[1, 999]])},
            "holds 999; token ids of this model are 0 to 319",
        ),
        (
            {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "not in one piece",
        ),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, "one value per token"),
        ({"input_ids": torch.tensor([[1, 2]]), "position_ids": torch.tensor([[1, 2]])}, "0, 1, 2"),
        ({"input_ids": torch.tensor([[1, 2]]), "temperature": -1.0}, "temperature=-1.0"),
        ({"input_ids": torch.tensor([[1, 2]]), "logits_to_keep": -1}, "logits_to_keep=-1"),
        ({"input_ids": torch.tensor([[1, 2]]), "logits_to_keep": True}, "logits_to_keep=True"),
        (
            {
                "input_ids": torch.ones(1, 4, dtype=torch.int64),
                "attention_mask": torch.tensor([[1, 1, 2, 2]]),
            },
            "attention_mask holds 2; .* mark packed sequences by position_ids",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(llama: Any, arguments: Any, message: str) -> None:
    *_, forward = llama
    with pytest.raises(BadParameter, match=message):
        forward.logprobs(**arguments)


def test_a_sequence_longer_than_the_kv_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="give kv_tokens=200"):
        TrainingForward(trained_model(), kv_tokens=64).logprobs(torch.ones(1, 200, dtype=torch.int64))


def test_models_that_the_engine_would_not_run_so_are_refused() -> None:
    model = trained_model()
    with pytest.raises(BadParameter, match="give the transformers model itself"):
        TrainingForward(torch.nn.DataParallel(model))
    model.lm_head.forward = lambda x: x
    with pytest.raises(BadParameter, match="lm_head has a forward of its own"):
        TrainingForward(model)
    mixed = trained_model()
    mixed.lm_head.to(torch.bfloat16)
    with pytest.raises(BadParameter, match=r"lm_head.weight is not in float32"):
        TrainingForward(mixed)


class Adapted(torch.nn.Module):
    """A linear with an adapter, as PEFT arranges it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(linear.in_features, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, linear.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("make", [TrainingForward, llm_over, logprobs])
def test_adapters_inside_the_model_are_refused(make: Any) -> None:
    model = trained_model()
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    given = (model, torch.tensor([[1, 2]])) if make is logprobs else (model,)
    with pytest.raises(BadParameter, match=r"layers.1.self_attn.q_proj has an adapter.*merge_and_unload"):
        make(*given)


def test_models_on_other_devices_than_the_engine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    split = trained_model()
    split.lm_head.to("meta")
    for make in (TrainingForward, llm_over):
        with pytest.raises(BadParameter, match=r"lm_head.weight is not on cpu"):
            make(split)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    refuse_other_card(torch.device("cuda:0"))
    with pytest.raises(BadParameter, match=r"call torch.cuda.set_device\(1\) first"):
        refuse_other_card(torch.device("cuda:1"))


def test_an_engine_with_other_arithmetic_is_refused() -> None:
    model = trained_model()
    llm = engine_over(model)
    with pytest.raises(BadParameter, match="only with the same arithmetic"):
        TrainingForward(trained_model(dtype=torch.bfloat16), like=llm)


def test_another_kernel_is_followed() -> None:
    """The forward pass takes over the settings that bits depend on."""
    model = trained_model()
    llm = engine_over(model, attention="torch", linear="torch", frame_rows=16)
    answers = sampled(llm, 6)
    got = TrainingForward(model, like=llm).logprobs(
        answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
        logits_to_keep=answers.num_columns,
    )  # fmt: skip
    assert torch.equal(got.detach(), answers.logprobs)


def test_the_engine_over_a_model_ends_where_transformers_would() -> None:
    model = trained_model()
    model.generation_config.eos_token_id = [70, 71]
    llm = engine_over(model)
    assert llm.engine.loaded.eos_ids == {70, 71}
    assert llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_on_a_gpu_are_those_of_generation(family: str, dtype: torch.dtype) -> None:
    model = trained_model(family, dtype=dtype, attention="sdpa").to("cuda")
    sizes = (8, 128, 256)  # every size is compiled: few are enough
    llm = engine_over(model, kv_memory=2**26, proposer="none", frame_sizes=sizes)
    answers = sampled(llm, 200)
    forward = TrainingForward(model, like=llm, frame_sizes=sizes)
    options: Any = {"temperature": TEMPERATURE, "logits_to_keep": answers.num_columns}
    got = forward.logprobs(answers.input_ids, attention_mask=answers.attention_mask, **options)
    assert torch.equal(got.detach(), answers.logprobs)
    parts = [
        forward.logprobs(
            answers.input_ids[i : i + 37], attention_mask=answers.attention_mask[i : i + 37], **options
        )
        for i in range(0, 200, 37)
    ]
    assert torch.equal(torch.cat(parts).detach(), answers.logprobs)
    # bfloat16 rounds away a tenth of a gradient, of granite's more: the measure is transformers' own error.
    exact = copy.deepcopy(model).float().eval()
    expected = gradients(exact, ordinary_logprobs(exact, answers, TEMPERATURE))
    own = gradients(model, got)
    ordinary = gradients(model, ordinary_logprobs(model.eval(), answers, TEMPERATURE))
    floor = 0.05 if dtype is torch.bfloat16 else 1e-2
    assert largest_error(own, expected) < 3 * largest_error(ordinary, expected) + floor
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    llm.update_weights(model.state_dict())
    again = sampled(llm, 20)
    got = forward.logprobs(again.input_ids, attention_mask=again.attention_mask, **options)
    assert torch.equal(got.detach(), again.logprobs)
