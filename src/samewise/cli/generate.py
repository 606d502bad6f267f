"""`samewise generate`: answer a prompt, or one for each line of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.text import Text

from samewise.cli.loading import load_llm
from samewise.cli.options import (
    AsJson,
    MaxTokens,
    Seed,
    Settings,
    System,
    Temperature,
    TopK,
    TopP,
    engine_options,
)
from samewise.params import SamplingParams

if TYPE_CHECKING:
    from samewise.llm.llm import LLM
    from samewise.outputs import RequestOutput


@engine_options("generate")
def generate(
    prompt: Annotated[Optional[str], typer.Argument(help="The prompt; '-' or nothing: stdin.")] = None,
    file: Annotated[Optional[Path], typer.Option("--file", "-f", help="Read prompts, one a line.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[Optional[list[str]], typer.Option(help="Stop at this text; repeatable.")] = None,
    logprobs: Annotated[Optional[int], typer.Option(help="Alternatives per token (with --json).")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text.")] = False,
    system: System = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Give the same bits under any load.")
    ] = True,
    prediction: Annotated[
        Optional[Path],
        typer.Option(help="A text the answer is expected to contain much of: faster, the same answer."),
    ] = None,
    as_json: AsJson = False,
    *,
    settings: Settings,
) -> None:
    """Answer a prompt, or one for each line of a file.

    [dim]samewise generate "Why is the sky blue?"[/]
    [dim]samewise generate --file questions.txt --json > answers.jsonl[/]
    """
    texts = _read_prompts(prompt, file)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        stop=stop or [], logprobs=logprobs, verify=verify,
        prediction=None if prediction is None else _read_text(prediction),
    )  # fmt: skip
    llm = load_llm(**settings)
    Console(stderr=True).print(f"[dim]contract {llm.contract}[/]", highlight=False)
    prompts = [_with_template(llm, text, raw=raw, system=system) for text in texts]
    if as_json:
        for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=len(prompts) > 1), strict=True):
            record = _record(text, output, predicted=prediction is not None)
            typer.echo(json.dumps(record, ensure_ascii=False))
    elif len(prompts) == 1:
        for chunk in llm.stream(prompts[0], params):
            typer.echo(chunk.text, nl=False)
        typer.echo()
    else:
        console = Console()
        for text, output in zip(texts, llm.generate(prompts, params), strict=True):
            console.print(Text(text, style="bold cyan"))
            console.print(output.outputs[0].text, highlight=False, markup=False)


def _read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts of the argument, the file or stdin."""
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter("give a prompt or --file, not both")
        return _read_lines(file)
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or something on stdin")
        prompt = sys.stdin.read().strip("\n")
    if not prompt:
        raise typer.BadParameter("the prompt is empty; give some text")
    return [prompt]


def _read_lines(file: Path) -> list[str]:
    prompts = [line for line in _read_text(file).splitlines() if line.strip()]
    if not prompts:
        raise typer.BadParameter(f"{file} holds no prompt; write one a line")
    return prompts


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}") from None


def _with_template(llm: LLM, text: str, *, raw: bool, system: str | None) -> Any:
    """The text itself, or a chat of one message where the model has a template."""
    if raw or not getattr(llm.get_tokenizer(), "chat_template", None):
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _record(text: str, output: RequestOutput, *, predicted: bool) -> dict[str, Any]:
    answer = output.outputs[0]
    record: dict[str, Any] = {
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
    if predicted:
        record["accepted_prediction_tokens"] = answer.accepted_prediction_tokens
        record["rejected_prediction_tokens"] = answer.rejected_prediction_tokens
    if answer.logprobs is not None:
        record["logprobs"] = [
            {str(token): entry.logprob for token, entry in position.items()} for position in answer.logprobs
        ]
    return record


__all__ = ["generate"]
