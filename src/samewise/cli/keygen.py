"""`samewise keygen`: a key pair to sign receipts with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    path: Annotated[Path, typer.Argument(help="File of the private key; PATH.pub gets the public one.")],
) -> None:
    """Make an ed25519 key pair to sign receipts with."""
    from samewise.receipts.signing import new_key

    typer.echo(f"{path}: private key, keep it to yourself\n{path}.pub: public key {new_key(path)}")


__all__ = ["keygen"]
