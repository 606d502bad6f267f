"""Which modules commands import: those that are not needed cost seconds at every start."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = {
    "gguf", "huggingface_hub", "jinja2", "llguidance", "matplotlib", "numpy", "prometheus_client",
    "safetensors",
    "starlette", "tokenizers", "torch", "transformers", "triton", "uvicorn", "uvloop",
}  # fmt: skip
"""Packages that no help text needs."""
NEVER = HEAVY - {
    "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton",
}  # fmt: skip
"""Packages that loading a model from safetensors and answering do not need either."""
AUTO_CLASSES = """
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
import transformers.models.llama.modeling_llama, transformers.tokenization_utils_tokenizers
"""
"""What every program imports that loads such a model with transformers."""


def _modules(code: str, *args: object) -> set[str]:
    """The modules that a new process has imported after running the code."""
    text = (
        f"import atexit, json, sys\natexit.register(lambda: print(json.dumps(sorted(sys.modules))))\n{code}"
    )
    command = [sys.executable, "-c", text, *map(str, args)]
    environment = os.environ | {"COLUMNS": "80"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return set(json.loads(result.stdout.splitlines()[-1]))


def _command(*args: object) -> set[str]:
    return _modules("from samewise.cli.main import main; main()", *args)


def _packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "args", [("--help",), ("serve", "--help"), ("generate", "--help"), ("bench", "--help")]
)
def test_help_imports_nothing_heavy(args):
    modules = _command(*args)
    assert not _packages(modules) & HEAVY
    assert "samewise.cli.main" in modules


def test_answering_imports_of_torch_and_transformers_what_loading_a_model_does(model):
    modules = _command("generate", "Hello", "--model", model, "--max-tokens", 2, "--kv-memory", "8MiB")
    theirs = {name for name in modules if name.partition(".")[0] in {"torch", "transformers", "triton"}}
    assert "torch" in theirs
    assert theirs <= _modules(AUTO_CLASSES)
    assert not _packages(modules) & NEVER


def test_answering_imports_no_module_of_other_commands(model):
    modules = _command("generate", "Hello", "--model", model, "--max-tokens", 2, "--kv-memory", "8MiB")
    for package in ("samewise.jobs", "samewise.openai", "samewise.testing"):
        assert package not in modules
    assert {name for name in modules if name.startswith("samewise.bench.")} == {"samewise.bench.options"}
    assert {name for name in modules if name.startswith("samewise.serve.")} == {
        "samewise.serve.limits", "samewise.serve.listen", "samewise.serve.logs", "samewise.serve.settings",
    }  # fmt: skip
