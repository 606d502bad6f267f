"""What the tests of the agents' endpoints share: templates, tools, and readers of event streams."""

import json
from typing import Any

HERMES = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer with <tool_call>{"name": …, "arguments": …}</tool_call>\n{% endif %}'
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
THINKING = (
    "{% for m in messages %}<s>{{ m['role'] }}: "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OPENED = "{% for m in messages %}<s>{{ m['content'] }}\n{% endfor %}<s>assistant: <think>\n"  # and </think>
THOUGHT = {"type": "grammar", "syntax": "regex", "definition": "<think>\n[a-c]{4,8}\n</think>\n\n[d-f]{3,6}"}
"""A grammar over a whole answer, the thinking marks included."""

PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
    "required": ["town"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; checks that each has its type as its name, and that nothing follows."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
