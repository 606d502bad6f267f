"""Extras of the package: `serve` brings everything that the server offers."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS = PROJECT["optional-dependencies"]


def packages(extra: str) -> set[str]:
    """What an extra installs, those of the extras it names included."""
    found: set[str] = set()
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found |= {package for name in requirement.extras for package in packages(name)}
        else:
            found.add(requirement.name)
    return found


def test_serve_brings_structured_output_and_signed_receipts() -> None:
    assert {"llguidance", "cryptography", "starlette", "uvicorn", "pydantic"} <= packages("serve")
    assert packages("grammar") | packages("sign") <= packages("serve") <= packages("dev")
