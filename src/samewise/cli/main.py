"""The command line: demo, generate, chat, serve, probe, batch, audit, keygen, bench."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import samewise
from samewise import machine
from samewise.cli.jobs import audit, batch, keygen
from samewise.cli.serve import serve
from samewise.errors import CallerError, SamewiseError

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.llm.llm import LLM
    from samewise.params import SamplingParams

app = typer.Typer(
    help="Language models that answer the same way every time: same request, same bits, under any load.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Model = Annotated[str, typer.Option("--model", "-m", help="smollm2, a folder, a hub id or a GGUF file.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Revision = Annotated[Optional[str], typer.Option(help="Branch, tag or commit of a hub id.")]
Rows = Annotated[Optional[int], typer.Option("--frame-rows", help="Rows of a frame.")]
Compile = Annotated[Optional[bool], typer.Option("--compile/--no-compile", help="Compile layers.")]
MaxLen = Annotated[Optional[int], typer.Option("--max-model-len", help="Longest context.")]
KvMemory = Annotated[Optional[str], typer.Option("--kv-memory", help="e.g. 2GiB or 50%.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="At most this many tokens.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus.")]
TopK = Annotated[int, typer.Option("--top-k", help="0: all.")]
Seed = Annotated[Optional[int], typer.Option(help="Same seed, same text.")]
Proposer = Annotated[
    Optional[str],
    typer.Option("--proposer", help="auto, none, ngram, decode, model, skip, or e.g. ngram+skip."),
]
DraftModel = Annotated[Optional[str], typer.Option("--draft-model", help="What `model` guesses with.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say on stderr why `auto` guesses or does not.")]
System = Annotated[Optional[str], typer.Option("--system", help="A system message.")]


def main() -> None:
    """Run the command line; a caller's mistake is one line on stderr, not a traceback."""
    machine.pin_environment()
    try:
        app()
    except SamewiseError as error:
        Console(stderr=True).print(
            f"[bold red]samewise:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"samewise {samewise.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def demo(
    model: Model = "smollm2",
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_tokens: MaxTokens = 32,
) -> None:
    """Watch the model answer, then see whose bits depend on the load."""
    from samewise.cli.demo import demo as show

    if not show(Console(), partial(_llm, model, device=device, dtype=dtype), max_tokens=max_tokens):
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[Optional[str], typer.Argument(help="The prompt; '-' or nothing: stdin.")] = None,
    file: Annotated[Optional[Path], typer.Option("--file", "-f", help="Read prompts, one a line.")] = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[Optional[list[str]], typer.Option(help="Stop at this text; repeatable.")] = None,
    logprobs: Annotated[Optional[int], typer.Option(help="Alternatives per token (with --json).")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text.")] = False,
    system: System = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Keep the promise.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    frame_rows: Rows = None,
    compile_layers: Compile = None,
    max_model_len: MaxLen = None,
    kv_memory: KvMemory = None,
    trust_remote_code: Trust = False,
    proposer: Proposer = None,
    draft_model: DraftModel = None,
    explain: Explain = False,
) -> None:
    """Answer a prompt, or one for each line of a file.

    [dim]samewise generate "Why is the sky blue?"[/]
    [dim]samewise generate --file questions.txt --json > answers.jsonl[/]
    """
    prompts = _prompts(prompt, file)
    params = _params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        stop=stop or [], logprobs=logprobs, verify=verify,
    )  # fmt: skip
    llm = _llm(
        model, device=device, dtype=dtype, revision=revision, frame_rows=frame_rows, compile=compile_layers,
        max_model_len=max_model_len, kv_memory=kv_memory, trust_remote_code=trust_remote_code,
        proposer=proposer, draft_model=draft_model, explain=explain,
    )  # fmt: skip
    Console(stderr=True).print(f"[dim]contract {llm.contract}[/]", highlight=False)
    asked = [_as_prompt(llm, text, raw=raw, system=system) for text in prompts]
    if as_json:
        for text, output in zip(prompts, llm.generate(asked, params, use_tqdm=len(asked) > 1), strict=True):
            typer.echo(json.dumps(_record(text, output), ensure_ascii=False))
    elif len(asked) == 1:
        for chunk in llm.stream(asked[0], params):
            typer.echo(chunk.text, nl=False)
        typer.echo()
    else:
        console = Console()
        for text, output in zip(prompts, llm.generate(asked, params), strict=True):
            console.print(Text(text, style="bold cyan"))
            console.print(output.outputs[0].text, highlight=False, markup=False)


@app.command()
def chat(
    model: Model = "smollm2",
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxLen = None,
    proposer: Proposer = None,
    draft_model: DraftModel = None,
) -> None:
    """Talk with the model. Each turn reads only what is new: the rest is in the prefix cache.

    [dim]/new[/] starts over, [dim]/quit[/] or Ctrl-D leaves.
    """
    console = Console()
    params = _params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with console.status("loading …"):
        llm = _llm(
            model, device=device, dtype=dtype, max_model_len=max_model_len, proposer=proposer,
            draft_model=draft_model,
        )  # fmt: skip
    console.print(f"[dim]{escape(model)}, contract {llm.contract}; /new starts over, /quit leaves[/]")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _ask_user(console)) is not None:
        if line == "/quit":
            break
        if line == "/new":
            messages = list(start)
        elif line:
            asked = {"role": "user", "content": line}
            try:
                said = _turn(console, llm, [*messages, asked], params)
            except CallerError as error:  # too long by now, say: the conversation so far is kept
                console.print(f"[bold red]samewise:[/] {escape(str(error))} [dim](/new starts over)[/]")
            else:
                messages += [asked, {"role": "assistant", "content": said}]


app.command()(serve)


@app.command()
def probe(
    model: Model = "smollm2",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    frame_rows: Rows = None,
    compile_layers: Compile = None,
    max_model_len: MaxLen = None,
    trust_remote_code: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON.")] = False,
) -> None:
    """Prove the frame property on this machine and print the contract, fact by fact."""
    llm = _llm(
        model, device=device, dtype=dtype, revision=revision, frame_rows=frame_rows, compile=compile_layers,
        max_model_len=max_model_len, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    report, contract = llm.engine.report, llm.contract
    if as_json:
        sizes = {str(size): how for size, how in llm.engine.sizes.items()}
        operators = [asdict(operator) for operator in llm.engine.operators]
        found = {
            "contract": contract.id,
            "facts": dict(contract.facts),
            "sizes": sizes,
            "operators": operators,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(title=f"contract {contract.id}", show_header=False, title_style="bold")
    for name, value in contract.facts:
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if llm.engine.runner.elastic:
        console.print(_sizes_table(llm.engine))
    console.print(
        f"[green]holds[/]: {report.frames} frames and {report.operators} shapes of linear gave the bits of "
        f"{llm.engine.frame_rows} rows at every place and in any company ({report.seconds:.1f} s)"
    )


def _sizes_table(engine: Engine) -> Table:
    """At how many rows every operator runs in a frame of each size."""
    if engine.runner.native:
        table = Table(title="sizes of a frame", show_header=False, title_style="bold")
        table.add_row("from", str(engine.runner.sizes[0]))
        table.add_row("to", str(engine.runner.widest))
        table.add_row("linears", "natural at every size")
        return table
    table = Table(title="what runs at how many rows, in a frame of", title_style="bold")
    for name in ("operator", "shape", *(str(size) for size in engine.sizes)):
        table.add_column(name, justify="left" if name in ("operator", "shape") else "right")
    for operator in engine.operators:
        told = [_told(size, piece) for size, piece in operator.pieces.items()]
        table.add_row(operator.name.split(".")[-1], f"{operator.outputs}×{operator.inputs}", *told)
    frames = [how if how == "as it is" else how.split(":")[0] for how in engine.sizes.values()]
    table.add_row("norms and all else", "", *("=" if how == "as it is" else how for how in frames))
    return table


def _told(size: int, piece: int) -> str:
    if piece == size:
        return "="
    return f"{piece}" if piece > size else f"{size // piece}×{piece}"


for command in (batch, audit, keygen):
    app.command()(command)


@app.command()
def bench(
    model: Model = "smollm2",
    proposers: Annotated[
        str,
        typer.Option(help="Comma-separated: auto, none, ngram, decode, model, skip, ngram+skip, unverified."),
    ] = "none,ngram,auto",
    batches: Annotated[str, typer.Option("--batch", help="Requests at once, comma-separated.")] = "1,8",
    repeats: Annotated[int, typer.Option(help="Interleaved runs of everything.", min=1)] = 3,
    max_tokens: MaxTokens = 96,
    workload: Annotated[
        Optional[Path], typer.Option(help="A file in Spec-Bench's format; default: the project's own set.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Only these tasks, comma-separated.")] = "",
    limit: Annotated[int, typer.Option(help="Questions per task; 0: all.", min=0)] = 2,
    synthetic: Annotated[Optional[int], typer.Option(help="Random prompts of this length instead.")] = None,
    rate: Annotated[Optional[float], typer.Option(help="Requests per second; default: all at once.")] = None,
    verified: Annotated[float, typer.Option(help="Share of requests verified.", min=0, max=1)] = 1.0,
    inject: Annotated[
        str,
        typer.Option(
            help="Mismatch rates, e.g. 0,0.01,0.1: draws what rolling back costs, at the first --batch."
        ),
    ] = "",
    timeline: Annotated[
        bool, typer.Option(help="`skip` over one task after the other: draws its phases.")
    ] = False,
    search_share: Annotated[float, typer.Option(help="Of the time, that `skip` may search.")] = 0.02,
    peers: Annotated[
        bool, typer.Option(help="Compare with transformers, and vLLM and llama.cpp if there.")
    ] = True,
    draft_model: Annotated[Optional[str], typer.Option(help="What `model` guesses with.")] = None,
    draft_weights: Annotated[str, typer.Option(help="auto, same, int8, int4 or fp8.")] = "auto",
    draft_tokens: Annotated[int, typer.Option(help="Most guesses before a replay.", min=1)] = 16,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("bench-out"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    linear: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    frame_rows: Rows = None,
    compile_layers: Compile = None,
    max_model_len: MaxLen = None,
    kv_memory: KvMemory = None,
) -> None:
    """Measure proposers and peers side by side: a table, a picture, one last line of JSON.

    [dim]samewise bench[/]
    [dim]samewise bench --proposers auto --workload questions.jsonl --limit 5[/]
    [dim]samewise bench --inject 0,0.01,0.05,0.2[/]
    """
    from samewise.bench.run import Plan, as_line
    from samewise.bench.run import bench as measure
    from samewise.config import EngineConfig

    settings = {
        "model": model, "device": device, "dtype": dtype, "linear": linear, "frame_rows": frame_rows,
        "compile": compile_layers, "max_model_len": max_model_len, "kv_memory": kv_memory,
        "draft_model": draft_model, "draft_weights": draft_weights, "draft_tokens": draft_tokens,
        "search_share": search_share,
    }  # fmt: skip
    config = EngineConfig.of(**{name: value for name, value in settings.items() if value is not None})
    sizes, rates = _numbers("batch", batches), _numbers("inject", inject)
    if not sizes or any(size < 1 or size != int(size) for size in sizes):
        raise typer.BadParameter(f"--batch {batches!r}: give whole numbers from 1")
    if any(not 0 <= one <= 1 for one in rates):
        raise typer.BadParameter(f"--inject {inject!r}: give rates from 0 to 1")
    if rate is not None and rate <= 0:
        raise typer.BadParameter(f"--rate {rate}: give more than 0 requests a second")
    if rate is not None and (rates or timeline):
        raise typer.BadParameter(f"--rate {rate}: with --inject and --timeline all requests come at once")
    if rate is not None and peers:
        typer.echo("no peers: with --rate requests arrive one after the other, and peers take all at once")
        peers = False
    plan = Plan(
        _names(proposers), tuple(int(size) for size in sizes), repeats, max_tokens, verified,
        workload, _names(tasks), limit or None, synthetic, rate, peers, rates, timeline, out,
    )  # fmt: skip
    typer.echo(as_line(measure(Console(), config, plan)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError:
        raise typer.BadParameter(f"--{name} {text!r}: give numbers, comma-separated") from None


def _llm(model: str, **settings: Any) -> LLM:
    """Load a model with the garbage collector out of the way: millions of objects are made, all to stay."""
    gc.disable()
    try:
        from samewise.llm.llm import LLM

        return LLM(model, **{name: value for name, value in settings.items() if value is not None})
    finally:
        gc.enable()


def _params(**settings: Any) -> SamplingParams:
    from samewise.params import SamplingParams

    return SamplingParams(**settings)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter("give a prompt or --file, not both")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"cannot read {file}: {error}") from None
        found = [line for line in lines if line.strip()]
        if not found:
            raise typer.BadParameter(f"{file} holds no prompt; write one a line")
        return found
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or something on stdin")
        prompt = sys.stdin.read().strip("\n")
    if not prompt:
        raise typer.BadParameter("the prompt is empty; give some text")
    return [prompt]


def _as_prompt(llm: LLM, text: str, *, raw: bool, system: str | None) -> Any:
    """The text itself, or a chat of one message where the model has a template."""
    if raw or not getattr(llm.get_tokenizer(), "chat_template", None):
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _record(text: str, output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    record = {
        "prompt": text,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "token_logprobs": answer.token_logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": answer.seed,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "contract": output.contract,
    }
    if answer.logprobs is not None:
        record["logprobs"] = [
            {str(token): entry.logprob for token, entry in position.items()} for position in answer.logprobs
        ]
    return record


def _ask_user(console: Console) -> str | None:
    try:
        return console.input("[bold green]you[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _turn(console: Console, llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer; Ctrl-C ends it and keeps what was said."""
    text = ""
    try:
        for chunk in llm.stream_chat(messages, params):
            text += chunk.text
            console.print(chunk.text, end="", soft_wrap=True, highlight=False, markup=False)
    except KeyboardInterrupt:
        console.print(" …", end="")
    console.print()
    return text


__all__ = ["app", "audit", "batch", "bench", "chat", "demo", "generate", "keygen", "main", "probe"]
