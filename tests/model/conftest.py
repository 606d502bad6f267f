import pytest
from model_files import write_gguf

from samewise import user_cache


@pytest.fixture
def cache(request, tmp_path, monkeypatch):
    """An empty cache folder; the user's own for tests of the embedded model."""
    if "real" not in request.keywords:
        monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return user_cache.cache_dir()


@pytest.fixture
def model_folder(tmp_path):
    """A folder with the files of a model; their content is not a model's."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
