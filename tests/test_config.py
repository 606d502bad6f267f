"""EngineConfig: what is refused, with its value and remedy, and what is made from its declarations."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samewise
from samewise.config import (
    MEMORY_UNITS,
    SETTINGS,
    EngineConfig,
    parse_memory,
    settings_page,
    settings_signature,
)
from samewise.errors import BadParameter, CallerError


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("dtype", "int8", "choose one of auto, float32"),
        ("dtype", None, "choose one of"),
        ("device", "tpu", "choose one of auto, cpu, cuda"),
        ("attention", "flash", "choose one of auto, native"),
        ("linear", "mkl", "choose one of auto, native, torch"),
        ("draft_weights", "int2", "choose one of auto, same"),
        ("draft_tokens", 0, "from 1 to 4096"),
        ("explain", 1, "give True or False"),
        ("max_num_seqs", 0, "from 1 to"),
        ("max_num_seqs", True, "whole number"),
        ("max_num_seqs", 2.0, "whole number"),
        ("max_num_seqs", "8", "whole number"),
        ("frame_rows", 0, "from 1 to 4096"),
        ("frame_rows", 5000, "from 1 to 4096"),
        ("frame_sizes", [], "at least one"),
        ("frame_sizes", "16", "a list of whole numbers"),
        ("frame_sizes", [16, 0], "from 1 to 65536"),
        ("frame_sizes", [2.5], "whole number"),
        ("max_queued", -1, "whole number"),
        ("max_model_len", 1, "from 2 to"),
        ("seed", 2**64, "whole number"),
        ("seed", "abc", "whole number"),
        ("seed", None, "whole number"),
        ("model", "", "give a name, a folder, a hub id or a GGUF file"),
        ("model", None, "give a name"),
        ("kv_memory", 0, "give bytes"),
        ("kv_memory", -5, "give bytes"),
        ("kv_memory", True, "give bytes"),
        ("kv_memory", [1], "give bytes"),
        ("kv_memory", 1.5, "a share of what is free"),
        ("kv_memory", "plenty", "give bytes"),
        ("kv_memory", "2 quarts", "give bytes"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(BadParameter) as caught:
        EngineConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert remedy in str(caught.value)
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["trust_remote_code", "enable_prefix_caching", "compile"])
def test_a_flag_is_a_bool_and_not_a_word(name: str) -> None:
    """`trust_remote_code="false"` must not be true."""
    with pytest.raises(BadParameter, match=f"{name}='false'"):
        EngineConfig(**{name: "false"})


def test_a_date_is_checked_when_the_configuration_is_made() -> None:
    assert EngineConfig(date="2024-07-26").date == "2024-07-26"
    with pytest.raises(BadParameter, match=r"date='yesterday'.*YYYY-MM-DD"):
        EngineConfig(date="yesterday")


def test_a_queue_of_no_requests_is_refused() -> None:
    with pytest.raises(BadParameter, match="max_queued=0"):
        EngineConfig(max_queued=0)


@pytest.mark.parametrize(
    ("typo", "suggestion"),
    [
        ("frame_row", "frame_rows"),
        ("max_num_seq", "max_num_seqs"),
        ("prefix_caching", "enable_prefix_caching"),
        ("kv_mem", "kv_memory"),
        ("Dtype", "dtype"),
    ],
)
def test_a_misspelt_setting_is_refused_with_a_suggestion(typo: str, suggestion: str) -> None:
    with pytest.raises(BadParameter, match=rf"'{typo}'; did you mean {suggestion}\?"):
        EngineConfig.of(**{typo: 1})


def test_the_error_of_an_unknown_setting_carries_its_name() -> None:
    with pytest.raises(BadParameter) as caught:
        EngineConfig.of(frame_row=1)
    assert caught.value.param == "frame_row"


def test_an_unknown_setting_without_a_similar_one_gets_the_list() -> None:
    with pytest.raises(BadParameter, match=r"'zzzz'; known are model, revision.*date"):
        EngineConfig.of(zzzz=1)


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="dtype"):
        EngineConfig(dtype="x")
    assert issubclass(BadParameter, CallerError)


def test_a_configuration_is_frozen_and_keyword_only() -> None:
    config = EngineConfig.of(model="x", seed=-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("x")  # type: ignore[misc]
    assert config == EngineConfig(model="x", seed=-3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (2**30, 2**30),
        (1, 1),
        (0.5, 0.5),
        (1.0, 1.0),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("300 MB", 300_000_000),
        ("64KiB", 65536),
        ("100B", 100),
        ("50%", 0.5),
        ("100 %", 1.0),
        ("0.25", 0.25),
        ("4096", 4096),
    ],
)
def test_memory_is_read_as_bytes_or_a_share(value: Any, expected: Any) -> None:
    memory = parse_memory(value)
    assert memory == expected
    assert type(memory) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "B",
        "%",
        "GiB",
        "-1GiB",
        "0%",
        "0",
        "0B",
        "101%",
        "1.5",
        "nan%",
        "nanGB",
        "inf%",
        "GB1",
    ],
)
def test_memory_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match=r"kv_memory=.*give bytes .*or a share"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["infGB", "1e400 B", "-infKiB"])
def test_infinite_memory_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match="give bytes"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["150%", "-1GiB"])
def test_the_error_repeats_the_text(text: str) -> None:
    with pytest.raises(BadParameter, match=f"kv_memory='{text}'"):
        parse_memory(text)


@settings(deadline=None)
@given(num=st.integers(1, 2**20), unit=st.sampled_from(sorted(MEMORY_UNITS)))
def test_units_multiply(num: int, unit: str) -> None:
    assert parse_memory(f"{num}{unit}") == num * MEMORY_UNITS[unit]


@settings(deadline=None)
@given(st.text(max_size=8))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        memory = parse_memory(text)
    except BadParameter:
        return
    assert memory is not None
    assert memory > 0


def test_configuration_imports_no_torch() -> None:
    code = "import sys, samewise.config, samewise.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_signature_lists_every_setting_with_its_default() -> None:
    model, *others = settings_signature().parameters.values()
    assert (model.name, model.kind) == ("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert [p.name for p in others] == [f.name for f in dataclasses.fields(EngineConfig)][1:]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in others)
    assert EngineConfig(**{p.name: p.default for p in (model, *others)}) == EngineConfig()


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_help_of_the_python_interface_lists_the_settings(name: str) -> None:
    assert inspect.signature(getattr(samewise, name)) == settings_signature()


def test_every_setting_has_a_meaning_that_is_a_sentence() -> None:
    for setting in SETTINGS.values():
        assert setting.meaning[0].isupper(), setting.name
        assert setting.meaning.endswith("."), setting.name


def test_the_page_of_settings_is_made_from_the_declarations() -> None:
    page = Path(__file__).parent.parent / "docs" / "settings.md"
    remedy = (
        "write it again: python -c 'from samewise import config; print(config.settings_page(), end=str())'"
    )
    assert page.read_text(encoding="utf-8") == settings_page(), f"docs/settings.md is old; {remedy}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proposer": "magic"}, "proposer='magic': choose one of auto, none"),
        ({"proposer": "ngram+magic"}, "proposer='ngram+magic': choose one of"),
        ({"proposer": "auto+ngram"}, "auto and none cannot be combined"),
        ({"proposer": "model"}, "needs draft_model"),
        ({"proposer": "ngram", "draft_model": "x"}, "draft_model='x' is for proposer='model' or 'auto'"),
        ({"proposer": "none", "draft_weights": "int8"}, "draft_weights='int8' is for proposer='decode'"),
    ],
)
def test_proposers_that_exclude_each_other_or_lack_something_are_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(BadParameter, match=re.escape(message)):
        EngineConfig.of(**settings)


def test_several_proposers_are_given_in_order() -> None:
    assert EngineConfig(proposer="ngram+decode").proposers == ["ngram", "decode"]
