"""Law 11: one contract id, one set of bits, whatever is changed around an engine.

Whatever can change a bit changes the id, or is pinned, or is refused; what cannot change one leaves the id.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract_runs import SETUPS, VOCAB, Run, answer, run_in_child, start
from disturbances import ACTIONS, FILES, SETTINGS, TWO, VARIABLES, Action, Expect, File, Setting, Variables

from samewise.engine import Engine
from samewise.errors import GuaranteeLost
from samewise.execute.load import load
from samewise.kernels.native.build import compiler_available
from samewise.testing import byte_tokenizer, tiny_model

MACHINE = [setup for setup in SETUPS if setup != "native"]
"""Setups whose contracts name the machine."""
SLOW = pytest.mark.slow
KNOWN: dict[str, Run] = {}
"""Every run so far, by its contract's id."""


def check_law(run: Run) -> Run:
    """Equal ids, equal bits: over all runs of this module."""
    known = KNOWN.setdefault(run.id, run)
    assert run.bits == known.bits, f"one id, two sets of bits: {run.id}, {dict(run.facts)}"
    return run


def check(run: Run, usual: Run, expected: Expect) -> None:
    """The law, and what is expected of the id."""
    check_law(run)
    differing = {name for name, value in {*run.facts} ^ {*usual.facts}}
    if expected is Expect.SAME_ID:
        assert differing == set()
    elif expected is Expect.OTHER_ID:
        assert run.id != usual.id


def names_no_machine(run: Run) -> bool:
    return dict(run.facts).get("machine") == "any"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary that torch splits over threads, as safetensors."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=VOCAB, num_hidden_layers=2).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["native", *(pytest.param(each, marks=SLOW) for each in MACHINE)])
def setup(request: pytest.FixtureRequest) -> str:
    """Each setup; in `make test` the one whose contract names no machine."""
    return request.param


@pytest.fixture(scope="module")
def engine(folder: Path, setup: str) -> Engine:
    """One engine of the setup, started in an undisturbed process."""
    return start(folder, setup)


@pytest.fixture(scope="module")
def usual(engine: Engine) -> Run:
    """What it answers in an undisturbed process."""
    return check_law(answer(engine))


def test_the_setups_cover_contracts_with_and_without_a_machine(usual: Run, setup: str) -> None:
    assert names_no_machine(usual) == (setup == "native" and compiler_available())


# -- after start, and while an engine starts -----------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_what_is_done_to_the_process_changes_no_bit_of_a_running_engine(
    action: Action, engine: Engine, usual: Run
) -> None:
    with action.make():
        assert answer(engine).bits == usual.bits


def test_everything_done_to_the_process_at_once_changes_no_bit(
    engine: Engine, folder: Path, setup: str, usual: Run
) -> None:
    with ExitStack() as stack:
        for action in ACTIONS:
            stack.enter_context(action.make())
        assert answer(engine).bits == usual.bits
        run = answer(start(folder, setup))
    check(run, usual, Expect.SAME_ID if names_no_machine(usual) else Expect.LAW)
    assert answer(engine).bits == usual.bits


@SLOW
@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_an_engine_that_starts_meanwhile_keeps_the_law(
    action: Action, folder: Path, setup: str, usual: Run
) -> None:
    with action.make():
        run = answer(start(folder, setup))
    check(run, usual, Expect.SAME_ID if names_no_machine(usual) else action.start)


def test_another_thread_gets_the_same_bits(engine: Engine, usual: Run) -> None:
    runs = []
    thread = threading.Thread(target=lambda: runs.append(answer(engine)))
    thread.start()
    thread.join()
    assert [run.bits for run in runs] == [usual.bits]


def test_a_hook_on_the_loaded_model_reaches_no_running_engine(own_folder: Path, setup: str) -> None:
    engine = start(own_folder, setup)
    before = check_law(answer(engine))
    for module in engine.loaded.model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda _, __, output: output * 1.5)
    assert answer(engine).bits == before.bits


# -- files beside the weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=str)
def test_another_file_beside_the_weights_keeps_the_law(
    file: File, folder: Path, setup: str, usual: Run, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "model", copy_function=os.link))
    (own / file.path).parent.mkdir(exist_ok=True)
    (own / file.path).unlink(missing_ok=True)  # a link to the original
    (own / file.path).write_text(file.content)
    check(answer(start(own, setup)), usual, file.expected)


def test_other_ends_of_answers_are_another_contract(engine: Engine, usual: Run) -> None:
    """Of a model that was given in memory, where no file says so."""
    loaded = load(engine.config)
    ended = replace(loaded, eos_ids=frozenset(range(1000, 60_000)))
    run = check_law(answer(Engine(ended, engine.config)))
    assert run.id != usual.id
    assert run.bits != usual.bits


# -- another configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_another_configuration_keeps_the_law(setting: Setting, folder: Path, setup: str, usual: Run) -> None:
    run = answer(start(folder, setup, **setting.settings))
    check(run, usual, setting.native if names_no_machine(usual) else setting.machine)


@SLOW
@pytest.mark.skipif(not compiler_available(), reason="without a C++ compiler two setups are the same")
def test_the_setups_have_three_contracts(folder: Path) -> None:
    assert len({start(folder, setup).contract.id for setup in SETUPS}) == len(SETUPS)


# -- weights -------------------------------------------------------------------------------------------


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of its own, and a cache of digests in which every file counts as settled."""
    from samewise.model import digest

    monkeypatch.setattr(digest, "SETTLED_NS", -(10**9))
    tiny_model(vocab_size=VOCAB, num_hidden_layers=2).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def overwrite(file: Path) -> None:
    """Other weights in place, with the file's size, inode and mtime."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(before.st_size - 4096)  # the last tensors: norms and a part of a layer
        opened.write(bytes(4096))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (
        before.st_size,
        before.st_ino,
        before.st_mtime_ns,
    )


def test_weights_overwritten_in_place_are_another_contract(own_folder: Path, setup: str) -> None:
    engine = start(own_folder, setup)
    first = check_law(answer(engine))
    overwrite(own_folder / "model.safetensors")
    assert check_law(answer(engine)) == first  # it has its weights in memory
    second = check_law(answer(start(own_folder, setup)))
    assert second.id != first.id
    assert second.bits != first.bits


def test_weights_replaced_in_memory_are_another_contract(own_folder: Path, setup: str) -> None:
    engine = start(own_folder, setup)
    first = check_law(answer(engine))
    head = engine.runner.model.lm_head.weight.detach().clone()
    changed = head.clone()
    changed[1000:2000] *= 2.0
    engine.update_weights({"lm_head.weight": changed})
    second = check_law(answer(engine))
    assert second.id != first.id
    engine.update_weights({"lm_head.weight": head})
    third = check_law(answer(engine))
    assert third.id not in (first.id, second.id)  # its weights no longer come from the file
    assert third.bits == first.bits


def test_a_second_engine_over_updated_weights_has_the_contract_of_the_update(
    own_folder: Path, setup: str
) -> None:
    first = start(own_folder, setup)
    before = check_law(answer(first))
    changed = first.runner.model.lm_head.weight.detach().clone()
    changed[1000:2000] *= 2.0
    first.update_weights({"lm_head.weight": changed})
    second = check_law(answer(Engine(first.loaded, first.config)))
    assert second.id != before.id
    assert second == check_law(answer(first))


def test_weights_written_in_place_are_refused(own_folder: Path, setup: str) -> None:
    engine = start(own_folder, setup)
    before = check_law(answer(engine))
    with torch.no_grad():
        engine.loaded.model.model.embed_tokens.weight.mul_(1.5)
    with pytest.raises(GuaranteeLost, match="written in place"):
        answer(engine)
    run = check_law(answer(Engine(engine.loaded, engine.config)))
    assert run.id != before.id


def test_a_changed_buffer_is_another_contract(own_folder: Path, setup: str) -> None:
    engine = start(own_folder, setup)
    first = check_law(answer(engine))
    name, buffer = next((n, b) for n, b in engine.runner.model.named_buffers() if n.endswith("inv_freq"))
    engine.update_weights({name: buffer * torch.linspace(1.0, 1.5, len(buffer))})
    assert check_law(answer(engine)).id != first.id


# -- before start --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual_in_child(folder: Path) -> dict[str, Run]:
    """What each setup answers in a new process with two threads."""
    runs = run_in_child(folder, list(SETUPS), TWO)
    return {setup: check_law(run) for setup, run in runs.items()}


@pytest.mark.parametrize(
    "disturbance",
    [pytest.param(each, marks=[] if each.core else [SLOW]) for each in VARIABLES],
    ids=str,
)
def test_a_process_started_with_other_variables_keeps_the_law(
    disturbance: Variables, folder: Path, usual_in_child: dict[str, Run]
) -> None:
    for setup, run in run_in_child(folder, list(SETUPS), disturbance.variables).items():
        usual = usual_in_child[setup]
        check(run, usual, disturbance.native if names_no_machine(usual) else disturbance.machine)


@SLOW
def test_threads_of_a_pool_with_another_rounding_mode_change_no_bit(
    folder: Path, usual_in_child: dict[str, Run]
) -> None:
    for setup, run in run_in_child(folder, list(SETUPS), TWO, pool=True).items():
        check(run, usual_in_child[setup], Expect.SAME_ID)
