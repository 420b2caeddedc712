"""A folder's own chat template, in Jinja: messages -> the same pieces that chat.py makes of Qwen's default one."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from traceback import walk_tb
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivlmrl.chat import IMAGE, VIDEO, Control, content_parts, join_text, part_kind
from minivlmrl.data.turns import check_ends, check_messages
from minivlmrl.hub.checker import naming
from minivlmrl.hub.folder import read_json
from minivlmrl.hub.tokenizer import SPECIAL_TOKENS

# Where transformers' processor looks, in its order. The last is the tokenizer's, whose template mostly knows no images.
FILES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")

ANOTHER_DAY = "the same seed would see another day; write a date into the template"

# what chat.render does, for transformers: a folder without a template of its own is saved with this one
DEFAULT = """{%- set seen = namespace(image=0, video=0) -%}
{%- for message in messages -%}
{%- if loop.first and message.role != "system" %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == "image" or part.image or part.image_url %}{% set seen.image = seen.image + 1 -%}
{%- if add_vision_id %}Picture {{ seen.image }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" or part.video or part.video_url %}{% set seen.video = seen.video + 1 -%}
{%- if add_vision_id %}Video {{ seen.video }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ChatTemplate:
    """A Jinja template; see `environment` for what it can do and cannot.

    A control token counts as one if the template wrote it, or at least its first character: a user's text that spells
    one stays text, since it is rendered with a mark inside whatever could begin a control token. A template that cuts
    something out of the middle of a text, and so joins "<" and "|im_end|>", writes other control tokens when every
    sign of a text has a mark; that is an error.

    Args:
        source: the file, for errors.
        special_tokens: the control tokens that it may write; Tokenizer.special_tokens has a folder's.
        token_names: variables such as eos_token that the template may read.
    """

    def __init__(self, text: str, source: str | Path, special_tokens=SPECIAL_TOKENS, token_names=()):
        self.text, self.source, self.token_names = text, source, dict(token_names)
        # Longer ones first, since one may begin with another. One of a single character no text could do without.
        names = sorted({IMAGE, VIDEO, *(name for name in special_tokens if len(name) > 1)}, key=len, reverse=True)
        self.controls = {name: Control(name) for name in names} | {str(piece): piece for piece in (IMAGE, VIDEO)}
        self.control = re.compile(f"({'|'.join(map(re.escape, names))})")
        openings = {f"{re.escape(name[0])}(?={re.escape(name[1])}|\\s*\\Z)" for name in names}
        self.opening = re.compile("|".join(sorted(openings)))
        signs = sorted({sign for sign in "".join(names) if not sign.isalnum() and sign != "_"})
        self.signs = re.compile("|".join(map(re.escape, signs)))
        with self._naming():
            sandbox = environment()
            self.variables = meta.find_undeclared_variables(sandbox.parse(text))
            self.template = sandbox.from_string(text)

    @classmethod
    def from_folder(cls, folder: str | Path, special_tokens: Iterable[str] = SPECIAL_TOKENS) -> "ChatTemplate | None":
        """Find the template of a Hugging Face folder, in the first of FILES that has one; None for DEFAULT as well."""
        tokens, config = {}, Path(folder) / "tokenizer_config.json"
        for name, value in (read_json(config) if config.is_file() else {}).items():
            value = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(value, str):
                tokens[name] = value
        found = ((path, _template_in(path)) for path in (Path(folder) / name for name in FILES))
        path, text = next(((path, text) for path, text in found if text is not None), (None, DEFAULT))
        return None if text == DEFAULT else cls(text, path, special_tokens, tokens)

    def render(self, messages: list[dict], *, add_generation_prompt=True, add_vision_id=False) -> list[str]:
        """Lay out a conversation: pieces as of chat.render, joined what transformers' apply_chat_template renders.

        Args:
            messages: see chat.render; an assistant's may have tool_calls, and then no content. A template that writes
                no <|image_pad|> knows content as text only, and gets the parts of a message joined.
        """
        messages = self._checked(messages, add_vision_id)
        marks = self._marks(messages)
        text = self._lay_out(messages, add_generation_prompt, marks, add_vision_id)
        return [piece for piece, _ in join_text([(piece, False) for piece in self._cut(text, marks)])]

    def render_completion(self, messages: list[dict], turns: list[dict], *, add_vision_id=False):
        """Lay out what follows a prompt (messages): pieces and flags as of turns.render_completion.

        The assistant writes the template's {% generation %} blocks; without these what each assistant turn adds to the
        conversation before it with its generation prompt. A turn ends with the control token that closes it, flagged
        in any case, and what follows that (mostly a newline) is not, since no generation ever writes it.
        """
        prompt, whole = len(messages), self._checked([*messages, *turns], add_vision_id)
        check_ends(turns)
        marks = self._marks(whole)
        lay_out = partial(self._lay_out, marks=marks, add_vision_id=add_vision_id)
        text = lay_out(whole, False)

        def length(count: int, add_generation_prompt: bool) -> int:
            beginning = lay_out(whole[:count], add_generation_prompt)
            if not text.startswith(beginning):
                what = f"the first {count} messages are laid out in another way when {len(whole) - count} more follow"
                raise self._error(f"with this chat template {what}; use one that only ever appends")
            return len(beginning)

        start = length(prompt, True)
        if "generation_begins" in self.variables:
            blocks = re.split(f"[{marks[1]}{marks[2]}]", lay_out(whole, False, track=True))  # outside, block, outside
            if "".join(blocks) != text:
                raise self._error("the {% generation %} blocks of this template cannot be followed")
            spans = list(pairwise(accumulate(map(len, blocks))))[::2]
        else:
            written = [i for i in range(prompt, len(whole)) if whole[i]["role"] == "assistant"]
            spans = [(length(i, True), length(i + 1, False)) for i in written]
        spans = [(max(begin, start), self._closing(text, begin, end)) for begin, end in spans if end > start]
        if not spans or text[spans[-1][1] :].strip():
            raise self._error("the last turn of the assistant is in no {% generation %} block")
        cuts = pairwise([start, *chain(*spans)])  # of the prompt's end: outside, written, outside, ..., written
        stretches = [(self._cut(text[begin:end], marks), i % 2 == 1) for i, (begin, end) in enumerate(cuts)]
        return join_text([(piece, written) for pieces, written in stretches for piece in pieces])

    def _checked(self, messages: list[dict], add_vision_id: bool) -> list[dict]:
        """Refuse what the template would drop; turn the rest into plain data, and None into what is missing."""
        check_messages(messages, tool_calls=True)
        kinds = {part_kind(part) for message in messages for part in content_parts(message) or ()}
        written = set(self.control.findall(self.text))
        left_out = {
            "add_vision_id": add_vision_id and "add_vision_id" not in self.variables,
            "tool_calls": any(message.get("tool_calls") for message in messages) and "tool_calls" not in self.text,
            "images": "image" in kinds and IMAGE not in written,
            "videos": "video" in kinds and VIDEO not in written,
        }
        if name := next((name for name, missing in left_out.items() if missing), None):
            raise self._error(f"this chat template has no place for {name}; use one that has")
        messages = [_plain(message) for message in messages]
        for message in messages:
            if isinstance(message.get("content"), list):
                parts = [_plain(part) for part in message["content"]]
                message["content"] = parts if {IMAGE, VIDEO} & written else "".join(part["text"] for part in parts)
        return messages

    def _marks(self, messages: list[dict]) -> list[str]:
        """Find three unused characters: after what could begin a control token, for begin and end of a generation."""
        used = set(json.dumps([messages, self.token_names], ensure_ascii=False)) | set(self.text)
        return list(islice((chr(c) for c in range(0xE000, 0x10FFFE) if chr(c) not in used), 3))

    def _lay_out(self, messages: list[dict], prompt: bool, marks: list[str], add_vision_id: bool, track=False) -> str:
        """Render with marks in what users wrote and, to track it, around what is generated."""
        mark, begins, ends = marks if track else (marks[0], "", "")
        options = {"add_generation_prompt": prompt, "add_vision_id": add_vision_id, "tools": None, "documents": None}
        options |= {"generation_begins": begins, "generation_ends": ends, **self.token_names}
        with self._naming():
            marked, signs = self._marked(messages, mark, self.opening), self._marked(messages, mark, self.signs)
            text = self.template.render(messages=marked, **options)
            unmarked = text if marked == messages else self.template.render(messages=messages, **options)
            controls = text if signs == marked else self.template.render(messages=signs, **options)
        if text.replace(mark, "") != unmarked.replace(mark, ""):
            what = "a text of the conversation that spells (the beginning of) a control token"
            raise self._error(f"this chat template reads something into {what}; take that out of the text")
        if self.control.findall(text) != self.control.findall(controls):
            raise self._error("this chat template makes a control token of the conversation's text; use another one")
        return text

    def _marked(self, value: Any, mark: str, after: re.Pattern) -> Any:
        if isinstance(value, str):
            return after.sub(lambda match: match.group() + mark, value)
        if isinstance(value, dict):
            return {self._marked(key, mark, after): self._marked(item, mark, after) for key, item in value.items()}
        return [self._marked(item, mark, after) for item in value] if isinstance(value, list) else value

    def _cut(self, text: str, marks: list[str]) -> list[str]:
        """Cut at control tokens, which are the template's, as those of users have a mark inside."""
        pieces = self.control.split(text)  # text, token, text, token, ..., text
        return [self.controls[p] if i % 2 else p.replace(marks[0], "") for i, p in enumerate(pieces)]

    def _closing(self, text: str, begin: int, end: int) -> int:
        """Find the end of the control token that closes a turn: its last one, or the next after it."""
        closing = [match for match in self.control.finditer(text, begin, end) if not text[match.end() : end].strip()]
        closing = closing[-1] if closing else self.control.match(text, end)
        if closing is None:
            what = "closes an assistant turn with no control token, so nothing would teach the model to stop"
            raise self._error(f"this chat template {what}; use one that does")
        return closing.end()

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{self.source}: {reason}")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a template is a program: it can fail in every way
            # jinja2 rewrites tracebacks so that they show lines of the template
            lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
            if isinstance(error, jinja2.TemplateSyntaxError):
                lines = [error.lineno]
            where, reason = f" in line {lines[-1]}" if lines else "", str(error).partition("\n")[0]
            raise ValueError(f"{self.source}: chat template fails{where}: {type(error).__name__}: {reason}") from error


def _plain(mapping: dict) -> dict:
    """Rebuild what is not None of JSON types alone: the image object in a part has methods that no sandbox knows."""
    given = {key: value for key, value in mapping.items() if value is not None}
    return json.loads(json.dumps(given, default=lambda other: f"<{type(other).__name__}>"))


def _template_in(path: Path) -> str | None:
    """Return the template of one of FILES, the "default" of a list of named ones; None if it has none."""
    if not path.is_file():
        return None
    if path.suffix == ".jinja":
        with naming(path):
            return path.read_text(encoding="utf-8")
    text, needed = read_json(path).get("chat_template"), path.name == "chat_template.json"
    if isinstance(text, list):
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in text]
        if "default" not in names:
            raise ValueError(f"{path}: it has the chat templates {names}; name one of them 'default'")
        text, needed = text[names.index("default")].get("template"), True
    if not isinstance(text, str) and (needed or text is not None):
        raise ValueError(f"{path}: chat_template must be the text of a template, it is {text!r:.40}")
    return text


def environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as apply_chat_template has it: whitespace rules, functions, {% break %}, {% generation %}.

    It keeps a template from Python's insides, from files, and from range() over 100,000. It does not bound time or
    memory ({{ 'x' * 10**9 }} is possible): take a template from where you would take weights.
    """
    extensions = [_GenerationBlock, LoopControlExtension]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda _: _raise_exception(f"strftime_now: {ANOTHER_DAY}")
    return made


class _GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %}: its text between the variables generation_begins and generation_ends."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(f"generation_{name}", "load")]) for name in ("begins", "ends"))
        return nodes.Scope([begin, *body, end]).set_lineno(line, override=False)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write JSON; jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
