"""Render messages as text and control tokens, with the Qwen2-VL and Qwen2.5-VL chat template."""

from itertools import groupby
from pathlib import Path

from minivlmrl.data.messages import THOUGHT_KEYS, content_parts, is_trained, part_kind
from minivlmrl.errors import UserError, truncate


class SpecialToken(str):
    """Control token such as <|im_end|>; a str with the same characters is ordinary text."""


class RewrittenTurnsError(UserError):
    """Raised if a chat template changes a turn when more turns follow, for example by dropping reasoning."""


START = SpecialToken("<|im_start|>")
END = SpecialToken("<|im_end|>")
# stop tokens: end of a turn, end of a document
ENDS = (END, SpecialToken("<|endoftext|>"))
# image and video placeholders, compared with `is`, because user text may contain the same characters
IMAGE = SpecialToken("<|image_pad|>")
VIDEO = SpecialToken("<|video_pad|>")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def render(messages: list[dict]) -> list[str]:
    r"""Render a prompt's messages, followed by the assistant header.

    Example: one user message with an image and "What?" is rendered as
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n
    Processor.encode then repeats the <|image_pad|> id once per image token.

    Args:
        messages: see data/messages.py; without a system message, the default one is added.
    Returns:
        Text and control tokens in order. Control tokens are SpecialToken; text with the same characters stays text.
        Neighboring strings are joined, because transformers also tokenizes the text between control tokens as a whole.
        Source: chat_template.json of Qwen2.5-VL-Instruct and Qwen2-VL-Instruct.
    """
    if not messages or messages[0]["role"] != "system":
        messages = [SYSTEM, *messages]
    pieces = [piece for message in messages for piece in render_message(message)]
    return join_text([*pieces, START, "assistant\n"])


def as_jinja(name: str = "qwen2_5_vl") -> str:
    """Load the Jinja version of Qwen's chat template, for saved model folders."""
    return Path(__file__).with_name(f"{name}.jinja").read_text("utf-8").removesuffix("\n")


def render_message(message: dict) -> list[str]:
    """Render one message as text and control tokens.

    Raises:
        UserError: tool_calls, no content, or a part other than text, image or video.
    """
    if message.get("content") is None or message.get("tool_calls"):
        raise UserError(
            "this chat template can only render messages that have content and no tool_calls, but "
            f"a message is {truncate(message, 80)}"
        )
    pieces = []
    for part in content_parts(message):
        kind = part_kind(part)
        if kind is None:
            raise UserError(f"a part of a message must be text, an image or a video, but it is {truncate(part, 80)}")
        if kind == "text":
            pieces.append(part["text"])
        else:
            placeholder = IMAGE if kind == "image" else VIDEO
            pieces += [SpecialToken("<|vision_start|>"), placeholder, SpecialToken("<|vision_end|>")]
    return [START, f"{message['role']}\n", *pieces, END, "\n"]


def render_completion(turns: list[dict]) -> list[tuple[str, bool]]:
    r"""Render a completion: an answer, possibly followed by more turns.

    Example: the answer "two", the user turn "And 2?" and the answer "four" are rendered as follows, with trained tokens
    in brackets:
        [two<|im_end|>]\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]

    Returns:
        (text or control token, trained) pairs; only assistant text and the following <|im_end|> are trained on.
    Raises:
        UserError: an answer has reasoning outside its content, for example in reasoning_content.
    """
    flagged = []
    for turn in turns:
        if any(turn.get(key) for key in THOUGHT_KEYS):
            raise UserError(
                f"the chat template does not render the reasoning of the answer {truncate(turn, 80)}; write "
                "it into the content, as <think>...</think>, or remove it"
            )
        start, role, *inside, newline = render_message(turn)
        flagged += [(start, False), (role, False)]
        flagged += [(piece, is_trained(turn)) for piece in inside]
        flagged.append((newline, False))
    return join_flagged(flagged[2:-1])  # drop <|im_start|>assistant\n, which the prompt contains


def join_text(pieces: list[str]) -> list[str]:
    """Join neighboring text, and drop empty strings."""
    joined = []
    for is_control, run in groupby(filter(None, pieces), lambda piece: isinstance(piece, SpecialToken)):
        neighbors = list(run)
        joined += neighbors if is_control else ["".join(neighbors)]
    return joined


def join_flagged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighboring text, but keep trained and untrained text apart, so that no token contains both."""
    joined = []
    for is_written, run in groupby((pair for pair in pieces if pair[0]), key=lambda pair: pair[1]):
        joined += [(text, is_written) for text in join_text([piece for piece, _ in run])]
    return joined
