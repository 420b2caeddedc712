"""Messages -> text and control tokens: the chat template of Qwen2-VL and Qwen2.5-VL."""

from itertools import groupby
from pathlib import Path

from minivlmrl.data.messages import content_parts, part_kind


class Control(str):
    """A control token, as opposed to text that spells the same."""


START = Control("<|im_start|>")
END = Control("<|im_end|>")
# Either token ends a completion: END ends a turn, the other one a document.
ENDS = (END, Control("<|endoftext|>"))
# Placeholder of an image or a video. Code finds it by `is`, because text may spell the same.
IMAGE = Control("<|image_pad|>")
VIDEO = Control("<|video_pad|>")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def render(messages: list[dict]) -> list[str]:
    r"""Render a conversation that the assistant has to continue.

    Example: one user message with an image and "What?" gives, joined,
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n
    Processor.encode then repeats the id of <|image_pad|>, once for each token of the image.

    Args:
        messages: see messages.py. The default system message comes first unless they begin with a
            system message.
    Returns:
        Pieces in order. Each control token is a Control (the objects IMAGE and VIDEO themselves),
        and neighbouring text is one str. So text that spells a control token stays text, and the
        text has no boundary that the template does not have.
    Source: chat_template.json of Qwen2.5-VL-Instruct and Qwen2-VL-Instruct.
    """
    if not messages or messages[0]["role"] != "system":
        messages = [SYSTEM, *messages]
    pieces = [piece for message in messages for piece in layout_turn(message)]
    return join_text([*pieces, START, "assistant\n"])


def as_jinja(name: str = "qwen2_5_vl") -> str:
    """Read this template in Jinja, for transformers: a folder that has none gets it when it is saved."""
    return Path(__file__).with_name(f"{name}.jinja").read_text("utf-8").removesuffix("\n")


def layout_turn(message: dict) -> list[str]:
    """Lay out one message (ValueError: it needs another template, or a part is unclear)."""
    if message.get("content") is None or message.get("tool_calls"):
        raise ValueError(f"a message needs content and no tool_calls: {message!r:.80}")
    pieces = []
    for part in content_parts(message):
        kind = part_kind(part)
        if kind is None:
            raise ValueError(f"a part is not text, image or video: {part!r:.80}")
        if kind == "text":
            pieces.append(part["text"])
        else:
            placeholder = IMAGE if kind == "image" else VIDEO
            pieces += [Control("<|vision_start|>"), placeholder, Control("<|vision_end|>")]
    return [START, f"{message['role']}\n", *pieces, END, "\n"]


def render_completion(turns: list[dict]) -> list[tuple[str, bool]]:
    r"""Render the turns that follow a rendered prompt: an answer, or an answer and further turns.

    Example, with the pieces of the assistant in brackets: "two", user "And 2?", "four" give, joined,
        [two<|im_end|>]\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]

    Returns:
        Pieces as in `render`, each with a flag. It is True for what the assistant writes: the texts
        of its turns and the <|im_end|> that closes each. Generation stops after the last piece.
    """
    flagged = []
    for turn in turns:
        start, role, *inside, newline = layout_turn(turn)  # inside ends with <|im_end|>
        flagged += [(start, False), (role, False)]
        flagged += [(piece, turn["role"] == "assistant") for piece in inside]
        flagged.append((newline, False))
    return join_flagged(flagged[2:-1])  # the prompt ends with the first <|im_start|>assistant\n


def join_text(pieces: list[str]) -> list[str]:
    """Join neighbouring text, and leave out empty text."""
    joined = []
    for is_control, run in groupby(filter(None, pieces), lambda piece: isinstance(piece, Control)):
        neighbours = list(run)
        joined += neighbours if is_control else ["".join(neighbours)]
    return joined


def join_flagged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighbouring text with the same flag, so that no token is partly the assistant's."""
    joined_pieces = []
    filled_pieces = [pair for pair in pieces if pair[0]]
    for is_written, run in groupby(filled_pieces, key=lambda pair: pair[1]):
        texts = join_text([piece for piece, _ in run])
        joined_pieces += [(text, is_written) for text in texts]
    return joined_pieces
