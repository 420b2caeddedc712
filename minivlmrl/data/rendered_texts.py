"""Find message texts that a chat template leaves out."""

import contextlib
import json
import re
from collections.abc import Iterator
from unicodedata import normalize

from minivlmrl.config.types import Plain
from minivlmrl.data.messages import THOUGHT_KEYS, content_parts, part_kind
from minivlmrl.errors import truncate

# matches reasoning at the start of an answer, without <think> if the prompt already ends with this tag
THOUGHT = re.compile(r"\s*(<think>)?((?!<think>).)*?</think>(\s*<think>((?!<think>).)*?</think>)*", re.DOTALL)


def find_missing_text(messages: list[dict], rendered: str, history: int = 0) -> str | None:
    """Describe the first missing text in a rendered conversation.

    Templates may change whitespace, and escape tool call arguments as JSON.

    Args:
        history: templates may drop reasoning from the first `history` messages.
    Returns:
        What the template does not render, such as "message 2 completely: the text 'Hi' of the role 'user' is missing or
        changed", or None.
    """
    compact = _compact(rendered)
    start = 0  # texts keep their order
    for number, message in enumerate(messages):
        end = f"of the role {message['role']!r} is missing or changed"
        for text in _written_texts(message, number < history):
            place = compact.find(_compact(text), start)
            if place < 0:
                return f"message {number} completely: the text {truncate(text, 60)} {end}"
            start = place + len(_compact(text))
        for text in _call_texts(message.get("tool_calls") or []):
            if not any(form in compact for form in _json_forms(text)):
                return f"message {number} completely: the tool call with {truncate(text, 60)} {end}"
    return None


def _compact(text: str) -> str:
    """Remove whitespace, and normalize text to NFC, as tokenizers do."""
    return "".join(normalize("NFC", text).split())


def _written_texts(message: dict, is_history: bool) -> Iterator[str]:
    parts = content_parts(message)
    texts = [part["text"] for part in parts if part_kind(part) == "text"]
    skipped = 0  # length of reasoning at the start of the message
    if message["role"] == "assistant":
        if not is_history:
            yield from (message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str))
        elif thought := THOUGHT.match("".join(texts)):
            skipped = thought.end()
    for text in texts:
        yield text[skipped:]
        skipped = max(0, skipped - len(text))


def _call_texts(calls: Plain) -> Iterator[str]:
    """Yield all names and strings in nested tool calls."""
    if isinstance(calls, dict):
        for key, value in calls.items():
            if value is None or key in ("id", "type", "index"):
                continue  # Parquet stores missing keys as None
            if key not in ("function", "name", "arguments"):
                yield key
            yield from _call_texts(value)
    elif isinstance(calls, list):
        for value in calls:
            yield from _call_texts(value)
    elif isinstance(calls, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(calls)  # arguments of a tool call may be a JSON string
            if isinstance(parsed, dict):
                yield from _call_texts(parsed)
                return
        yield calls


def _json_forms(text: str) -> list[str]:
    """Return a string in three forms: plain, escaped as JSON, and escaped twice."""
    forms = [text]
    for ensure_ascii in (False, True):
        escaped = json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
        forms += [escaped, json.dumps(escaped, ensure_ascii=ensure_ascii)[1:-1]]
    return list(map(_compact, forms))
