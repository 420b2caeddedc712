"""Messages -> control tokens and text: the chat template of Qwen2-VL and Qwen2.5-VL."""

from itertools import groupby


class Control(str):
    """A control token, as opposed to text that happens to look like one."""


START = Control("<|im_start|>")
END = Control("<|im_end|>")
ENDS = (END, Control("<|endoftext|>"))  # a completion ends with either: of a turn, of a document
# one for each image or video, found by `is`: text may spell the same
IMAGE = Control("<|image_pad|>")
VIDEO = Control("<|video_pad|>")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def render(messages: list[dict]) -> list[str]:
    r"""Lay out a conversation for the model to continue as the assistant.

    Example: one user message with an image and "What?" gives, joined,
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: each {"role": str, "content": str or a list of parts}, see part_kind. The
            default system message comes first unless they begin with one.
    Returns:
        Pieces in order: each control token a Control (the objects IMAGE and VIDEO themselves),
        neighbouring text one str. So text that spells a control token stays text, and there is
        no boundary in the text that the template does not have.
    Source: chat_template.json of Qwen2.5-VL-Instruct and Qwen2-VL-Instruct.
    """
    if not messages or messages[0]["role"] != "system":
        messages = [SYSTEM, *messages]
    pieces = [piece for message in messages for piece in layout_turn(message)]
    return join_text([*pieces, START, "assistant\n"])


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


def content_parts(message: dict) -> list[dict]:
    """Return the content of a message as a list of parts, also where it is text or none."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def part_kind(part: dict) -> str | None:
    """Tell what a part of a message shows: "image", "video" or "text"; None if that is unclear.

    Args:
        part: {"type": "image"}, or any part with the key image or image_url; the same for video;
            {"type": "text", "text": str}, where the type may be missing. A None counts as missing.
    """
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    for shown in ("image", "video"):
        url = part.get(f"{shown}_url")
        if kind == shown or part.get(shown) is not None or url is not None:
            return shown
    return "text" if kind in (None, "text") and isinstance(part.get("text"), str) else None


def join_text(pieces: list[str]) -> list[str]:
    """Join neighbouring text, and leave out empty text."""
    joined = []
    for is_control, run in groupby(filter(None, pieces), lambda piece: isinstance(piece, Control)):
        neighbours = list(run)
        joined += neighbours if is_control else ["".join(neighbours)]
    return joined
