"""Prove the parts, then name everything the bits depend on: the contract."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.engine.assemble import Assembly
from samewise.execute import numerics
from samewise.execute.load import Loaded
from samewise.kernels.attention.base import PAGE
from samewise.text import grammar
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
    runner = parts.runner
    with parts.process.pinned():
        parts.verifier.probe_sampler()
        report = probe(runner, max_model_len=parts.limits.max_model_len, operators=len(parts.operators))
    facts = {
        **model_facts,
        **parts.platform,
        "architecture": loaded.arch.model_type,
        "attention": runner.kernel.name,
        "compile": numerics.compiler_name(parts.device) if runner.compiled else "off",
        "date": config.date or "none",
        "dtype": str(next(runner.model.parameters()).dtype).removeprefix("torch."),
        "frame rows": str(parts.frame_rows),
        "grammar": grammar.version(),
        "layers": "native" if runner.fused else "modules",
        "linear": parts.linear_name,
        "page": str(PAGE),
        "probe": report.digest,
        "rope": parts.rope,
    }
    contract = Contract.of(facts)
    log.info("contract %s, certified by %d frames", contract, report.frames)
    return Certificate(contract, report)


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


__all__ = ["Certificate", "certify", "settings_of"]
