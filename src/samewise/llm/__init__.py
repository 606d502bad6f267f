from samewise.llm.aio import AsyncLLM
from samewise.llm.llm import LLM

__all__ = ["LLM", "AsyncLLM"]
