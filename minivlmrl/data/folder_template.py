"""A folder's own chat template, in Jinja: messages -> the same pieces that chat.py makes of Qwen's.

The template that Qwen publishes with Qwen2-VL and Qwen2.5-VL is chat.render, which is used then.
Qwen3-VL's is chat.render without a default system message, but for tools.
"""

import hashlib
import json
import re
from copy import copy
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path

import jinja2
import jinja2.meta
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivlmrl.config.parsing import did_you_mean, error_context, parse_json, read_json
from minivlmrl.config.types import Plain
from minivlmrl.data.chat_template import (
    END,
    IMAGE,
    START,
    VIDEO,
    Control,
    as_jinja,
    join_flagged,
    join_text,
    layout_turn,
    render_completion,
)
from minivlmrl.data.messages import (
    check_messages,
    content_parts,
    part_kind,
    parts_of,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.tokenizer import SPECIAL_TOKENS

# where transformers' processor looks, in its order
FILES = (
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer_config.json",
)
# sha256 of what Qwen publishes with Qwen2-VL and Qwen2.5-VL, and of TRL's with {% generation %}
PUBLISHED = (
    "a0bc6f6fc7a29a80017a433e8f03a1cc1236e838a944a2d034295a60c4f2fddb",
    "31c85932a6d8826f0fe8d52b81767eba6b869128b0a7c7503d1e7baaad4e8043",
)
# of what Qwen publishes with Qwen3-VL
PUBLISHED_QWEN3 = "9d879ef91075acbfb2df7e441fd79d60bacfca989cf6d511d2af45c681e94f10"
# and ours, for transformers: it is saved into a folder that has none; with tools, where an
# environment declares them
DEFAULT = as_jinja()
WITH_TOOLS = as_jinja("qwen2_5_vl_tools")
# without the default system message
DEFAULT_QWEN3 = re.sub(r"\n{%- if loop\.first.*?{% endif %}", "", DEFAULT, flags=re.DOTALL)


class ChatTemplate:
    """A Jinja template; a conversation whose text spells a control token is refused.

    Args:
        source: the file, for errors.
        special_tokens: the control tokens that it may write; Tokenizer.special_tokens has a
            folder's.
        token_names: variables such as eos_token that the template may read, and with_values'.
    """

    def __init__(self, text: str, source, special_tokens=SPECIAL_TOKENS, token_names=()):
        self.text = text
        self.source = source
        self.token_names = dict(token_names)
        # longer ones first, as one may begin with another; no text could do without a character
        control_names = {IMAGE, VIDEO, *(name for name in special_tokens if len(name) > 1)}
        control_names = sorted(control_names, key=len, reverse=True)
        controls = {name: Control(name) for name in control_names}
        self.controls = {**controls, IMAGE: IMAGE, VIDEO: VIDEO}
        self.tools = None  # schemas of those that it declares
        self.is_default = text in (DEFAULT, DEFAULT_QWEN3)
        self.is_qwen3 = _is_known(text, DEFAULT_QWEN3, PUBLISHED_QWEN3)
        self.control = re.compile(f"({'|'.join(map(re.escape, control_names))})")
        try:
            self.template = environment().from_string(text)
        except Exception as error:  # also RecursionError or SyntaxError, of nested blocks
            raise self._error(error) from error

    @classmethod
    def from_folder(
        cls, folder: str | Path, special_tokens=SPECIAL_TOKENS
    ) -> "ChatTemplate | None":
        """Find the template of a folder, in the first of FILES with one; None: chat.render's."""
        token_names = {}
        config_file = Path(folder) / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        for name, value in config.items():
            token_text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token_text, str):
                token_names[name] = token_text
        for path in (Path(folder) / name for name in FILES):
            text = _template_in(path)
            if text is not None:
                is_published = _is_known(text, DEFAULT, *PUBLISHED)
                return None if is_published else cls(text, path, special_tokens, token_names)
        return None

    def render(self, messages: list[dict]) -> list[str]:
        """Lay out a conversation: pieces as of chat.render, joined as of apply_chat_template.

        Args:
            messages: see chat.render; an assistant's may have tool_calls, and then no content.
        """
        if self.is_qwen3 and not self.tools and not _needs_jinja(messages):
            turns = [piece for message in messages for piece in layout_turn(message)]
            return join_text([*turns, START, "assistant\n"])
        pieces = join_text(self._cut(self._lay_out(self._checked(messages), True)))
        shown_kinds = []
        for piece in pieces:
            if piece is IMAGE or piece is VIDEO:
                shown_kinds.append("image" if piece is IMAGE else "video")
        message_kinds = [part_kind(part) for part in shown_parts_of(messages)]
        if shown_kinds != message_kinds:
            raise self._error(f"it shows {shown_kinds}, the messages have {message_kinds}")
        return pieces

    def render_completion(self, messages: list[dict], turns: list[dict]) -> list[tuple[str, bool]]:
        """Lay out what follows a prompt (messages): pieces and flags as of turns.render_completion.

        The assistant writes what each of its turns adds to the conversation before it with its
        generation prompt, up to and with <|im_end|>. A template that closes turns in another way
        than Qwen's is refused.
        """
        if self.is_qwen3 and not _needs_jinja([*messages, *turns]):
            return render_completion(turns)
        conversation = self._checked([*messages, *turns])
        text = self._lay_out(conversation, False)
        flagged = []
        end = None  # of the assistant's turn before
        for turn_number in range(len(messages), len(conversation)):
            if conversation[turn_number]["role"] != "assistant":
                continue
            start = self._length(text, conversation[:turn_number], True)
            if end is not None:
                flagged += [(piece, False) for piece in self._cut(text[end:start])]
            turn_end = self._length(text, conversation[: turn_number + 1], False)
            if not text[start:turn_end].endswith(f"{END}\n"):
                raise self._error(
                    f"SFT and pairs need Qwen's form, {END} and a line break at the end of an "
                    "assistant's turn; put the chat_template.jinja of the Qwen model that was "
                    "fine-tuned in place of this one"
                )
            end = turn_end - 1  # nobody writes the line break
            flagged += [(piece, True) for piece in self._cut(text[start:end])]
        return join_flagged(flagged)

    def _length(self, text: str, messages: list[dict], add_generation_prompt: bool) -> int:
        """Lay out the first messages of a conversation; return where they end in its text."""
        beginning = self._lay_out(messages, add_generation_prompt)
        if not text.startswith(beginning):
            raise self._error(
                f"it lays out the first {len(messages)} messages in another way when more follow; "
                "leave out thoughts after a prompt without, or use one that only appends"
            )
        return len(beginning)

    @cached_property
    def opened(self) -> str:
        """Find the thought that a prompt opens, and does not close: "<think>\\n"; "" if there is none.

        It is of the assistant's turn, though the model does not write it.
        """
        messages = [{"role": "user", "content": "?"}]
        prompt = self._lay_out(messages, True).removeprefix(self._lay_out(messages, False))
        _, tag, thought = prompt.rpartition("<think>")
        return tag + thought if tag and "</think>" not in thought else ""

    def declaring(self, tools: list[dict]) -> "ChatTemplate":
        """Return this template with tools in its prompts (ValueError: it has no place for them)."""
        if "in tools" not in self.text:
            raise self._error("it has no place for tools: set declare_tools = False in the class")
        template = copy(self)
        template.tools = tools
        return template

    def _checked(self, messages: list[dict]) -> list[dict]:
        """Refuse what the template would drop or take for a control token; return plain data."""
        check_messages(messages)
        used_kinds = {part_kind(part) for part in parts_of(messages)}
        if any(message.get("tool_calls") for message in messages):
            used_kinds.add("tool_call")
        for kind, spelled in (("image", IMAGE), ("video", VIDEO), ("tool_call", "tool_calls")):
            if kind in used_kinds and spelled not in self.text:
                raise self._error(f"it has no place for {kind}s; use one that has")
        messages = _as_json(messages)
        if "reasoning_content" in self.text and "split('</think>')" not in self.text:
            # Qwen3.8's would write a thought that is in the text after an empty one
            messages = [_with_thought_apart(message) for message in messages]
        if "<function=" in self.text:  # it lays out parameters one by one, not JSON
            _parse_arguments(messages)
        joined = "".join(map(text_of, messages))  # a template may join parts, and strip them
        for text in (json.dumps(messages, ensure_ascii=False), joined, "".join(joined.split())):
            control = self.control.search(text)
            if control:
                raise self._error(
                    f"a text of the conversation spells {control[0]}; "
                    "take that out, or use Qwen's template, for which it stays text"
                )
        return messages

    def _lay_out(self, messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            return self.template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=self.tools,
                documents=None,
                **self.token_names,
            )
        except Exception as error:  # a template is a program: it can fail in every way
            if messages and messages[0]["role"] == "system":
                self._lay_out(messages[1:], add_generation_prompt)  # if that fails, it is not this
                raise self._error(
                    f"it refuses system messages ({error}); leave out data.system_prompt, "
                    "or the system turn of the rows"
                ) from error
            raise self._error(error) from error

    def _cut(self, text: str) -> list[str]:
        """Cut at control tokens."""
        return [self.controls.get(piece, piece) for piece in self.control.split(text)]

    def _error(self, reason: str | Exception) -> ValueError:
        if isinstance(reason, Exception):
            line = getattr(reason, "lineno", "?")  # of a syntax error
            reason = f"fails in line {line}: {type(reason).__name__}: {reason}".partition("\n")[0]
        return ValueError(f"{self.source}: chat template: {reason}")


def with_values(template: ChatTemplate | None, values: dict) -> ChatTemplate | None:
    """Hand a template, None: chat.render's, named values, such as {"enable_thinking": False}."""
    if not values:
        return template
    template = copy(template or ChatTemplate(DEFAULT, "the default template"))
    sandbox = template.template.environment
    template_names = jinja2.meta.find_undeclared_variables(sandbox.parse(template.text))
    template_names -= {*sandbox.globals, "messages", "tools", "add_generation_prompt"}
    for name in values:
        if name not in template_names:
            raise template._error(
                f"it reads no {name!r} of data.chat_template_kwargs; "
                f"there are: {', '.join(sorted(template_names)) or 'none'}"
                f"{did_you_mean(name, template_names)}"
            )
    template.token_names = template.token_names | values
    template.is_qwen3 = False
    return template


def _is_known(text: str, ours: str, *published: str) -> bool:
    """Tell whether a template's text is ours or, by its hash, what Qwen publishes."""
    text = text.removesuffix("\n")
    return text == ours or hashlib.sha256(text.encode()).hexdigest() in published


def _needs_jinja(messages: list[dict]) -> bool:
    """Tell whether Qwen3-VL's template does more with a conversation than chat.render."""
    check_messages(messages)
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise ValueError(
            "chat template: Qwen3-VL's drops a system message after the first turn; "
            "begin with it, or make it a user's"
        )
    for message in messages:
        if message["role"] not in ("system", "user", "assistant") or message.get("tool_calls"):
            return True
        if message["role"] == "system" and shown_parts_of([message]):
            return True
    return False


def _with_thought_apart(message: dict) -> dict:
    """Say the thought of an answer, <think>...</think> in front of it, as templates are told it."""
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    parts = content_parts(message)
    texts = list(takewhile(lambda part: part_kind(part) == "text", parts))
    thought = re.fullmatch(r"\s*<think>(.*?)</think>(.*)", text_of({"content": texts}), re.DOTALL)
    if thought is None:
        return message
    answer = [{"type": "text", "text": thought[2]}, *parts[len(texts) :]]
    return {**message, "reasoning_content": thought[1], "content": answer}


def _parse_arguments(messages: list[dict]):
    """Parse the arguments of calls that are JSON as text."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = parse_json(function["arguments"])


def _as_json(value: Plain) -> Plain:
    """Rebuild of JSON types alone, without None: objects have methods that no sandbox knows."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"


def _template_in(path: Path) -> str | None:
    """Return the template in one of FILES, or None."""
    if not path.is_file():
        return None
    if path.suffix == ".jinja":
        with error_context(path):
            return path.read_text(encoding="utf-8")
    text = read_json(path).get("chat_template")
    if text is None and path.name != "chat_template.json":
        return None
    if not isinstance(text, str):
        raise ValueError(
            f"{path}: chat_template must be the text of a template, it is {text!r:.40}"
        )
    return text


def environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as apply_chat_template has it: whitespace rules, functions, {% break %}.

    It keeps a template from Python's insides, from files, and from range() over 100,000. It bounds
    neither time nor memory ({{ 'x' * 10**9 }}): take a template from where you would take weights.
    """

    def fail(message: str):
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension]
    )
    # jinja2's own filter would escape <, > and & for HTML
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = fail
    return sandbox
