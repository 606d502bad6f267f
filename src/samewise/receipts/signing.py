"""ed25519 keys and signatures for receipts. Needs `cryptography`, the extra `sign`. Host only.

A private key is an unencrypted PKCS#8 PEM file of mode 0600; the public key, for auditors, is the file beside
it with `.pub` added to its name.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.errors import BadParameter, MachineError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "ed25519"


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature and its public key, both in base64."""

    key: str
    value: str

    def verifies(self, message: bytes) -> bool:
        """Whether this is the key's valid signature of the message."""
        _require_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            public = Ed25519PublicKey.from_public_bytes(_decode(self.key))
            public.verify(_decode(self.value), message)
        except (InvalidSignature, ValueError, binascii.Error):
            return False
        return True


class SigningKey:
    """A private key, read once. It is never shown: not by `repr`, not in a traceback."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SigningKey:
        """The private key in a PEM file."""
        _require_cryptography()
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        content = _read(path)
        try:
            key = serialization.load_pem_private_key(content, password=None)
        except TypeError:
            raise BadParameter(f"the key {path} has a passphrase; give one without", param="key") from None
        except (ValueError, _unsupported()):
            raise _not_a_key(path, "private") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise _not_a_key(path, "private")
        return cls(key)

    def sign(self, message: bytes) -> Signature:
        """Sign a message."""
        return Signature(self.public, base64.b64encode(self._key.sign(message)).decode())

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"


def new_key(path: str | os.PathLike[str]) -> str:
    """Make a key pair: `path`, mode 0600, and `path`.pub. Returns the public key.

    An existing file is never overwritten.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    private_path = Path(path)
    public_path = private_path.with_name(private_path.name + ".pub")
    for file in (private_path, public_path):
        if file.exists():
            raise BadParameter(
                f"{file} is there already; a key is never overwritten, choose another name", param="path"
            )
    _write(private_path, secret, 0o600)
    _write(public_path, public, 0o644)
    return SigningKey(key).public


def read_public(path: str | os.PathLike[str]) -> str:
    """The public key in a PEM file (public or private), in base64 as receipts write it."""
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    content = _read(path)
    if b"PRIVATE KEY" in content:
        return SigningKey.load(path).public
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, _unsupported()):
        raise _not_a_key(path, "public") from None
    if not isinstance(key, Ed25519PublicKey):
        raise _not_a_key(path, "public")
    return base64.b64encode(key.public_bytes_raw()).decode()


def _decode(text: str) -> bytes:
    """Base64 in its one form; ValueError for another text of the same bytes, as it is a changed receipt."""
    content = base64.b64decode(text, validate=True)
    if base64.b64encode(content).decode() != text:
        raise ValueError("not canonical base64")
    return content


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401 - checks that it is installed
    except ImportError:
        raise MachineError("signed receipts need another package: pip install 'samewise[sign]'") from None


def _unsupported() -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    return UnsupportedAlgorithm


def _not_a_key(path: str | os.PathLike[str], kind: str) -> BadParameter:
    return BadParameter(
        f"{path} holds no {kind} ed25519 key in PEM; make a pair with `samewise keygen`", param="key"
    )


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadParameter(f"cannot read the key {path}: {error.strerror or error}", param="key") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError as error:
        raise BadParameter(f"cannot write the key {path}: {error.strerror or error}", param="path") from None


__all__ = ["ALGORITHM", "Signature", "SigningKey", "new_key", "read_public"]
