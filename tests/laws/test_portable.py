"""A contract that names no machine: one id and one set of bits, whatever runs it; and where it names one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from native_variants import CPU_FEATURES, missing, needs_compiler
from samewise import LLM, SamplingParams
from samewise.config import EngineConfig
from samewise.engine import Engine, build
from samewise.execute.load import Loaded
from samewise.jobs.audit import Auditor, Case, Status, make_recorded_tokens
from samewise.jobs.portable import EXPECTED_MODELS, MODELS, check_portable, hashed_model, model_digest
from samewise.kernels.native import build as native_build
from samewise.kernels.native.expected import EXPECTED
from samewise.receipts import loads
from samewise.testing import FAMILIES, tiny, tiny_engine

pytestmark = needs_compiler

SRC = Path(__file__).parents[2] / "src"
LLAMA = next(iter(MODELS))


def hashed_engine(name: str = LLAMA, make_proposer: Any = None, **settings: Any) -> Engine:
    """An engine over a model whose weights are the same on every machine."""
    settings = {"model": name, "device": "cpu", "kv_memory": 2**24} | settings
    return Engine(hashed_model(name), EngineConfig.of(**settings), make_proposer=make_proposer)


def facts(engine: Engine) -> dict[str, str]:
    return dict(engine.contract.facts)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- one set of bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_stored_digest_of_a_models_answers_is_reproduced(name: str) -> None:
    assert model_digest(name) == EXPECTED_MODELS[name]


def test_the_report_compares_every_kernel_and_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = check_portable()
    assert all(finding.same for finding in findings)
    assert [finding.name for finding in findings] == [
        *(f"kernel: {name}" for name in EXPECTED),
        *(f"model: {name}" for name in MODELS),
    ]
    monkeypatch.setitem(EXPECTED_MODELS, LLAMA, "0" * 16)
    assert [finding.name for finding in check_portable() if not finding.same] == [f"model: {LLAMA}"]


# -- one contract --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_contract_is_the_same_at_any_number_of_threads_and_rows(
    name: str, set_threads: Callable[[int], None]
) -> None:
    expected = hashed_engine(name).contract
    assert dict(expected.facts)["machine"] == "any"
    for threads, settings in [(1, {"frame_rows": 16}), (2, {"frame_rows": 128}), (4, {"max_num_seqs": 3})]:
        set_threads(threads)
        contract = hashed_engine(name, **settings).contract
        assert contract.differences(expected) == []
        assert contract.id == expected.id


def test_the_contract_names_no_library_no_cpu_and_no_instruction_set() -> None:
    engine = hashed_engine()
    names = {"torch", "numpy", "transformers", "cpu", "isa", "threads", "blas", "platform", "frame rows"}
    assert not names & facts(engine).keys()
    text = json.dumps(engine.contract.facts).lower()
    cpu = engine.parts.platform["cpu"].lower()
    for word in (*map(version, ("torch", "numpy", "transformers")), cpu, "avx", "mkl", "omp_", "x86", "arm"):
        assert word not in text


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "float16": ("llama", {"dtype": "float16"}),
    "torch's linears": ("llama", {"linear": "torch"}),
    "torch's attention": ("llama", {"attention": "torch"}),
    "capped logits": ("gemma3_text", {"overrides": {"final_logit_softcapping": 30.0}}),
    "another activation": ("llama", {"overrides": {"hidden_act": "relu"}}),
}
MACHINE = {"cpu", "isa", "threads", "torch", "numpy", "transformers", "frame rows"}


@pytest.mark.parametrize("case", OTHERS)
def test_the_contract_names_the_machine_where_other_arithmetic_takes_part(case: str) -> None:
    family, settings = OTHERS[case]
    named = facts(tiny_engine(family, **settings))
    assert "machine" not in named
    assert named.keys() >= MACHINE


@pytest.mark.parametrize("family", FAMILIES)
def test_families_whose_layers_are_native_name_no_machine(family: str) -> None:
    assert facts(tiny_engine(family))["machine"] == "any"


def hook(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


class OtherNorm(torch.nn.Module):
    """A norm that adds one."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.inner = norm.weight, norm.variance_epsilon, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1.0


def replace_norm(model: Any) -> None:
    model.model.norm = OtherNorm(model.model.norm)


def patch_norm(model: Any) -> None:
    norm = model.model.norm
    before = norm.forward
    norm.forward = lambda x: before(x) * 2.0


def patch_rotary(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.attention_scaling = 1.0
    before = rotary.forward
    rotary.forward = lambda *a, **k: tuple(2.0 * each for each in before(*a, **k))


def limit_embedding(model: Any) -> None:
    model.model.embed_tokens.max_norm = 1.0


CHANGES: dict[str, Callable[[Any], None]] = {
    "a hook on the embedding": lambda model: hook(model.model.embed_tokens),
    "a hook on the last norm": lambda model: hook(model.model.norm),
    "a hook on rotary positions": lambda model: hook(model.model.rotary_emb),
    "a hook on the head": lambda model: hook(model.lm_head),
    "a hook on a layer": lambda model: hook(model.model.layers[1]),
    "another norm": replace_norm,
    "a patched norm": patch_norm,
    "patched rotary positions": patch_rotary,
    "an embedding with a limit": limit_embedding,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_contract_names_the_machine_of_a_model_that_was_changed(change: str) -> None:
    loaded: Loaded = tiny("llama")
    CHANGES[change](loaded.model)
    engine = Engine(loaded, EngineConfig.of(model="tiny", device="cpu", kv_memory=2**24))
    assert not engine.runner.portable
    assert facts(engine).keys() >= MACHINE


def test_the_length_of_the_context_is_a_fact() -> None:
    """An answer ends where the context does, with the same reason."""
    short, long = hashed_engine(max_model_len=40), hashed_engine(max_model_len=256)
    assert {name for name, _, _ in short.contract.differences(long.contract)} >= {"context"}
    assert facts(short)["context"] == "40"


# -- receipts ------------------------------------------------------------------------------------------


def test_a_receipt_is_audited_under_other_threads_and_rows(set_threads: Callable[[int], None]) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20, logprobs=3),
        SamplingParams(temperature=1.2, min_p=0.02, seed=4, n=2, max_tokens=12, repetition_penalty=1.1),
    ]
    prompts = [list(range(start, start + 40)) for start in (5, 900, 3000)]
    set_threads(1)
    with LLM.over(hashed_engine(frame_rows=16, proposer="none")) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        receipts = [one for out, how in zip(outputs, params, strict=True) for one in llm.receipts(out, how)]
    set_threads(4)
    auditor = Auditor(
        hashed_engine(
            make_proposer=make_recorded_tokens, frame_rows=128, enable_prefix_caching=False, draft_tokens=4096
        )
    )
    cases = [Case(str(i), loads(receipt.dumps())) for i, receipt in enumerate(receipts)]
    findings = list(auditor.audit(cases))
    assert [finding.status for finding in findings] == [Status.SAME] * 4
    assert all(not finding.details for finding in findings)  # and under the receipt's own contract


# -- the matrix ----------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from samewise import machine
machine.pin_environment()
import torch
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.jobs.portable import MODELS, check_portable, hashed_model
contracts = []
for name in MODELS:
    config = EngineConfig.of(model=name, device="cpu", kv_memory=2**24)
    contracts.append(Engine(hashed_model(name), config).contract.id)
digests = {finding.name: finding.digest for finding in check_portable()}
print(json.dumps({"contracts": contracts, "digests": digests, "threads": torch.get_num_threads()}))
"""


def aten(capability: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": capability}


MATRIX: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "4 threads, limited to 1": {"OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": "1"},
    "ATen default": aten("default"),
    "ATen AVX2": aten("avx2"),
    "ATen AVX-512": aten("avx512"),
    "portable C++": {"SAMEWISE_PORTABLE": "1"},
    "AVX2 C++": {"CXX": "c++ -mno-avx512f"},
    "clang++": {"CXX": "clang++"},
    "MKL in another mode": {"MKL_CBWR": "COMPATIBLE"},
    "CXXFLAGS=-Ofast": {"CXXFLAGS": "-Ofast -ffast-math"},
}
NEEDS = {"AVX2 C++": "AVX2", "clang++": "clang++"}


def why_not_run(name: str) -> str | None:
    if name in NEEDS:
        return missing(NEEDS[name])
    features = {"ATen AVX2": "avx2", "ATen AVX-512": "avx512f"}
    feature = features.get(name)
    return None if feature is None or feature in CPU_FEATURES else f"a CPU without {feature}"


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """Contract ids and digests of this process."""
    return {
        "contracts": [hashed_engine(name).contract.id for name in MODELS],
        "digests": {f"kernel: {name}": f"{digest:016x}" for name, digest in EXPECTED.items()}
        | {f"model: {name}": digest for name, digest in EXPECTED_MODELS.items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_ids_and_bits_are_the_same_in_another_process(name: str, here: dict[str, Any]) -> None:
    if reason := why_not_run(name):
        pytest.skip(reason)
    env = {key: value for key, value in os.environ.items() if key not in {"CXX", "SAMEWISE_PORTABLE"}}
    env |= {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"} | MATRIX[name]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    there = json.loads(result.stdout.splitlines()[-1])
    assert there["threads"] == int(env["OMP_NUM_THREADS"]) or "OMP_THREAD_LIMIT" in env
    assert there["contracts"] == here["contracts"]
    assert there["digests"] == here["digests"]


EMBEDDED_PROBE = "ed653a5b0251c78703c3c4d429c43021627cd3fb92f02eb6b41467b4bdc2ebe5"
"""The fact `probe` of the embedded model on every machine: it changes only with the engine's arithmetic, or
with the texts and the ways of sampling that the probe tries."""


@pytest.mark.slow
@pytest.mark.real
def test_the_embedded_model_has_one_contract_in_other_processes() -> None:
    engine = build(EngineConfig.of(device="cpu", kv_memory=2**26, proposer="none"))
    expected = facts(engine)
    assert expected["machine"] == "any"
    assert expected["probe"] == EMBEDDED_PROBE
    main = "from samewise.cli.main import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", main, "probe", "--device", "cpu", "--json"]
    for changes in ({"OMP_NUM_THREADS": "1", "SAMEWISE_PORTABLE": "1"}, aten("default")):
        env = os.environ | {"PYTHONPATH": str(SRC)} | changes
        result = subprocess.run(
            [*command, "--kv-memory", "64MiB"], env=env, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
        report = json.loads(result.stdout)
        assert report["facts"] == expected
        assert report["contract"] == engine.contract.id


@pytest.mark.slow
def test_relaxed_arithmetic_in_cxx_is_refused_in_another_process() -> None:
    program = native_build.find_compiler()
    assert program is not None
    env = os.environ | {"PYTHONPATH": str(SRC), "CXX": f"{program[0]} -Ofast"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "CXX has the option -Ofast" in result.stderr
