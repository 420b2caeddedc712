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
    if not messages or messages[0].get("role") != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    pieces: list[str] = []
    for i, message in enumerate(messages):
        if "role" not in message or "content" not in message:
            raise ValueError(f"message {i} needs 'role' and 'content', it has {sorted(message)}")
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        pieces += [Control("<|im_start|>"), message["role"] + "\n"]
        for part in parts:
            if part.get("type") == "image":
                pieces += [Control("<|vision_start|>"), IMAGE, Control("<|vision_end|>")]
            elif isinstance(part.get("text"), str):
                pieces.append(part["text"])
            else:
                raise ValueError(f"message {i} has a part of type {part.get('type')!r}; text and image are supported")
        pieces += [Control("<|im_end|>"), "\n"]
    return _join_text([*pieces, Control("<|im_start|>"), "assistant\n"])


def _join_text(pieces: list[str]) -> list[str]:
    joined: list[str] = []
    for piece in pieces:
        if joined and not isinstance(piece, Control) and not isinstance(joined[-1], Control):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined
