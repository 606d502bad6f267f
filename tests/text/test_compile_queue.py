"""Compiling a stranger's grammar: bounded in time and memory, in a process that can be killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from samewise.errors import BadParameter, MachineError, QueueFull
from samewise.testing import byte_tokenizer
from samewise.text import grammar as grammar_module
from samewise.text.compile_process import ChildLost, CompileProcess, OverLimit, Refused, Trial
from samewise.text.compile_queue import CompileLimits, CompileQueue
from samewise.text.grammar import Grammars
from samewise.text.grammar_source import MAX_TEXT, is_plain
from samewise.types import Grammar

EOS, VOCAB = 257, 320
TOKENIZER = byte_tokenizer()
DESCRIPTION = Grammars(TOKENIZER, VOCAB, [EOS])._describe_tokenizer()

SMALL = Grammar.regex("a+")
LONG = Grammar.json_schema({"type": "integer", "multipleOf": 999961})  # 10 seconds and 450 MB
MEDIUM = Grammar.json_schema({"type": "integer", "multipleOf": 99991})  # 0.5 seconds and 50 MB
UNBOUNDED = {"seconds": 60.0, "num_bytes": 4 << 30}


def multiples(number):
    return Grammar.json_schema({"type": "integer", "multipleOf": number})


@pytest.fixture(scope="module")
def process():
    process = CompileProcess(DESCRIPTION)
    yield process
    process.stop()


@pytest.fixture
def make_grammars():
    made = []

    def make(**limits):
        made.append(Grammars(TOKENIZER, VOCAB, [EOS], limits=CompileLimits(**limits)))
        return made[-1]

    yield make
    for grammars in made:
        grammars.close()


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    """Whether a process is there and is not one that only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False


# ---- the child


def test_trial_reports_what_compiling_took(process):
    small = process.trial(SMALL, **UNBOUNDED)
    medium = process.trial(MEDIUM, **UNBOUNDED)
    assert 0 <= small.seconds < medium.seconds
    assert small.num_bytes < 8 << 20 < medium.num_bytes  # on large machines Linux counts roughly


def test_trial_that_takes_too_long_is_ended(process):
    with pytest.raises(OverLimit, match="time"):
        process.trial(LONG, seconds=0.1, num_bytes=4 << 30)
    assert process.trial(SMALL, **UNBOUNDED)


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is bounded on Linux alone")
def test_trial_that_takes_too_much_memory_is_ended(process):
    with pytest.raises(OverLimit, match="memory"):
        process.trial(MEDIUM, seconds=60.0, num_bytes=16 << 20)
    assert process.trial(SMALL, **UNBOUNDED)


def test_trial_of_an_invalid_grammar_tells_why(process):
    with pytest.raises(Refused, match="unknown name"):
        process.trial(Grammar.lark("start: x"), **UNBOUNDED)


def test_text_that_is_not_unicode_is_refused(process):
    with pytest.raises(Refused, match="UnicodeEncodeError"):
        process.trial(Grammar.regex("\ud800"), **UNBOUNDED)


def test_killed_child_is_reported_and_the_next_trial_starts_another():
    process = CompileProcess(DESCRIPTION)
    process.trial(SMALL, **UNBOUNDED)
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(ChildLost):
        process.trial(SMALL, **UNBOUNDED)
    assert process.trial(SMALL, **UNBOUNDED)
    process.kill()
    with pytest.raises(ChildLost):
        process.trial(SMALL, **UNBOUNDED)
    with pytest.raises(ChildLost, match="closed"):
        process.trial(SMALL, **UNBOUNDED)
    process.stop()


def test_child_that_cannot_be_started_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ChildLost, match="cannot be started"):
        CompileProcess(DESCRIPTION).trial(SMALL, **UNBOUNDED)


# ---- limits


def test_grammar_over_the_limit_of_time_is_refused_with_the_limit(make_grammars):
    grammars = make_grammars(quick_seconds=0.05, slow_seconds=0.2)
    with pytest.raises(BadParameter, match=r"more than 0\.2 seconds.*multipleOf") as refused:
        grammars.check(LONG)
    assert refused.value.param == "grammar"


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is bounded on Linux alone")
def test_grammar_over_the_limit_of_memory_is_refused_with_the_limit(make_grammars):
    with pytest.raises(BadParameter, match="more than 16 MB"):
        make_grammars(num_bytes=16 << 20, slow_seconds=60.0).check(MEDIUM)


def test_long_text_is_refused_before_it_is_read():
    with pytest.raises(BadParameter, match=f"at most {MAX_TEXT}"):
        Grammars(TOKENIZER, VOCAB, [EOS]).check(Grammar.regex("a" * (MAX_TEXT + 1)))


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
@pytest.mark.parametrize("where", ["const", "multipleOf"])
def test_integers_of_more_than_64_bits_are_refused_by_name(make_grammars, number, where):
    with pytest.raises(BadParameter, match="at most 64 bits"):
        make_grammars().check(Grammar.json_schema({where: number}))


def test_numbers_that_no_schema_can_hold_are_refused(make_grammars):
    with pytest.raises(BadParameter, match="grammar=json_schema"):
        make_grammars().check(Grammar.json_schema('{"const": 1e999}'))


# ---- plain grammars


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "object", "properties": {"a": {"type": ["integer", "null"], "title": "A"}}}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, True),
        ({"type": "array", "items": {"enum": ["a", 1, None]}}, True),
        ({"const": "x"}, True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, True),
        ({"type": "integer", "multipleOf": 3}, False),
        ({"type": "integer", "minimum": 3}, False),
        ({"type": "string", "pattern": "a"}, False),
        ({"type": "string", "maxLength": 9}, False),
        ({"type": "string", "format": "email"}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, False),
        ({"anyOf": [{"properties": {"a": {}}}], "properties": {"a": {}}}, False),
        ({"allOf": [{}]}, False),
        ({"enum": [["a"]]}, False),
        ({"properties": []}, False),
        ({"properties": {"a": {"items": {"multipleOf": 7}}}}, False),
        ({"enum": ["x" * 3000]}, False),
    ],
)
def test_plain_schemas_are_those_without_bounds_patterns_and_merging(schema, plain):
    assert is_plain(Grammar.json_schema(schema)) is plain


def test_deep_schemas_are_not_plain():
    schema = {}
    for _ in range(30):
        schema = {"items": schema}
    assert not is_plain(Grammar.json_schema(schema))
    assert is_plain(Grammar.json_object())
    assert not is_plain(Grammar.regex("a"))
    assert not is_plain(Grammar.lark("start: /a/"))


def test_plain_grammars_need_no_child(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    grammars.check(Grammar.json_object())
    grammars.check(Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}}))


def test_preparing_converts_the_tokenizer_and_starts_no_child(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    grammars.prepare()
    monkeypatch.setattr(grammars, "_tokenizer", None)
    grammars.check(Grammar.json_object())
    with pytest.raises(BadParameter, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).prepare()


# ---- the queue


def test_quick_grammars_do_not_wait_for_slow_ones(make_grammars):
    grammars = make_grammars(quick_seconds=0.5, slow_seconds=60.0)
    slow = grammars.start(LONG)
    for number in range(3):
        grammars.compile(Grammar.regex(f"a{{1,{number + 1}}}"))
    assert not slow.done()
    grammars.close()
    with pytest.raises(MachineError, match="closed"):
        slow.result(timeout=30)


def test_callers_of_one_grammar_share_its_compilation(make_grammars):
    grammars = make_grammars(slow_seconds=0.2)
    first = grammars.start(LONG)
    assert grammars.start(LONG) is first
    assert not first.cancel()  # another caller waits for it
    with pytest.raises(BadParameter):
        first.result(timeout=30)
    assert LONG not in grammars._compiling


def test_full_queue_refuses_further_grammars(make_grammars):
    grammars = make_grammars(quick_seconds=60.0, quick_waiting=2)
    running = grammars.start(multiples(999961))
    queue = grammars._queue
    wait_until(lambda: not queue._lanes[0]._waiting)
    waiting = [grammars.start(multiples(number)) for number in (999959, 999953)]
    with pytest.raises(QueueFull, match="too many grammars wait") as refused:
        grammars.start(multiples(999931))
    assert refused.value.param == "grammar"
    grammars.close()
    for future in (running, *waiting):
        with pytest.raises(MachineError, match="closed"):
            future.result(timeout=30)


def test_one_owner_may_take_a_share_of_the_queue(make_grammars):
    grammars = make_grammars(quick_seconds=60.0, quick_waiting=8)
    grammars.start(multiples(999961))
    wait_until(lambda: not grammars._queue._lanes[0]._waiting)
    numbers = iter(range(900001, 999999, 2))
    for _ in range(2):
        grammars.start(multiples(next(numbers)), owner=b"a")
    with pytest.raises(QueueFull, match="2 of your grammars"):
        grammars.start(multiples(next(numbers)), owner=b"a")
    grammars.start(multiples(next(numbers)), owner=b"b")
    for _ in range(5):
        grammars.start(multiples(next(numbers)))
    with pytest.raises(QueueFull, match="too many"):
        grammars.start(multiples(next(numbers)), owner=b"c")


def test_full_slow_lane_refuses_further_slow_grammars(make_grammars):
    grammars = make_grammars(quick_seconds=0.5, slow_seconds=60.0, slow_waiting=1)
    slow = [grammars.start(multiples(number)) for number in (999961, 999959, 999953)]
    with pytest.raises(QueueFull):
        slow[2].result(timeout=60)
    grammars.check(SMALL)
    assert not slow[0].done()
    assert not slow[1].done()


def test_no_trial_begins_while_the_idle_child_is_ended(make_grammars, monkeypatch):
    stopping, overlaps = [], []  # of each process: other lanes end theirs at other times
    stop, trial = CompileProcess.stop, CompileProcess.trial

    def slow_stop(process):
        stopping.append(process)
        time.sleep(0.2)
        stop(process)
        stopping.remove(process)

    def noted_trial(process, *args, **limits):
        overlaps.append(process in stopping)
        return trial(process, *args, **limits)

    monkeypatch.setattr(CompileProcess, "stop", slow_stop)
    monkeypatch.setattr(CompileProcess, "trial", noted_trial)
    grammars = make_grammars(idle_seconds=0.05)
    grammars.check(SMALL)
    wait_until(lambda: grammars._queue._lanes[0]._process in stopping)
    grammars.check(Grammar.regex("b+"))
    assert len(overlaps) >= 2
    assert not any(overlaps)


def test_closing_kills_the_children_at_once(make_grammars):
    grammars = make_grammars(quick_seconds=60.0)
    future = grammars.start(LONG)
    process = grammars._queue._lanes[0]._process
    wait_until(lambda: process._ready)
    pid = process._child.pid
    grammars.close()
    with pytest.raises(MachineError, match="closed"):
        future.result(timeout=30)
    wait_until(lambda: not is_running(pid))
    with pytest.raises(MachineError, match="closed"):
        grammars.check(SMALL)
    grammars.check(Grammar.json_object())


def test_child_that_was_killed_is_replaced_unnoticed(make_grammars):
    grammars = make_grammars()
    grammars.check(SMALL)
    os.kill(grammars._queue._lanes[0]._process._child.pid, signal.SIGKILL)
    grammars.check(Grammar.regex("b+"))


def test_idle_lane_ends_its_thread_and_child_and_starts_again(make_grammars):
    grammars = make_grammars(idle_seconds=0.0)
    grammars.check(SMALL)
    lane = grammars._queue._lanes[0]
    wait_until(lambda: not lane._running and lane._process._child is None)
    grammars.check(Grammar.regex("b+"))


def test_forgotten_grammars_end_their_children(make_grammars):
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    grammars.check(SMALL)
    pid = grammars._queue._lanes[0]._process._child.pid
    del grammars
    wait_until(lambda: not is_running(pid))


def test_failure_inside_the_process_reaches_the_caller():
    queue = CompileQueue(DESCRIPTION)

    def fail(grammar, trial):
        raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            queue.submit(SMALL, fail).result(timeout=30)
        assert isinstance(queue.submit(SMALL, lambda grammar, trial: trial), Future)
    finally:
        queue.close()


# ---- memory


def test_kept_grammars_are_bounded_in_bytes(make_grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", 9 << 20)
    grammars = make_grammars()
    schemas = [Grammar.json_schema({"const": number}) for number in range(6)]
    for schema in schemas:
        grammars.check(schema)
    assert list(grammars._kept) == [(None, schema) for schema in schemas[2:]]  # of 2 MB each
    grammars.check(schemas[2])
    assert list(grammars._kept) == [(None, schema) for schema in (*schemas[3:], schemas[2])]
    assert set(grammars._live) == set(grammars._kept)


def test_grammar_that_a_request_holds_is_found_though_it_is_not_kept(make_grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", 1)
    grammars = make_grammars()
    held = grammars.compile(Grammar.json_object())
    grammars.check(Grammar.json_schema({"const": 1}))
    assert list(grammars._kept) == [(None, Grammar.json_schema({"const": 1}))]
    assert grammars.compile(Grammar.json_object()) is held


def test_tokens_of_answers_count_towards_a_grammars_weight(make_grammars):
    compiled = make_grammars().compile(Grammar.json_object())
    before = compiled.num_bytes
    guide = compiled.guide(frozenset({EOS}))
    for token in TOKENIZER.encode('{"a"', add_special_tokens=False):
        guide.take(token)
    assert compiled.num_bytes == before + 4 * grammar_module.GROWTH_BYTES
    compiled.num_tokens = 10**9
    assert compiled.num_bytes == before + grammar_module.MAX_GROWTH


def test_heavy_grammars_of_requests_under_way_are_bounded_in_bytes(make_grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "LIGHT", Trial(seconds=60.0, num_bytes=1 << 20))
    monkeypatch.setattr(grammar_module, "HEAVY_BYTES", 12 << 20)
    grammars = make_grammars(quick_seconds=60.0)
    schemas = [Grammar.json_schema({"title": name, "type": "integer", "multipleOf": 9973}) for name in "abc"]
    held = [grammars.compile(schema) for schema in schemas[:2]]  # about 5 MB each
    with pytest.raises(QueueFull, match="requests under way hold 12 MB"):
        grammars.check(schemas[2])
    grammars.check(SMALL)
    held.pop(0)
    assert grammars.compile(schemas[2]).is_heavy
    assert (None, schemas[0]) not in grammars._live  # dropped, because no request held it


def test_no_more_heavy_grammars_are_dropped_than_have_to_be(make_grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "LIGHT", Trial(seconds=60.0, num_bytes=1 << 20))
    monkeypatch.setattr(grammar_module, "HEAVY_BYTES", 120 << 20)
    grammars = make_grammars(quick_seconds=60.0)
    schemas = [Grammar.json_schema({"title": name, "type": "integer", "multipleOf": 99991}) for name in "abc"]
    for schema in schemas:  # about 50 MB each
        grammars.check(schema)
    assert [(None, schema) in grammars._live for schema in schemas] == [False, True, True]


def test_heavy_grammars_of_one_owner_leave_room_for_another(make_grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "LIGHT", Trial(seconds=60.0, num_bytes=1 << 20))
    monkeypatch.setattr(grammar_module, "HEAVY_BYTES", 24 << 20)
    grammars = make_grammars(quick_seconds=60.0)
    large = {"type": "integer", "multipleOf": 9973}
    schemas = [Grammar.json_schema(large | {"title": name}) for name in "abcde"]
    held = [grammars.compile(schema, owner=b"greedy") for schema in schemas[:2]]  # about 5 MB each
    with pytest.raises(QueueFull, match="or yours their share"):
        held += [grammars.compile(schema, owner=b"greedy") for schema in schemas[2:]]
    held.append(grammars.compile(schemas[-1], owner=b"modest"))
    assert {one.owner for one in held} == {b"greedy", b"modest"}


def test_owners_do_not_share_a_compiled_grammar(make_grammars):
    grammars = make_grammars()
    one, other = grammars.compile(SMALL, owner=b"one"), grammars.compile(SMALL, owner=b"other")
    assert one is not other
    assert grammars.compile(SMALL, owner=b"one") is one
    assert grammars.compile(SMALL) not in (one, other)


# ---- as a library

SCRIPT = """
import os, signal, sys, time
from tokenizers import Tokenizer
from samewise.text.compile_queue import CompileLimits
from samewise.text.grammar import Grammars
from samewise.types import Grammar

class Fast:
    is_fast, backend_tokenizer = True, Tokenizer.from_str(sys.argv[1])
    __len__ = lambda self: 320

print("begun", flush=True)  # a child that imported this file would print it once more
grammars = Grammars(Fast(), 320, [257], limits=CompileLimits(quick_seconds=600.0))
grammars.check(Grammar.regex("a+"))
child = grammars._queue._lanes[0]._process._child.pid
print(child, flush=True)
"""


def run_script(text, **options):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(text), DESCRIPTION["tokenizer"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_script_without_a_main_guard_may_use_grammars_and_end():
    program = run_script("grammars.check(Grammar.regex('b+'))")
    output, errors = program.communicate(timeout=60)
    begun, child = output.split()
    assert (program.returncode, begun, errors) == (0, "begun", "")
    wait_until(lambda: not is_running(int(child)))


LONG_CHECK = """
long = Grammar.json_schema({"type": "integer", "multipleOf": 9999991})
"""


def test_interrupt_ends_the_wait_for_a_grammar_and_the_process():
    program = run_script(LONG_CHECK + "grammars.check(long)", start_new_session=True)
    assert program.stdout.readline() == "begun\n"
    child = int(program.stdout.readline())
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, errors = program.communicate(timeout=30)
    assert program.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not is_running(child))


def test_process_that_is_killed_leaves_no_child_behind():
    program = run_script("signal.pause()")
    assert program.stdout.readline() == "begun\n"
    child = int(program.stdout.readline())
    program.kill()
    program.communicate(timeout=30)
    wait_until(lambda: not is_running(child))


def test_process_ends_while_a_thread_waits_for_a_grammar():
    program = run_script(LONG_CHECK + "grammars.start(long); time.sleep(0.3)")
    output, errors = program.communicate(timeout=30)
    assert (program.returncode, errors) == (0, "")
    wait_until(lambda: not is_running(int(output.split()[1])))


def test_fork_of_a_process_that_used_grammars_may_use_them_too():
    program = run_script(
        """
        import warnings
        warnings.simplefilter("ignore")
        pid = os.fork()
        if pid == 0:
            grammars.check(Grammar.regex("c+"))
            grammars.close()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        grammars.check(Grammar.regex("d+"))
        """
    )
    output, errors = program.communicate(timeout=60)
    assert (program.returncode, output.split()[2], errors) == (0, "7", "")
