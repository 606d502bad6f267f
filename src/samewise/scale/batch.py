"""Batch files over the workers of Ray Data: the same format and the same bits as on one machine.

A worker is an actor with an engine, which answers a few lines at a time. A worker that dies is replaced, and
its lines are answered again, to the same bits; one whose engine is lost ends its process. The output is
written by this process alone, one line at a time, so none is there twice.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.errors import BadParameter, GuaranteeLost
from samewise.jobs.batch_file import BatchLine, OutputLine, parse_line
from samewise.scale.cluster import cause_of, ray_cluster
from samewise.scale.ray_extra import import_ray_data
from samewise.scale.replica import end_process

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.jobs.batch import BatchSummary

log = logging.getLogger("samewise.scale")

LINE = "line"
"""The column of a request, as a line of a batch file."""
OUTPUT = "output"
"""The column of the line that answers it."""
CONTRACT = "contract"
"""The column of the facts of the answer's contract, as JSON."""

OBJECT_STORE = 512 * 2**20
"""Bytes of a local cluster's object store. Set by hand: requests and answers of a few hundred lines."""

LINES_PER_BATCH = 64
"""Lines that a worker answers at a time. Set by hand: enough to fill frames, and few enough that little is
answered again when a worker dies."""

RETRIES = 8
"""How often lines are answered again of which a worker died. Set by hand: as often as a request of a server
loses its replica, after which it may be what ends them."""


class LineAnswerer:
    """For `ray.data.Dataset.map_batches`: adds the columns `output` and `contract` to rows with a `line`.

    One engine in each actor. Keywords are those of EngineConfig. A line is the JSON text of a line of a batch
    file (`custom_id`, `url`, `body`), an output that of an output file. `make_engine` is called in place of
    building from the keywords.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        names: tuple[str, ...] = (),
        key: str | None = None,
        make_engine: Callable[[], Engine] | None = None,
        **settings: Any,
    ) -> None:
        from samewise import machine

        machine.pin_environment()
        from samewise.jobs.batch import BatchRunner
        from samewise.receipts.signing import SigningKey
        from samewise.scale.deploy import BuildEngine

        make = make_engine or BuildEngine(EngineConfig.of(model=model, **settings))
        engine = self._engine = make()
        signer = None if key is None else SigningKey.load(Path(key))
        self._runner = BatchRunner(engine, names=names, key=signer)
        self._contract = json.dumps(engine.contract.facts)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the lines of a batch; the rows keep their order. Ends the process if the engine is lost."""
        lines = [parse_line(number, str(text).encode()) for number, text in enumerate(batch[LINE])]
        outputs: dict[int, OutputLine] = {}
        try:
            for line, result in self._runner.run(iter(lines)):
                outputs[line.number] = result
        except Exception as error:
            if self._engine.lost is None and not isinstance(error, GuaranteeLost):
                raise
            log.exception("the engine is lost")
            end_process("worker")  # Ray replaces a worker that dies, and none that raises
        texts = [json.dumps(outputs[number], ensure_ascii=True) for number in range(len(lines))]
        return batch | {OUTPUT: texts, CONTRACT: [self._contract] * len(lines)}


def run_on_ray(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    settings: dict[str, Any],
    *,
    workers: int = 1,
    address: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float = 0,
    names: tuple[str, ...] = (),
    key: str | os.PathLike[str] | None = None,
    make_engine: Callable[[], Engine] | None = None,
    **options: Any,
) -> BatchSummary:
    """Answer a batch file with workers in a cluster; options are those of `jobs.batch.answer_file`.

    `settings` are those of EngineConfig. The cluster is used, or started, only if a line is left.
    """
    if workers < 1:
        raise BadParameter(f"workers={workers}: give 1 or more", param="workers")
    if num_cpus is not None and num_cpus <= 0:
        raise BadParameter(f"worker_cpus={num_cpus}: give more than 0 cores", param="worker_cpus")
    if num_gpus not in (0, 1):
        raise BadParameter(
            f"worker_gpus={num_gpus}: an engine has one device; give 0 or 1, and more workers",
            param="worker_gpus",
        )
    ray = import_ray_data("samewise batch --ray")
    from samewise.jobs.batch import answer_file, invalid_line

    EngineConfig.of(**settings)  # refused here, and not by every worker
    arguments = settings | {
        "names": names,
        "key": None if key is None else str(key),
        "make_engine": make_engine,
    }
    cpus = num_cpus or 1.0

    def answer(
        lines: Iterator[BatchLine], check_contract: Callable[[str], None]
    ) -> Iterator[tuple[BatchLine, OutputLine]]:
        left: list[BatchLine] = []
        for line in lines:
            if line.error is None:
                left.append(line)
            else:
                yield line, invalid_line(line, line.error)
        if left:
            threads = {"OMP_NUM_THREADS": str(max(1, int(cpus)))}
            with ray_cluster(
                address, workers * cpus + 1, "samewise batch --ray", object_store=OBJECT_STORE, env=threads
            ):
                yield from _answer_on(ray, left, arguments, workers, cpus, num_gpus, check_contract)

    return answer_file(source, target, answer, **options)


def _answer_on(
    ray: Any,
    lines: list[BatchLine],
    arguments: dict[str, Any],
    workers: int,
    cpus: float,
    num_gpus: float,
    check_contract: Callable[[str], None],
) -> Iterator[tuple[BatchLine, OutputLine]]:
    """The answers to lines without an error, in the order in which they arrive."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    blocks = -(-len(lines) // LINES_PER_BATCH)
    rows = [{"place": place, LINE: line.as_text()} for place, line in enumerate(lines)]
    answered = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        LineAnswerer, fn_constructor_kwargs=arguments, batch_size=LINES_PER_BATCH,
        compute=ray.data.ActorPoolStrategy(size=min(workers, blocks)), num_cpus=cpus, num_gpus=num_gpus,
        max_task_retries=RETRIES,
    )  # fmt: skip
    contracts = _OneContract(check_contract)
    try:
        for row in answered.iter_rows():
            contracts.check(row[CONTRACT])
            yield lines[row["place"]], json.loads(row[OUTPUT])
    except ray.exceptions.RayError as error:
        raise cause_of(str(error), what="the workers cannot go on") from error


class _OneContract:
    """Refuses an answer of a worker whose contract is not that of the first answer."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check
        self._first: Contract | None = None
        self._text = ""

    def check(self, text: str) -> None:
        """`text`: the facts of a worker's contract, as JSON."""
        if text == self._text:
            return
        from samewise.scale.records import refuse_other

        contract = Contract(tuple((name, value) for name, value in json.loads(text)))
        if self._first is None:
            self._check(contract.id)
            self._first, self._text = contract, text
            return
        refuse_other(self._first, contract, "of a worker")


__all__ = [
    "CONTRACT",
    "LINE",
    "LINES_PER_BATCH",
    "OBJECT_STORE",
    "OUTPUT",
    "RETRIES",
    "LineAnswerer",
    "run_on_ray",
]
