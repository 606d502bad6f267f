"""SamplingParams: what is refused, the errors, and what the sampler gets."""

import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from samewise.errors import BadParameter
from samewise.params import SamplingParams, derive_seed
from samewise.types import Sampling


def resolve(params: SamplingParams, **changes: Any) -> Sampling:
    arguments: dict[str, Any] = {
        "vocab": 100,
        "eos_ids": frozenset({2}),
        "encode": encode,
        "seed": 5,
        "index": 0,
    }
    return params.resolve(**arguments | changes)


def encode(text: str) -> list[int]:
    return [ord(letter) % 100 for letter in text]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("seed", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 3),
        ("bad_words", [""]),
        ("bad_words", ["  "]),
        ("include_stop_str_in_output", 1),
        ("ignore_eos", None),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", -2),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "middle"),
        ("truncation_side", None),
        ("priority", 0.5),
        ("priority", 2**63),
        ("logprob_token_ids", []),
        ("logprob_token_ids", [-1]),
        ("verify", "yes"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadParameter, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_messages_name_the_value_and_the_remedy() -> None:
    with pytest.raises(BadParameter, match=r"top_p=1\.5: give more than 0 and at most 1"):
        SamplingParams(top_p=1.5)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(BadParameter, match=r"temprature=0\.5 .* did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(BadParameter, match="known are n, temperature"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        16,
    )
    assert params.stops == ()
    assert params.verify


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("temperature", 0, 0.0),
        ("stop", "ab", ("ab",)),
        ("top_k", -1, 0),
        ("logit_bias", {"3": 1}, {3: 1.0}),
        ("max_tokens", None, None),
        ("priority", -5, -5),
    ],
)
def test_a_parameter_can_be_assigned(name: str, value: object, stored: object) -> None:
    params = SamplingParams(top_k=4)
    setattr(params, name, value)
    assert getattr(params, name) == stored
    assert params == SamplingParams(**{"top_k": 4} | {name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("n", 0), ("stop", ["a", ""]), ("min_tokens", 17), ("max_tokens", 4), ("n", 2)],
)
def test_an_assigned_value_is_refused_as_the_constructor_refuses_it(name: str, value: object) -> None:
    given = {"min_tokens": 5, "prediction": "x"}
    params = SamplingParams(**given)
    before = vars(params).copy()
    with pytest.raises(BadParameter) as constructed:
        SamplingParams(**given | {name: value})
    with pytest.raises(BadParameter) as assigned:
        setattr(params, name, value)
    assert str(assigned.value) == str(constructed.value)
    assert assigned.value.param == constructed.value.param
    assert vars(params) == before


def test_unknown_parameters_cannot_be_assigned_and_none_can_be_deleted() -> None:
    params = SamplingParams()
    with pytest.raises(BadParameter, match=r"temprature=0\.5 .* did you mean 'temperature'"):
        params.temprature = 0.5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="temperature"):
        del params.temperature
    copied = copy.copy(params)
    copied.temperature = 0.25
    assert (params.temperature, copied.temperature) == (1.0, 0.25)


def test_params_can_be_pickled_cloned_and_hashed() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={1: 2}, seed=-1)
    assert pickle.loads(pickle.dumps(params)) == params
    assert params.clone(n=3).n == 3
    assert params.clone(n=3).stops == ("a", "b")
    assert hash(params) == hash(params.clone())
    with pytest.raises(BadParameter, match="n=0"):
        params.clone(n=0)


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")
    with pytest.raises(BadParameter, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_from_optional_reads_none_as_the_default() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None)
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.5, None)


def test_an_iterator_is_read_once() -> None:
    params = SamplingParams(stop=iter(["a", "b"]), stop_token_ids=iter([1, 2]))  # type: ignore[arg-type]
    assert params.stops == ("a", "b")
    assert params.stop_token_ids == (1, 2)


def test_lists_and_mappings_are_copied() -> None:
    stops, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stops, logit_bias=bias)
    stops.append("b")
    bias[2] = 5.0
    assert params.stops == ("a",)
    assert params.logit_bias == {1: 1.0}


def test_resolve_passes_every_parameter_to_the_sampler() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        stop_token_ids=[9],
        min_tokens=2,
        logprobs=3,
        logit_bias={"7": 1, 3: -1},  # type: ignore[dict-item]
        allowed_token_ids=[3, 7],
    )
    assert resolve(params, index=4) == Sampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((3, -1.0), (7, 1.0)),
        allowed_token_ids=(3, 7),
        min_tokens=2,
        stop_ids=frozenset({2, 9}),
        top_logprobs=3,
        seed=5,
        index=4,
    )


def test_a_temperature_near_zero_is_greedy() -> None:
    assert resolve(SamplingParams(temperature=1e-6)).plain
    assert resolve(SamplingParams(temperature=0)).plain
    assert resolve(SamplingParams(temperature=1e-3)).temperature == 1e-3


@pytest.mark.parametrize("off", [0, -1, 100, 10**6])
def test_top_k_is_off_for_zero_minus_one_and_the_vocabulary(off: int) -> None:
    assert resolve(SamplingParams(top_k=off)).top_k == 0


def test_a_given_seed_replaces_the_derived_one() -> None:
    assert resolve(SamplingParams(seed=-3)).seed == -3
    assert resolve(SamplingParams()).seed == 5


def test_ignore_eos_keeps_the_stop_token_ids() -> None:
    assert resolve(SamplingParams(ignore_eos=True, stop_token_ids=[4])).stop_ids == {4}


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    words = resolve(SamplingParams(bad_words=["ab", " ab"])).bad_words
    assert words == (tuple(encode("ab")), tuple(encode(" ab")))
    with pytest.raises(BadParameter, match="no tokenizer"):
        resolve(SamplingParams(bad_words=["ab"]), encode=None)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=rf"{name}=\[100, 300\].*0 to 99"):
        resolve(SamplingParams(**{name: [1, 100, 300]}))  # type: ignore[arg-type]


def test_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadParameter, match=r"logit_bias=\[100\]"):
        resolve(SamplingParams(logit_bias={100: 1.0}))


def test_a_derived_seed_depends_on_the_engines_seed_and_the_prompt_alone() -> None:
    seeds = {derive_seed(0, [1, 2]), derive_seed(1, [1, 2]), derive_seed(0, [12])}
    assert len(seeds) == 3
    assert derive_seed(0, [1, 2]) == derive_seed(0, (1, 2)) == 1281965685483725
    assert all(0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize("module", ["params", "text"])
def test_host_modules_import_no_torch(module: str) -> None:
    code = f"import sys, samewise.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_logprob_token_ids_stand_in_place_of_logprobs() -> None:
    assert SamplingParams(logprob_token_ids=[7, 5]).shows_logprobs
    resolved = resolve(SamplingParams(logprob_token_ids=[7, 5, 7]))
    assert (resolved.logprob_token_ids, resolved.top_logprobs) == ((7, 5), 3)
    assert SamplingParams(logprob_token_ids=[7, 5], logprobs=2).logprobs == 2
    with pytest.raises(BadParameter, match="logprobs=5: with 2 logprob_token_ids"):
        SamplingParams(logprob_token_ids=[7, 5], logprobs=5)
    with pytest.raises(BadParameter, match=r"logprob_token_ids=\[100\]"):
        resolve(SamplingParams(logprob_token_ids=[100]))
