"""Render conversations with a Jinja chat template, as ordinary text and control tokens."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Collection
from copy import copy
from functools import cached_property, partial
from itertools import chain, groupby, takewhile
from pathlib import Path
from unicodedata import normalize

import jinja2
import jinja2.meta
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivlmrl.config.types import Plain
from minivlmrl.data.messages import (
    THOUGHT_KEYS,
    check_messages,
    content_parts,
    is_trained,
    part_kind,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, STRUCTURE, SpecialToken
from minivlmrl.errors import UserError, did_you_mean, error_context, pluralize, truncate
from minivlmrl.json_files import parse_json, read_json

START = SpecialToken("<|im_start|>")
END = SpecialToken("<|im_end|>")
# stop tokens: end of a turn, end of a document
ENDS = (END, SpecialToken("<|endoftext|>"))
# image placeholder; compare with `is`, because a user may write "<|image_pad|>" as ordinary text
IMAGE = SpecialToken("<|image_pad|>")
VIDEO = SpecialToken("<|video_pad|>")
# tokens for an image in a prompt; they have no loss, because the model never generates them
VISION = (SpecialToken("<|vision_start|>"), IMAGE, SpecialToken("<|vision_end|>"))
# files with a chat template; the first one found is used, as in transformers
FILES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")
# SHA-256 hashes of Qwen2.5-VL chat templates published by Qwen and TRL; DEFAULT is used in their place
PUBLISHED = (
    "a0bc6f6fc7a29a80017a433e8f03a1cc1236e838a944a2d034295a60c4f2fddb",
    "31c85932a6d8826f0fe8d52b81767eba6b869128b0a7c7503d1e7baaad4e8043",
)
# matches template code for removing <think>...</think> from an answer
THOUGHT_SPLIT = re.compile(r"(split|partition)\(\s*['\"]</think>")
# tags allowed in messages, even if the tokenizer has special tokens for them
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEFAULT, WITH_TOOLS = (  # Qwen2-VL's and Qwen2.5-VL's chat template, without and with tool declarations
    Path(__file__).with_name(f"{name}.jinja").read_text("utf-8").removesuffix("\n")
    for name in ("qwen2_5_vl", "qwen2_5_vl_tools")
)
# Qwen3-VL: Qwen2.5-VL's template without a default system message
DEFAULT_QWEN3 = re.sub(r"\n{%- if loop\.first.*?{% endif %}", "", DEFAULT, flags=re.DOTALL)


def fail(message: str):
    raise jinja2.TemplateError(message)


# Jinja sandbox like apply_chat_template in transformers. Templates may use {% break %}, but not {% generation %}.
# Python internals, files and range() over more than 100,000 items are blocked. Time and memory are not limited, as in
# {{ 'x' * 10**9 }}: only use templates that you trust.
SANDBOX = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
# replace Jinja's tojson, which escapes <, > and & for HTML
SANDBOX.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
SANDBOX.globals["raise_exception"] = fail


class RewrittenTurnsError(UserError):
    """Raised if a chat template changes a turn once later turns follow, for example by dropping its reasoning."""


class ChatTemplate:
    """Jinja chat template that treats "<|im_end|>" in a user message as ordinary text.

    Args:
        source: template file, for error messages.
        token_names: {name: value} for template variables such as eos_token.
    """

    def __init__(
        self,
        text: str = DEFAULT,
        source: str | Path = "the default template",
        special_tokens: Collection[str] = SPECIAL_TOKENS,
        token_names=(),
    ):
        self.text = text
        self.source = source
        self.token_names = dict(token_names)
        self.tools = None  # JSON schemas of the tools declared in prompts
        try:
            self.template = SANDBOX.from_string(text)
        except Exception as error:
            raise self._error(error) from error
        # control tokens written only by the template, never in a message
        names: set[str] = {IMAGE, VIDEO}
        for name in special_tokens:
            # exclude single-character tokens such as "#": messages may contain them
            is_written = len(name) > 1 and (name in text or name in self.token_names.values())
            if name in STRUCTURE or (is_written and name not in TAGS):
                names.add(name)
        # longer tokens first, because a token may begin with a shorter one
        control_names = sorted(names, key=len, reverse=True)
        self.controls = {name: SpecialToken(name) for name in control_names} | {IMAGE: IMAGE, VIDEO: VIDEO}
        self.control = re.compile(f"({'|'.join(map(re.escape, control_names))})")
        # match only the first character, so that re.sub can insert a placeholder after it
        patterns = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in control_names]
        self.literal_tokens = re.compile("|".join(patterns))

    @classmethod
    def from_folder(cls, folder: str | Path, special_tokens=SPECIAL_TOKENS, default: str = DEFAULT) -> "ChatTemplate":
        """Load a model folder's chat template, or `default` if there is none."""
        token_names = {}
        config_file = Path(folder) / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        for name, value in config.items():
            token_text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token_text, str):
                token_names[name] = token_text
        for path in (Path(folder) / name for name in FILES):
            if not path.is_file():
                continue
            if path.suffix == ".jinja":
                with error_context(path):
                    text = path.read_text(encoding="utf-8")
            else:
                text = read_json(path).get("chat_template")
            if text is None and path.name != "chat_template.json":
                continue
            if not isinstance(text, str):
                raise UserError(f"{path}: chat_template is {truncate(text, 40)}, but it must be a string")
            plain = text.removesuffix("\n")
            is_published = plain == DEFAULT or hashlib.sha256(plain.encode()).hexdigest() in PUBLISHED
            return cls(DEFAULT if is_published else text, path, special_tokens, token_names)
        return cls(default, special_tokens=special_tokens, token_names=token_names)

    def render(self, messages: list[dict]) -> list[str]:
        """Render a prompt as a list of texts and control tokens.

        Joined, the pieces equal the string from apply_chat_template in transformers.

        Raises:
            UserError: the template fails, or drops an image, video or text; it may drop reasoning.
        """
        conversation, mark = self._marked(messages)
        pieces = join_text(self._cut(self._render(conversation, True), mark))
        shown_kinds = ["image" if piece is IMAGE else "video" for piece in pieces if piece is IMAGE or piece is VIDEO]
        message_kinds = [part_kind(part) for part in shown_parts_of(messages)]
        if shown_kinds != message_kinds:
            raise self._error(
                f"the template renders the images and videos {shown_kinds}, but the messages "
                f"contain {message_kinds}; use a template that renders all images and videos"
            )
        self._check_texts(messages, "".join(pieces), len(messages))
        return pieces

    def render_completion(self, messages: list[dict], turns: list[dict]) -> list[tuple[str, bool]]:
        """Render the turns of an answer, which follow a prompt.

        Returns:
            (text or control token, whether it has a loss) pairs; see messages.is_trained.
        Raises:
            RewrittenTurnsError: later turns change an earlier one.
            UserError: an assistant turn does not end with <|im_end|> and a newline, or text is missing.
        """
        given = [*messages, *turns]
        conversation, mark = self._marked(given)
        text = self._render(conversation, False)
        flagged = []
        end = None
        for turn_number in range(len(messages), len(conversation)):
            if conversation[turn_number]["role"] != "assistant":
                continue
            start = self._length(text, conversation[:turn_number], True)
            if end is not None:
                flagged += [(piece, False) for piece in self._cut(text[end:start], mark)]
            turn_end = self._length(text, conversation[: turn_number + 1], False)
            if not text[start:turn_end].endswith(f"{END}\n"):
                raise self._error(
                    f"SFT and training on pairs require a template that ends an assistant turn with {END} and a line "
                    "break; replace the template with the chat_template.jinja of the original Qwen model"
                )
            end = turn_end - 1  # without the newline after <|im_end|>, which the model does not generate
            is_written = is_trained(given[turn_number])
            flagged += [(piece, is_written) for piece in self._cut(text[start:end], mark)]
        self._check_texts(given, text.replace(mark, ""), len(messages))
        return join_flagged(flagged)

    def _check_texts(self, messages: list[dict], rendered: str, history: int):
        missing = find_missing_text(messages, rendered, history)
        if missing:
            raise self._error(
                f"the template does not render {missing}. Use a template that renders every text unchanged, or change "
                "this text in the row. Reasoning belongs in the content, as a single <think>...</think>"
            )

    def _length(self, text: str, messages: list[dict], add_generation_prompt: bool) -> int:
        beginning = self._render(messages, add_generation_prompt)
        if not text.startswith(beginning):
            raise self._error(
                f"the template renders the first {pluralize(len(messages), 'message')} differently if more messages "
                "follow, so the answer cannot be located; use a template that only appends text for further "
                "messages, or remove the reasoning from the answer if the prompt has none",
                RewrittenTurnsError,
            )
        return len(beginning)

    @cached_property
    def generation_prefix(self) -> str:
        """Opening tag at the end of every rendered prompt, such as "<think>\\n"; "" if none."""
        messages = [{"role": "user", "content": "?"}]
        prompt = self._render(messages, True).removeprefix(self._render(messages, False))
        _, tag, thought = prompt.rpartition("<think>")
        return tag + thought if tag and "</think>" not in thought else ""

    def with_tools(self, tools: list[dict]) -> "ChatTemplate":
        """Return a copy that lists `tools` (JSON schemas) in prompts."""
        if "in tools" not in self.text:
            raise self._error(
                "the template cannot render tools; set declare_tools = False in the class of the environment"
            )
        template = copy(self)
        template.tools = tools
        return template

    def _marked(self, messages: list[dict]) -> tuple[list[dict], str]:
        """Split control tokens in messages with a placeholder character, so they stay ordinary text."""
        check_messages(messages)
        messages = _as_json(messages)
        if "reasoning_content" in self.text and not THOUGHT_SPLIT.search(self.text):
            # move reasoning out of the content, because Qwen3.8's template would put an empty <think></think> before it
            messages = [_with_thought_apart(message) for message in messages]
        if "<function=" in self.text:  # Qwen3-Coder renders tool call arguments one by one, not as JSON
            for call in chain(*(message.get("tool_calls") or () for message in messages)):
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = parse_json(function["arguments"])
        all_text = json.dumps(messages, ensure_ascii=False) + self.text
        # placeholder: a Chinese character missing from the text, because templates may strip spaces or escape symbols
        mark = next(letter for letter in map(chr, range(0x20000, sys.maxunicode)) if letter not in all_text)
        return _as_json(messages, lambda text: self.literal_tokens.sub(rf"\g<0>{mark}", text)), mark

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            return self.template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=self.tools,
                documents=None,
                **self.token_names,
            )
        except Exception as error:  # templates may raise any exception
            raise self._error(error) from error

    def _cut(self, text: str, mark: str) -> list[str]:
        pieces = self.control.split(text)
        return [self.controls.get(piece) or piece.replace(mark, "") for piece in pieces]

    def _error(self, reason: str | Exception, kind: type[UserError] = UserError) -> UserError:
        if isinstance(reason, Exception):
            line = getattr(reason, "lineno", None)  # only syntax errors have a line number
            where = "" if line is None else f" in line {line}"
            reason = f"the template fails{where}: {type(reason).__name__}: {reason}".partition("\n")[0]
        return kind(f"{self.source}: chat template: {reason}")


def with_values(template: ChatTemplate, values: dict) -> ChatTemplate:
    """Return a copy of a chat template with variables set, such as {"enable_thinking": False}."""
    template = copy(template)
    template_names = jinja2.meta.find_undeclared_variables(SANDBOX.parse(template.text))
    template_names -= {*SANDBOX.globals, "messages", "tools", "add_generation_prompt"}
    for name in values:
        if name not in template_names:
            raise template._error(
                f"the template has no variable {name!r} (data.chat_template_kwargs); its variables are: "
                f"{', '.join(sorted(template_names)) or 'none'}{did_you_mean(name, template_names)}"
            )
    template.token_names = template.token_names | values
    return template


def find_missing_text(messages: list[dict], rendered: str, history: int = 0) -> str | None:
    """Describe the first message text missing from a rendered conversation; None if all texts are there.

    Templates may change whitespace, and drop reasoning from the first `history` messages. Arguments of tool calls are
    not compared.
    """
    compact = without_space(rendered)
    start = 0  # where to search for the next text, because texts must appear in order
    for number, message in enumerate(messages):
        texts = [part["text"] for part in content_parts(message) if part_kind(part) == "text"]
        if number >= history:
            texts = [message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str)] + texts
        elif message["role"] == "assistant" and "</think>" in text_of(message):
            continue
        calls = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
        for text in (*texts, *filter(None, calls)):
            words = without_space(text)
            place = compact.find(words, start)
            if place < 0:
                role = message["role"]
                return f"message {number} completely: {truncate(text, 60)} of the role {role!r} is missing or changed"
            start = place + len(words)
    return None


def without_space(text: str) -> str:
    return "".join(normalize("NFC", text).split())  # NFC, because tokenizers also normalize text


def _with_thought_apart(message: dict) -> dict:
    """Move <think>...</think> in an assistant message to reasoning_content."""
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    parts = content_parts(message)
    texts = list(takewhile(lambda part: part_kind(part) == "text", parts))
    thought = re.fullmatch(r"\s*<think>(.*?)</think>(.*)", text_of({"content": texts}), re.DOTALL)
    if thought is None:
        return message
    answer = [{"type": "text", "text": thought[2]}, *parts[len(texts) :]]
    return {**message, "reasoning_content": thought[1], "content": answer}


def _as_json(value: Plain, change: Callable[[str], str] = str) -> Plain:
    """Copy nested dicts and lists without None values, applying `change` to strings."""
    if isinstance(value, dict):
        return {change(key): _as_json(item, change) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_json(item, change) for item in value]
    if isinstance(value, str):
        return change(value)
    # pass other objects as their type name, because a template could call their methods
    return value if isinstance(value, int | float | None) else f"<{type(value).__name__}>"


def join_text(pieces: list[str]) -> list[str]:
    """Join adjacent strings, but not control tokens; drop empty strings."""
    joined = []
    for is_control, run in groupby(filter(None, pieces), lambda piece: isinstance(piece, SpecialToken)):
        neighbors = list(run)
        joined += neighbors if is_control else ["".join(neighbors)]
    return joined


def join_flagged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join adjacent (string, has loss) pairs with equal `has loss`."""
    joined = []
    for is_written, run in groupby((pair for pair in pieces if pair[0]), key=lambda pair: pair[1]):
        joined += [(text, is_written) for text in join_text([piece for piece, _ in run])]
    return joined
