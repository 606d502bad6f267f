"""Render a conversation with the model's own chat template, without access to the clock."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samewise.errors import BadPrompt
from samewise.text.date_format import format_date

log = logging.getLogger("samewise")

Messages = Sequence[Mapping[str, Any]]

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
"""OpenAI's roles. Messages of any other are checked: a template may leave out what it does not know."""


def template_of(tokenizer: Any, tools: Any = None) -> str:
    """The model's chat template; some models have a second one for conversations with tools."""
    return str(tokenizer.get_chat_template(tools=tools))


def render_chat(
    tokenizer: Any,
    messages: Messages,
    /,
    *,
    date: str | None,
    add_generation_prompt: bool = True,
    **template: Any,
) -> str:
    """The text of a conversation. `date` (YYYY-MM-DD) is what a template that asks for today's date gets.

    Other keywords go to the template. Raises BadPrompt for a conversation the template cannot render, or of
    which it leaves out messages of other roles than KNOWN_ROLES.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise BadPrompt(
            "this model has no chat template; use generate() with a plain prompt", param="messages"
        )
    if not messages:
        raise BadPrompt("the conversation is empty; give at least one message", param="messages")
    for message in messages:
        if not _is_message(message):
            raise BadPrompt(
                f"a message is a mapping with 'role' and 'content', not {message!r}", param="messages"
            )
    import jinja2

    def render(conversation: Messages) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(conversation),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=pin_date(template_of(tokenizer, template.get("tools")), date),
                **template,
            )
        )

    try:
        text, missing = render(messages), _left_out(messages, render)
    except jinja2.exceptions.UndefinedError as error:
        raise BadPrompt(
            f"the chat template needs something it was not given: {error}; see date=…", param="messages"
        ) from error
    except Exception as error:  # the template is a program of the model's author and may raise anything
        if type(error) is jinja2.exceptions.TemplateError:  # its own words, of `raise_exception`
            reason = str(error)
        else:
            log.warning("the chat template failed with %s: %.200s", type(error).__name__, error)
            reason = "it failed; the log says how"
        raise BadPrompt(f"the chat template refused the conversation: {reason}", param="messages") from error
    if missing is not None:
        raise BadPrompt(
            f"the chat template leaves out messages of the role {missing!r}; use one that it knows",
            param="messages",
        )
    return text


def _left_out(messages: Messages, render: Callable[[Messages], str]) -> str | None:
    """A role, other than KNOWN_ROLES, of a message that does not show in the text; None: there is none."""
    marked = [dict(message) for message in messages]
    marks: dict[str, str] = {}  # role of a message by the text that it is given instead of its own
    for i, message in enumerate(marked):
        if message["role"] not in KNOWN_ROLES and isinstance(message.get("content"), str):
            message["content"] = f"samewise-message-{i}-"
            marks[message["content"]] = str(message["role"])
    text = render(marked) if marks else ""
    return next((role for mark, role in marks.items() if mark not in text), None)


def pin_date(template: str, date: str | None) -> str:
    """The template with `strftime_now` (transformers' access to the clock) replaced by a fixed date.

    Without a date, a template that calls it raises an error. A name set in the template itself takes
    precedence over the one transformers passes in.
    """
    if not asks_for_date(template):
        return template
    if date is None:
        pinned = "{%- set strftime_now = there_is_no_clock_configure_a_date %}"
    else:
        day = dt.datetime.fromisoformat(date)
        formats = sorted({text for _, text in re.findall(r"strftime_now\(\s*(['\"])(.*?)\1", template)})
        days = json.dumps({text: format_date(day, text) for text in formats})
        pinned = (
            "{%- macro strftime_now(format) %}{%- if format not in " + days + " %}"
            "{{ raise_exception('the date format ' ~ format ~ ' is not written out in the template') }}"
            "{%- endif %}{{ " + days + "[format] }}{% endmacro %}"
        )
    # Jinja drops the newline after a block, so a newline at the template's start is written twice.
    return pinned + ("\n" if template.startswith("\n") else "") + template


def asks_for_date(template: str) -> bool:
    """Whether a template may ask for today's date."""
    return "strftime_now" in template


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and "role" in message
        and ("content" in message or "tool_calls" in message)
    )


__all__ = ["KNOWN_ROLES", "Messages", "asks_for_date", "pin_date", "render_chat", "template_of"]
