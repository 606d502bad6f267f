"""The scripts in bench/, end to end on a tiny shape: they run, and they notice what they look for."""

import json
import random
import runpy
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def _script_folder_on_path(monkeypatch):
    """Scripts import each other as they do when run from a shell."""
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """Run a script; returns its last line if that is JSON, else all lines, which are also in `lines`."""

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *options, "--out", str(tmp_path)])
        runpy.run_path(str(BENCH / name), run_name="__main__")
        run.lines = lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]) if lines[-1].startswith("{") else lines

    return run


def test_h200_measures_loads_and_compares_bits(script, tmp_path):
    figures = script(
        "h200.py", "--device", "cpu", "--lengths", "24/8", "--live", "1,10", "--steps", "4",
        "--repeats", "1", "--rows", "1000",
    )  # fmt: skip
    assert figures["bits"]["rows"] >= 1000
    assert figures["bits"]["differing"] == 0
    single, many = figures["cases"]
    assert (single["live"], many["live"]) == (1, 10)
    assert list(single["modes"]) == ["verified", "unverified"]
    assert list(many["modes"]) == ["verified", "unverified", "10%"]
    for mode in many["modes"].values():
        assert mode["ms"] > 0
        assert mode["live_then"] == 10
        assert "preempted" not in mode
        assert mode["prompt_tok_s"] > 0
    assert many["modes"]["verified"]["over_unverified"] > 0
    assert many["ceiling_ms"] > 0
    assert 24 < many["context"] < 24 + 16
    assert figures["streaming"]["longest_gap_ms"] >= figures["streaming"]["gap_ms"] > 0
    saved = json.loads((tmp_path / "h200.json").read_text())
    assert set(saved["bits"]["by_size"]) <= {str(size) for size in saved["sizes"]}
    assert (tmp_path / "h200.png").exists()


def test_saved_figures_can_be_drawn_later(script, tmp_path):
    """vLLM's figures are added only where they were measured at the same shape and lengths."""
    mode = {"ms": 6.0, "over_unverified": 0.97, "prompt_tok_s": 1e4, "tok_s": 1e3, "host_ms": 1.0,
            "device_waits": 0.03}  # fmt: skip
    row = {"lengths": "1K/256", "prompt": 1024, "output": 256, "live": 64, "ceiling_ms": 5.0}
    figures = {"shape": "8B, 32 layers", "device": "a GPU", "dtype": "bfloat16"}
    figures["cases"] = [row | {"modes": {"verified": mode}}]
    saved, picture = tmp_path / "h200.json", tmp_path / "h200.png"
    saved.write_text(json.dumps(figures))
    printed = "\n".join(script("h200.py", "--draw", str(saved)))
    assert "6.00 (0.970)" in printed
    assert "7.81" in printed
    assert "16.30" in printed
    assert "3.0%" in printed
    picture.unlink()
    saved.write_text(json.dumps(figures | {"shape": "8B, 2 layers"}))
    assert "7.81" not in "\n".join(script("h200.py", "--draw", str(saved)))
    assert picture.exists()


def test_h200_times_complete_outputs_and_leaves_out_what_does_not_fit(script):
    figures = script(
        "h200.py", "--device", "cpu", "--lengths", "8/6", "--live", "2,8", "--steps", "0", "--repeats", "1",
        "--modes", "verified", "--stream-live", "1", "--newcomers", "1", "--kv-memory", "1MiB",
        "--layers", "1",
    )  # fmt: skip
    assert figures["shape"] == "tiny, 1 layers"
    (case,) = figures["cases"]
    assert case["live"] == 2
    assert case["modes"]["verified"]["tok_s"] > 0
    ((lengths, live, reason),) = figures["left_out"]
    assert (lengths, live) == ("8/6", 8)
    assert "room for" in reason


def test_quick_h200_prints_the_table(script):
    figures = script("h200.py", "--device", "cpu", "--quick", "--lengths", "24/8", "--live", "1,2")
    assert [case["live"] for case in figures["cases"]] == [1, 2]
    assert (figures["steps"], figures["repeats"]) == (48, 1)
    assert any("milliseconds per decode step" in line for line in script.lines)


def test_a_row_that_depends_on_its_frame_is_counted():
    import bits
    import loads
    from samewise.testing import tiny_engine

    engine = tiny_engine(proposer="none", frame_rows=16, linear="torch", enable_prefix_caching=False)

    def with_error(frame):
        """A frame whose logits are off if it holds the first rows of two sequences."""

        def call(runner, batch):
            logits = frame(runner, batch)
            shared = int((batch.positions == 0).sum()) - int((batch.rows.lengths == 0).sum()) > 1
            return logits + 1e-4 * torch.eye(*logits.shape) if shared else logits

        return call

    assert bits.check(engine, 500)["differing"] == 0
    with loads.replaced(type(engine.runner), "frame", with_error):
        counts = bits.check(engine, 500)
    assert 0 < counts["differing"] < counts["rows"]


def test_packings_hold_every_row_once():
    from array import array

    import bits

    rng = random.Random(3)
    texts = [[rng.randrange(9) for _ in range(length)] for length in (40, 7, 61)]
    pages = [array("i", [1, 2, 3, 4])] * 3
    seen, prefill = [], set()
    for spans in bits.packings(rng, texts, pages, (1, 2, 8, 32, 64)):
        assert 0 < sum(len(span.inputs) for span in spans) <= 64
        assert len({span.seq_id for span in spans}) == len(spans)
        if any(len(span.inputs) > 1 for span in spans):
            prefill.add(all(span.given == len(span.inputs) for span in spans))
        for span in spans:
            assert list(span.inputs) == texts[span.seq_id][span.start : span.start + len(span.inputs)]
            seen += [(span.seq_id, span.start + i) for i in range(len(span.inputs))]
    assert sorted(seen) == [(i, j) for i, text in enumerate(texts) for j in range(len(text))]
    assert prefill == {True, False}


@pytest.mark.parametrize(
    ("live", "mode", "num"),
    [(1, "verified", 1), (8, "10%", 1), (64, "10%", 6), (256, "10%", 26), (8, "unverified", 0)],
)
def test_verified_sequences_are_spread_evenly(live, mode, num):
    import loads

    verified = loads.Case(8, 8, live, mode).verified()
    assert len(verified) == live
    assert sum(verified) == num
    halves = sum(verified[: live // 2]), sum(verified[live // 2 :])
    assert abs(halves[0] - halves[1]) <= 1


def test_step_reports_the_time_of_every_part(script, tmp_path):
    figures = script(
        "step.py", "--device", "cpu", "--profile", "--live", "4", "--steps", "8", "--profile-steps", "3",
        "--verified", "50",
    )  # fmt: skip
    parts = figures["host_ms"]
    assert {"admit", "spans", "pack", "frame", "judge", "commit", "deltas", "rest"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(figures["step_ms"])
    assert {"layers", "linears", "idle"} <= set(figures["device_ms"])  # linears: the head alone
    assert sum(figures["device_ms"].values()) == pytest.approx(figures["profiled_step_ms"])
    lanes = json.loads((tmp_path / "step.json").read_text())["shown"]["lanes"]
    assert set(lanes) == {"host", "device"}
    picture = tmp_path / "step.png"
    picture.unlink()
    script("step.py", "--draw", str(tmp_path / "step.json"))
    assert picture.exists()


def test_wrapped_methods_are_restored():
    import step
    from samewise.engine import Engine
    from samewise.testing import tiny_engine

    engine, before = tiny_engine(proposer="decode"), dict(vars(Engine))
    with step.timed_parts(engine):
        assert vars(Engine)["step"] is not before["step"]
    assert dict(vars(Engine)) == before


def test_kernels_are_grouped_by_name_and_place():
    """As on a GPU: the last linear before a copy to the host is the head, followed by the sampler."""
    import kernel_times

    names = {
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "nvjet_tst_128x64_v_bz_TNT": "linears",
        "_attend": "attention",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norms and activations",
        "sm90_xmma_gemm_bf16bf16_bf16f32": "head",
        "triton_red_fused_argmax_exp_sum_1": "sampler",
        "void at::native::vectorized_elementwise_kernel<4>": "sampler",
        "Memcpy DtoH (Device -> Pinned)": "copies",
    }
    raw = [(name, 2.0 * i, 2.0 * i + 1) for i, name in enumerate([*names, *names])]
    grouped = kernel_times._grouped(raw, cuda=True)
    assert [kernel.group for kernel in grouped] == [*names.values(), *names.values()]
    spent = kernel_times.seconds_by_group(grouped)
    assert spent["head"] == 2.0
    assert spent["sampler"] == 4.0
    assert spent["idle"] == len(raw) - 1


def test_overlapping_kernels_count_once():
    import kernel_times

    spent = kernel_times.seconds_by_group(
        [kernel_times.Kernel("a", 0, 4, "linears"), kernel_times.Kernel("b", 1, 5, "copies")]
    )
    assert spent == {"linears": 4, "copies": 1, "idle": 0}


def test_a_peer_that_is_not_installed_is_reported_absent(monkeypatch):
    import peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    work = peers.Work(None, torch.device("cpu"), torch.float32, 1, 1, 1)
    assert peers.measure("vllm", work) == {"absent": "vllm is not installed"}
    monkeypatch.undo()
    assert "did not run" in peers.measure("transformers", work)["absent"]


def test_the_device_is_idle_between_passes(monkeypatch):
    """Events as a GPU would time them: before a pass and after its sampling."""
    import loads

    class Runner:
        def frame(self):
            clock["now"] += 3

        def fast(self):
            clock["now"] += 2

    class Sampler:
        def sample(self):
            clock["now"] += 1

    class Verifier:
        def run(self):
            runner.frame()
            sampler.sample()

    class Event:
        def __init__(self):
            self.at = clock["now"]

        def elapsed_time(self, other):
            return other.at - self.at

    class Engine:
        device = torch.device("cuda")

    clock, runner, sampler, engine = {"now": 0}, Runner(), Sampler(), Engine()
    engine.runner, engine.verifier = runner, Verifier()
    engine.parts = SimpleNamespace(sampler=sampler)
    monkeypatch.setattr(loads, "_now", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with loads.device_times(engine) as device:
        assert device.idle_share() is None
        engine.verifier.run()  # 4
        clock["now"] += 2  # the host is late
        engine.verifier.run()  # 4
        runner.fast()
        sampler.sample()  # 3 in all, at once
    assert device.idle_share() == pytest.approx(2 / 13)


def test_a_model_with_an_mlp_for_each_topic_has_the_logits_of_the_model():
    """Which of its sublayers can be skipped depends on the topic."""
    import topics
    from samewise.config import EngineConfig
    from samewise.engine import Engine
    from samewise.execute.pack import pack_frame
    from samewise.testing import tiny
    from samewise.types import LayerSet, Sampling, Span

    loaded, words = tiny(), [range(80), range(80, 160), range(160, 240)]
    rng = random.Random(0)
    table = topics.topic_evidence([[list(vocabulary)] for vocabulary in words], loaded.arch.vocab)
    config = EngineConfig(model="tiny", kv_memory=2**24, device="cpu", proposer="none")
    plain, many = Engine(loaded, config), Engine(topics.copy_per_topic(loaded, table), config)
    depth = len(loaded.arch.layers)
    assert len(many.loaded.arch.layers) == 1 + 3 * depth

    def logits(engine, text, skipped):
        span = Span(0, 0, tuple(text), len(text), array("i", [1, 2, 3]), Sampling(), list(text), len(text))
        runner = engine.runner
        return runner.fast_eager(
            pack_frame([span], runner.staging(len(text))), runner.skip_path(runner.views(), skipped)
        )

    for topic, vocabulary in enumerate(words):
        text = [rng.choice(vocabulary) for _ in range(40)]
        expected, complete = logits(plain, text, LayerSet()), logits(many, text, LayerSet())
        torch.testing.assert_close(complete, expected, rtol=0.01, atol=0.1)
        own = frozenset(range(1 + topic, 3 * depth, 3))
        others = frozenset(range(1, 3 * depth)) - own
        errors = [
            float((logits(many, text, LayerSet(mlp=mlp)) - complete).abs().max()) for mlp in (others, own)
        ]
        assert errors[0] < 0.1 < 1.0 < errors[1]


def test_builds_whose_tool_is_missing_are_listed_with_the_tools_name(script, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    report = script("portable.py")
    assert report["same"]
    assert {result["verdict"] for result in report["results"].values()} == {"not run"}
    assert report["results"]["g++, aarch64, NEON"]["details"] == "no aarch64-linux-gnu-g++"


@pytest.mark.slow
def test_a_build_is_compared_with_the_stored_digests(script):
    report = script("portable.py", "--only", "g++, x86-64, portable")
    assert report["results"]["g++, x86-64, portable"]["verdict"] in {"same", "not run"}
    assert report["same"]


def test_an_interpreter_that_cannot_run_the_probe_is_listed(script, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named samewise >&2\nexit 1\n")
    python.chmod(0o755)
    report = script("portable.py", "--pythons", str(python))
    assert report["results"][str(python)] == {"verdict": "not run", "details": "no module named samewise"}


def test_the_bits_of_two_interpreters_are_compared(script, tmp_path, capsys):
    findings = [{"name": "model: a", "same": True}, {"name": "model: b", "same": False}]
    for name, same in (("one", True), ("other", False)):
        found = [finding | {"same": same or finding["same"]} for finding in findings]
        report = json.dumps({"machine": name, "findings": found})
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{report}'\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SystemExit):
        script("portable.py", "--pythons", str(tmp_path / "one"), str(tmp_path / "other"))
    one, other, last = capsys.readouterr().out.splitlines()
    assert one.split()[-2:] == ["same", "one"]
    assert "differs" in other
    assert "model: b" in other
    assert not json.loads(last)["same"]


def test_rl_compares_rollouts_with_the_trainer(monkeypatch, capsys, tmp_path):
    from samewise.testing import tiny_model

    tiny_model().save_pretrained(tmp_path)
    options = ("--model", str(tmp_path), "--tokens", "24", "--repeat", "1", "--answers", "40")
    monkeypatch.setattr(sys, "argv", ["rl.py", *options])
    runpy.run_path(str(BENCH / "rl.py"), run_name="__main__")
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["largest_difference"] == 0.0
    assert all(figures[name] > 0 for name in ("ordinary", "ours", "checkpointed", "refresh", "update"))


def test_card_goes_on_after_a_step_that_fails_or_takes_too_long(tmp_path, monkeypatch):
    import card

    def step(name, code, seconds=60):
        return card.Step(name, seconds, "^ms ", (sys.executable, "-c", code), name)

    monkeypatch.setattr(card, "MIN_SECONDS", 0)
    steps = [
        step("slow", "import time; time.sleep(60)", seconds=1),
        step("wrong", "print('about to'); raise SystemExit(3)"),
        step("right", "print('ms 4.5'); print('not shown'); print('{\"ms\": 4.5}')"),
    ]
    table = card.measure(steps, 100, tmp_path)
    assert [line.split(" after")[0] for line in table if "after" in line] == [
        "slow (slow): stopped", "wrong (wrong): exit 3", "right (right): done"
    ]  # fmt: skip
    assert "  | about to" in table
    assert table[-1] == "  ms 4.5"
    assert json.loads((tmp_path / "card.json").read_text())["right"] == {"ms": 4.5}
    assert "not shown" in (tmp_path / "card.log").read_text()
    assert card.measure(steps[2:], -1, tmp_path) == ["right: not begun, the budget is spent"]


def test_card_lists_scripts_that_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["card.py", "--list", "--model", "m", "--questions", "q"])
    import card

    card.main()
    listed = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in listed}
    assert names == {step.name for step in card.STEPS} | {"text", "serve"}
    assert len(listed) == len(names)
    named = [part for line in listed for part in line.split() if part.endswith(".py")]
    assert all((BENCH / part).exists() or (BENCH.parent / part).exists() for part in named)


@pytest.mark.parametrize("linear", ["native", "torch"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_frame_on_a_cpu_must_read_weights_and_kv_in_their_own_form(linear, dtype, size):
    from frame_cpu import work_of
    from samewise.testing import tiny_engine

    engine = tiny_engine(dtype=dtype, linear=linear, proposer="none")
    linears = [m for m in engine.runner.model.modules() if isinstance(m, torch.nn.Linear)]
    num_weights = sum(module.weight.numel() for module in linears)
    arch = engine.loaded.arch
    num_kv = sum(2 * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * 100
    num_bytes, operations = work_of(engine, rows=4, sequences=2, context=100)
    assert num_bytes == size * (num_weights + 2 * num_kv)
    per_row = num_weights + sum(2 * layer.num_heads * layer.head_dim for layer in arch.layers) * 100
    assert operations == 2.0 * 4 * per_row
