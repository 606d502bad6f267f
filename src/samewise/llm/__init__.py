"""The Python interfaces: LLM (synchronous) and AsyncLLM (asynchronous).

Holds: intake (checks a request, once); answer (deltas become text and outputs); prediction (how much of an
answer its prediction guessed); step_loop (submit, step, dispatch; shared by both interfaces); llm; aio;
gate (pauses, and work that waits until nothing is under way); mailbox (chunks travel to other event loops,
and what is unread is bounded); shares (of the engine's places, between owners).
State: a StepLoop owns its open Answers; an AsyncLLM owns the thread that owns the engine.
Imports: engine, receipts, text, schedule (limits), execute (the loaded model), and what they import.
"""

from samewise.llm.aio import AsyncLLM, ResponseReader
from samewise.llm.llm import LLM

__all__ = ["LLM", "AsyncLLM", "ResponseReader"]
