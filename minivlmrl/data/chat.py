"""The Qwen chat template: messages -> pieces of text and control tokens."""

DEFAULT_SYSTEM = "You are a helpful assistant."


class Control(str):
    """A control token, as opposed to text that happens to look like one."""


IMAGE = Control("<|image_pad|>")  # one for each image; the processor repeats it once per merged image token


def render(messages: list[dict]) -> list[str]:
    r"""Lay out a conversation for the model to continue as the assistant.

    Example: one user message with an image and "What?" gives, joined,
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: each {"role": str, "content": str or a list of parts {"type": "text", "text": str} and
            {"type": "image"}}. Without a leading system message the default one is put first.
    Returns:
        Pieces in order: each control token a Control, neighbouring text one str. So text that looks like a control
        token stays text, and tokenization meets no boundary that the template does not have.
    Raises:
        ValueError: a message without role or content, or a part that is neither text nor image.
    Source: chat_template.json of Qwen2.5-VL-Instruct with add_generation_prompt.
    """
    pieces: list[str] = []
    if not messages or messages[0].get("role") != "system":
        pieces += _turn("system", [DEFAULT_SYSTEM])
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if "role" not in message or not isinstance(parts, list):
            raise ValueError(f"message {i} needs a role, and content that is text or a list of parts: {message!r:.80}")
        inside: list[str] = []
        for part in parts:
            if part.get("type") == "image":
                inside += [Control("<|vision_start|>"), IMAGE, Control("<|vision_end|>")]
            elif part.get("type", "text") == "text" and isinstance(part.get("text"), str):
                inside.append(part["text"])
            else:
                raise ValueError(f"message {i} has a part of type {part.get('type')!r}; text and image are supported")
        pieces += _turn(message["role"], inside)
    return _join_text([*pieces, Control("<|im_start|>"), "assistant\n"])


def _turn(role: str, inside: list[str]) -> list[str]:
    return [Control("<|im_start|>"), f"{role}\n", *inside, Control("<|im_end|>"), "\n"]


def _join_text(pieces: list[str]) -> list[str]:
    joined: list[str] = []
    for piece in pieces:
        if joined and not isinstance(piece, Control) and not isinstance(joined[-1], Control):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined
