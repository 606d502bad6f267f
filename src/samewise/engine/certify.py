"""Prove the parts, then name everything the bits depend on: the contract."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.engine.assemble import Assembly
from samewise.execute import numerics
from samewise.execute.load import Loaded
from samewise.kernels.attention.base import PAGE
from samewise.text import grammar
from samewise.text.text_trial import date_fact, text_fact
from samewise.verify.probe import ProbeReport, probe

log = logging.getLogger("samewise")


class Certificate(NamedTuple):
    """The contract, and what the probe found."""

    contract: Contract
    report: ProbeReport


def certify(
    parts: Assembly, loaded: Loaded, config: EngineConfig, model_facts: Mapping[str, str]
) -> Certificate:
    """Run the probe on the loaded weights; raises GuaranteeLost if it fails.

    `model_facts`: digests of the weights and of the model's files.
    """
    with parts.process.pinned():
        max_model_len, num_operators = parts.limits.max_model_len, len(parts.operators)
        report = probe(parts.verifier, max_model_len=max_model_len, operators=num_operators)
    facts = {
        **model_facts,
        **arithmetic_facts(parts),
        "architecture": loaded.arch.model_type,
        "context": str(parts.limits.max_model_len),  # an answer ends where the context does
        "date": date_fact(loaded.tokenizer, config.date),
        "generation": generation_fact(loaded),
        "grammar": grammar.version(),
        "probe": report.digest,
        "rope": parts.rope,
        "text": text_fact(loaded.tokenizer, config.date),
    }
    contract = Contract.of(facts)
    log.info("contract %s, certified by %d frames", contract, report.frames)
    return Certificate(contract, report)


def generation_fact(loaded: Loaded) -> str:
    """Where answers end, and a digest of the checkpoint's generation defaults."""
    ends = ", ".join(map(str, sorted(loaded.eos_ids))) or "no token"
    defaults = json.dumps(sorted(loaded.generation.items()), default=str)
    return f"ends at {ends}; defaults {sha256(defaults.encode()).hexdigest()[:16]}"


def arithmetic_facts(parts: Assembly) -> dict[str, str]:
    """Which arithmetic gives the bits; and the machine with its libraries, unless all of it is our own.

    Where every float operation of a frame and of the sampler is a native kernel's, the bits are those that
    `kernels/native/expected.py` states, on any machine, at any number of rows and threads.
    """
    runner = parts.runner
    facts = {
        "attention": runner.kernel.name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "layers": runner.layers_name,
        "linear": linear_name(parts.linears),
        "page": str(PAGE),
        "sampler": parts.sampler.name,
    }
    if runner.portable and parts.sampler.name == "native":
        return facts | {"machine": "any"}
    compiled = numerics.compiler_name(parts.device) if runner.compiled else "off"
    return facts | parts.platform | {"compile": compiled, "frame rows": str(parts.frame_rows)}


def linear_name(linears: str) -> str:
    """Whose linears, and their version where it changes with their bits."""
    if linears != "triton":
        return linears
    from samewise.kernels.linear.triton import NAME  # imports Triton

    return NAME


def settings_of(parts: Assembly, config: EngineConfig) -> dict[str, str | int | bool | None]:
    """What another engine must be given to reach this contract, beside the model's name. Kept in receipts."""
    return {
        "attention": config.attention,
        "compile": parts.runner.compiled,
        "date": config.date,
        "device": parts.device.type,
        "dtype": str(parts.runner.dtype).removeprefix("torch."),
        "frame_rows": parts.frame_rows,
        "linear": parts.linears,
        "max_model_len": parts.limits.max_model_len,
        "revision": config.revision,
    }


__all__ = ["Certificate", "arithmetic_facts", "certify", "generation_fact", "linear_name", "settings_of"]
