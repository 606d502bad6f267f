"""The CPU kernels: how the native one is built and called, and that its bits are what its source says."""

from __future__ import annotations

import logging
import os
import random
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from samewise.errors import BadParameter, InvariantBroken, MachineError
from samewise.kernels import native as toolchain
from samewise.kernels.attention import native
from samewise.kernels.attention.base import PAGE, Kernel, LayerKV, Rows
from samewise.kernels.attention.cpu import TorchKernel, pick

needs_compiler = pytest.mark.skipif(not toolchain.available(), reason="no C++ compiler")
CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class Text:
    """One sequence's q, k, v, and the pages it lives in."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int]

    def __len__(self) -> int:
        return self.q.shape[0]


def make_text(length, pages, *, heads=6, kv_heads=2, dim=64, dtype=torch.float32, seed=0) -> Text:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, h, dim, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads))
    return Text(q, k, v, pages)


def scattered_pages(length: int, seed: int = 0) -> list[int]:
    numbers = list(range(1, (length + PAGE - 1) // PAGE + 3))
    random.Random(seed).shuffle(numbers)
    return numbers[: (length + PAGE - 1) // PAGE]


def make_pages(kernel: Kernel, text: Text, num_pages: int = 0, fill: float = NAN) -> LayerKV:
    kv_heads, dim = text.k.shape[1:]
    kv = kernel.allocate(num_pages or max(text.pages) + 1, kv_heads, dim, text.q.dtype, CPU)
    kv.k.fill_(fill)
    kv.v.fill_(fill)
    return kv


def rows_of(places: list[tuple[Text, int] | None]) -> tuple[Rows, tuple[torch.Tensor, ...]]:
    """Rows and q, k, v of a pass: (text, position) each, None for padding."""
    texts = list({id(p[0]): p[0] for p in places if p}.values())
    starts, pages = {}, []
    for text in texts:
        starts[id(text)] = len(pages)
        pages += text.pages
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    rows = Rows(
        ints([p[1] + 1 if p else 0 for p in places]),
        ints(
            [p[0].pages[p[1] // PAGE] * PAGE + p[1] % PAGE if p else i % PAGE for i, p in enumerate(places)]
        ),
        ints([starts[id(p[0])] if p else 0 for p in places]),
        ints(pages),
        torch.empty(0),
        torch.empty(0),
    )
    junk = torch.full_like(texts[0].q[0], NAN), *(torch.full_like(texts[0].k[0], NAN),) * 2
    picked = [(p[0].q[p[1]], p[0].k[p[1]], p[0].v[p[1]]) if p else junk for p in places]
    return rows, tuple(torch.stack(x) for x in zip(*picked, strict=True))


def run(kernel, kv, places, *, scale=0.125, window=None) -> torch.Tensor:
    rows, (q, k, v) = rows_of(places)
    return kernel(q, k, v, kv, rows, scale=scale, window=window)


def read(kernel, text, *, size=16, window=None, kv=None, scale=0.125) -> torch.Tensor:
    """The whole text in spans of `size` rows."""
    kv = kv or make_pages(kernel, text)
    parts = [
        run(kernel, kv, [(text, p) for p in range(i, min(i + size, len(text)))], window=window, scale=scale)
        for i in range(0, len(text), size)
    ]
    return torch.cat(parts)


def reference(text: Text, window=None, scale=0.125, first=0) -> torch.Tensor:
    """Attention in float64, every position from `first`."""
    q, k, v = (x.double().transpose(0, 1) for x in (text.q[first:], text.k, text.v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    at = torch.arange(len(text))
    seen = at[None, :] <= at[first:, None]
    if window is not None:
        seen &= at[None, :] > at[first:, None] - window
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "torch"])
def kernel(request) -> Kernel:
    return pick(request.param)


# -- what is computed ----------------------------------------------------------------------------------

SHAPES = [(6, 2, 64), (9, 3, 64), (4, 4, 16), (14, 2, 128), (8, 1, 80), (5, 5, 24), (3, 1, 7), (50, 1, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 16, 37])
def test_agrees_with_float64(kernel, heads, kv_heads, dim, window):
    text = make_text(75, scattered_pages(75), heads=heads, kv_heads=kv_heads, dim=dim)
    got = read(kernel, text, window=window)
    assert (got - reference(text, window)).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("window", [None, 20])
def test_agrees_with_float64_in_half_precision(kernel, dtype, tolerance, window):
    text = make_text(60, scattered_pages(60), dtype=dtype)
    got = read(kernel, text, window=window)
    assert got.dtype == dtype
    assert (got.double() - reference(text, window)).abs().max() < tolerance


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside_rounded_once(dtype):
    kernel = pick("native")
    text = make_text(60, scattered_pages(60), dtype=dtype)
    text = Text(text.q, text.k, text.v * torch.logspace(-8, 4, 60)[:, None, None].to(dtype), text.pages)
    wide = Text(text.q.float(), text.k.float(), text.v.float(), text.pages)
    assert same_bits(read(kernel, text), read(kernel, wide).to(dtype))


def test_one_key_gives_its_value_exactly(kernel):
    text = make_text(1, [3])
    assert torch.equal(read(kernel, text)[0], text.v[0].repeat_interleave(3, dim=0))


def test_scores_far_apart_neither_overflow_nor_vanish(kernel):
    text = make_text(40, scattered_pages(40))
    loud = Text(text.q * 100, text.k * 100, text.v, text.pages)
    assert (read(kernel, loud) - reference(loud)).abs().max() < 1e-2  # scores near 1e4 resolve no finer


@pytest.mark.parametrize("window", [None, 700])
def test_long_context(kernel, window):
    text = make_text(5000, scattered_pages(5000), heads=3, kv_heads=1)
    kv = make_pages(kernel, text)
    read(kernel, text, size=5000, kv=kv, window=1)  # fills the pages
    last = [(text, p) for p in range(4984, 5000)]
    got = run(kernel, kv, last, window=window)
    assert (got - reference(text, window, first=4984)).abs().max() < 1e-5
    alone = torch.cat([run(kernel, kv, [place], window=window) for place in last])
    assert same_bits(got, alone)


@needs_compiler
def test_context_beyond_the_scratch_of_one_tile():
    """32k keys and 64 queries: tiles are cut smaller, bits stay."""
    kernel = pick("native")
    text = make_text(32768, scattered_pages(32768), heads=16, kv_heads=1, dim=16)
    kv = make_pages(kernel, text)
    read(kernel, text, size=32768, kv=kv, window=1)
    places = [(text, p) for p in range(32760, 32768)]
    together = run(kernel, kv, places)
    assert same_bits(together[3:4], run(kernel, kv, places[3:4]))
    assert together.isfinite().all()


# -- the law -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("size", [1, 3, 7, 33, 100])
def test_cuts_do_not_matter(kernel, dtype, window, size):
    text = make_text(100, scattered_pages(100), dtype=dtype)
    assert same_bits(read(kernel, text, window=window), read(kernel, text, size=size, window=window))


@pytest.mark.parametrize("window", [None, 24])
def test_company_order_pages_and_dirt_do_not_matter(kernel, window):
    one, two = make_text(90, list(range(1, 7))), make_text(70, list(range(7, 12)), seed=1)
    moved = Text(one.q, one.k, one.v, [19, 3, 11, 12, 1, 7])
    away = Text(two.q, two.k, two.v, [2, 4, 5, 6, 8])
    alone = {0: read(kernel, one, window=window), 1: read(kernel, two, window=window)}
    chance = random.Random(5)
    for fill in (NAN, float("inf"), 3e38, 0.0):
        kv = make_pages(kernel, one, num_pages=20, fill=fill)
        done = [0, 0]
        while done != [90, 70]:
            spans = [
                list(range(n, min(n + chance.randrange(40), len(t))))
                for n, t in zip(done, (one, two), strict=True)
            ]
            places = [(i, p) for i, span in enumerate(spans) for p in span] + [None] * chance.randrange(3)
            if chance.random() < 0.5:
                chance.shuffle(places)
            done = [n + len(span) for n, span in zip(done, spans, strict=True)]
            if not any(places):
                continue
            got = run(kernel, kv, [p and ((moved, away)[p[0]], p[1]) for p in places], window=window)
            for row, place in enumerate(places):
                want = alone[place[0]][place[1]] if place else torch.zeros_like(got[row])
                assert same_bits(got[row], want)


@pytest.mark.parametrize("bad", [NAN, float("inf"), 3e38])
def test_a_later_row_that_is_not_a_number_leaves_earlier_rows_alone(kernel, bad):
    text = make_text(32, [2, 1])
    k, v = text.k.clone(), text.v.clone()
    k[20], v[20] = bad, bad
    spoilt = Text(text.q, k, v, text.pages)
    assert same_bits(read(kernel, text)[:20], read(kernel, spoilt)[:20])
    after = read(kernel, spoilt, window=4)[24:]  # the window has passed it by
    assert same_bits(after, read(kernel, text, window=4)[24:])


def test_nan_that_a_row_sees_comes_out(kernel):
    text = make_text(20, [1, 2])
    k = text.k.clone()
    k[4] = NAN
    assert read(kernel, Text(text.q, k, text.v, text.pages))[19].isnan().all()


def test_padding_alone_gives_zeros(kernel):
    text = make_text(4, [1])
    rows, (q, k, v) = rows_of([(text, 0)])
    rows = rows._replace(lengths=torch.zeros(1, dtype=torch.int32), slots=torch.zeros(1, dtype=torch.int32))
    assert not kernel(q * NAN, k, v, make_pages(kernel, text), rows, scale=1.0, window=None).any()


# -- threads, compilers, strides -----------------------------------------------------------------------


@needs_compiler
def test_threads_do_not_matter():
    kernel = pick("native")
    text = make_text(400, scattered_pages(400), heads=9, kv_heads=3)
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            answers.append(read(kernel, text, size=130))
    finally:
        torch.set_num_threads(before)
    assert same_bits(answers[0], answers[1])
    assert same_bits(answers[0], answers[2])


@needs_compiler
@pytest.mark.parametrize("flags", [("-O1", "-DSAMEWISE_PORTABLE"), ("-O3", "-DSAMEWISE_PORTABLE")])
def test_vectors_and_optimisation_do_not_matter(tmp_path, flags):
    toolchain.build(tmp_path / "other.so", flags)
    other = native.entry_of(toolchain.load(tmp_path / "other.so"))
    kernel = pick("native")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        text = make_text(70, scattered_pages(70), heads=9, kv_heads=3, dim=40, dtype=dtype)
        text = Text(text.q * 20, text.k, text.v, text.pages)
        rows, (q, k, v) = rows_of([(text, p) for p in range(70)])
        kv = make_pages(kernel, text)
        got = native.attend(other, q, k, v, kv.k, kv.v, *rows[:4], 0.125, 50)
        assert same_bits(got, read(kernel, text, window=50))


@needs_compiler
def test_flushing_subnormals_elsewhere_does_not_matter():
    kernel = pick("native")
    text = make_text(50, scattered_pages(50))
    tiny = Text(text.q, text.k, text.v * 1e-39, text.pages)
    want = read(kernel, tiny)
    assert want.any()
    try:
        assert torch.set_flush_denormal(True)
        got = read(kernel, tiny)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(want, got)


def test_strided_inputs_do_not_matter(kernel):
    text = make_text(30, [1, 2])
    rows, (q, k, v) = rows_of([(text, p) for p in range(30)])
    want = kernel(q, k, v, make_pages(kernel, text), rows, scale=0.125, window=None)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    by_dim = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (q, k, v)]
    for inputs in (by_head, by_dim):
        got = kernel(*inputs, make_pages(kernel, text), rows, scale=0.125, window=None)
        assert got.is_contiguous()
        assert same_bits(want, got)


@needs_compiler
def test_bad_tables_are_refused():
    kernel = pick("native")
    text = make_text(20, [1, 2])
    rows, (q, k, v) = rows_of([(text, p) for p in range(20)])
    kv = make_pages(kernel, text)
    for broken in (
        rows._replace(slots=rows.slots + 1000),
        rows._replace(slots=rows.slots - 1000),
        rows._replace(pages=rows.pages + 7),
        rows._replace(page_start=rows.page_start + 1),
        rows._replace(lengths=rows.lengths + 100),
        rows._replace(lengths=rows.lengths.long()),
        rows._replace(slots=rows.slots[:4]),
    ):
        with pytest.raises(InvariantBroken):
            kernel(q, k, v, kv, broken, scale=1.0, window=None)
    with pytest.raises(InvariantBroken):
        kernel(q.half(), k, v, kv, rows, scale=1.0, window=None)
    with pytest.raises(InvariantBroken):
        kernel(q, k[:, :1], v, kv, rows, scale=1.0, window=None)


# -- under torch.compile -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiles_whole_and_writes_pages_in_place(kernel, monkeypatch):
    text = make_text(30, [1, 2])
    rows, (q, k, v) = rows_of([(text, p) for p in range(30)])

    def layer(q, k, v, kv, rows):
        return kernel(q * 2 + 1, k, v, kv, rows, scale=0.125, window=20) * 3

    mine, theirs = make_pages(kernel, text), make_pages(kernel, text)
    attend, written = native.attend, []

    def spy(entry, q, k, v, k_cache, v_cache, *rest):
        written.append((k_cache.data_ptr(), v_cache.data_ptr()))
        return attend(entry, q, k, v, k_cache, v_cache, *rest)

    monkeypatch.setattr(native, "attend", spy)
    with torch.no_grad():
        want = layer(q, k, v, mine, rows)
        got = torch.compile(layer, fullgraph=True)(q, k, v, theirs, rows)
    assert same_bits(want, got)
    if isinstance(kernel, native.NativeKernel):
        assert written == [(kv.k.data_ptr(), kv.v.data_ptr()) for kv in (mine, theirs)]
    for a, b in zip(mine, theirs, strict=True):
        assert same_bits(a, b)


# -- building ------------------------------------------------------------------------------------------


def forget():
    native._entry.cache_clear()
    toolchain.library.cache_clear()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache folder of its own, and no library loaded yet."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "native"
    forget()


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_compiler
def test_built_once_and_found_again(fresh, monkeypatch):
    native.NativeKernel()
    assert [p.name for p in fresh.iterdir()] == [toolchain.library_path().name]
    built = toolchain.library_path().stat().st_mtime_ns
    forget()
    monkeypatch.setattr(toolchain, "build", lambda *_: pytest.fail("built again"))
    native.NativeKernel()
    assert toolchain.library_path().stat().st_mtime_ns == built


@needs_compiler
def test_another_cpu_or_compiler_is_another_library(fresh, monkeypatch, tmp_path):
    here = toolchain.library_path()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_cpu", lambda: "another")
        assert toolchain.library_path() != here
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", "#!/bin/sh\necho version 99\n")))
    assert toolchain.library_path() != here


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert toolchain._cache_dir() == Path("/a/native")
    monkeypatch.delenv("SAMEWISE_CACHE")
    assert toolchain._cache_dir() == Path("/b/samewise/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert toolchain._cache_dir() == Path.home() / ".cache/samewise/native"


@needs_compiler
def test_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, fresh):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "file"))
    text = make_text(20, [1, 2])
    assert (read(native.NativeKernel(), text) - reference(text)).abs().max() < 1e-5


def test_no_compiler_is_an_error_that_says_what_to_do(monkeypatch, fresh):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert not toolchain.available()
    with pytest.raises(MachineError, match=r'g\+\+.*attention="torch"'):
        native.NativeKernel()
    monkeypatch.setenv("CXX", "my-cxx")
    with pytest.raises(MachineError, match="my-cxx"):
        native.NativeKernel()


def test_compiler_that_fails_is_quoted(monkeypatch, fresh, tmp_path):
    broken = program(tmp_path / "broken-cxx", "#!/bin/sh\necho no such luck >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(MachineError) as caught:
        native.NativeKernel()
    for part in (str(broken), "-ffp-contract=off", "no such luck", 'attention="torch"'):
        assert part in str(caught.value)
    assert not list(fresh.glob(".building-*"))


def test_pick(monkeypatch, caplog):
    assert isinstance(pick("torch"), TorchKernel)
    with pytest.raises(BadParameter, match="flash"):
        pick("flash")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert isinstance(pick("auto"), TorchKernel)
    assert "contract" in caplog.text


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_and_concurrent_builds(tmp_path):
    script = (
        "import torch, pathlib\n"
        "from samewise.kernels import native as toolchain\n"
        "from samewise.kernels.attention import native\n"
        "kernel = native.NativeKernel()\n"
        "words = pathlib.Path('/proc/self/maps').read_text().split()\n"
        "names = ('libgomp', 'libomp', 'libiomp')\n"
        "print(len({w for w in words if pathlib.Path(w).name.startswith(names)}))\n"
        "print(toolchain.parallel() is not None)\n"
    )
    env = {**os.environ, "SAMEWISE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0].split() for p in both] == [["1", "True"]] * 2
    assert [p.suffix for p in (tmp_path / "native").iterdir()] == [".so"]
