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
    turns = [_turn(i, message) for i, message in enumerate(messages)]
    if not messages or messages[0]["role"] != "system":
        turns.insert(0, _turn(0, {"role": "system", "content": DEFAULT_SYSTEM}))
    pieces = [piece for turn in turns for piece in turn]
    joined = _join_text([(piece, False) for piece in (*pieces, Control("<|im_start|>"), "assistant\n")])
    return [piece for piece, _ in joined]


def render_completion(turns: list[dict]) -> list[tuple[str, bool]]:
    r"""Lay out what follows a rendered prompt: an answer, or an answer and the rest of its conversation.

    Example, trained pieces in brackets: the turns assistant "two", user "And 2 + 2?", assistant "four" give, joined,
        [two<|im_end|>]\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]

    Args:
        turns: messages as in `render`, without images; the first and the last are the assistant's.
    Returns:
        Pieces as in `render`, each with a flag: trained, that is written by the assistant. These are the texts of its
        turns and the <|im_end|> that closes each. The last piece is an <|im_end|>, where generation stops too.
    Raises:
        ValueError: turns that do not begin and end with the assistant's, an image, or what `render` refuses.
    """
    laid_out = [_turn(i, turn) for i, turn in enumerate(turns)]
    roles = [turn["role"] for turn in turns]
    if not roles or {roles[0], roles[-1]} != {"assistant"}:
        raise ValueError(f"turns must begin and end with an assistant turn; their roles are {roles}")
    if any(piece is IMAGE for pieces in laid_out for piece in pieces):
        raise ValueError("there is an image in or after the assistant's first turn; images belong into the prompt")
    flagged = []
    for role, (start, name, *inside, newline) in zip(roles, laid_out, strict=True):  # inside ends with <|im_end|>
        trained = role == "assistant"
        flagged += [(start, False), (name, False), *((piece, trained) for piece in inside), (newline, False)]
    return _join_text(flagged[2:-1])  # the prompt has the first <|im_start|>assistant\n, and <|im_end|> is the end


def content_parts(message: dict) -> list[dict]:
    """Content of a message as a list of parts, also where it is text."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _turn(number: int, message: dict) -> list[str]:
    role, inside = (message.get("role"), content_parts(message)) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(inside, list):
        raise ValueError(f"message {number} needs a role, and content that is text or a list of parts: {message!r:.80}")
    pieces: list[str] = []
    for part in inside:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind == "image":
            pieces += [Control("<|vision_start|>"), IMAGE, Control("<|vision_end|>")]
        elif kind == "text" and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        else:
            raise ValueError(
                f"message {number} has a part of type {kind!r}; text and image are supported: {part!r:.80}"
            )
    return [Control("<|im_start|>"), f"{role}\n", *pieces, Control("<|im_end|>"), "\n"]


def _join_text(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    joined: list[tuple[str, bool]] = []
    for piece, trained in pieces:
        before, flag = joined[-1] if joined else (Control(), trained)
        # Text joins text of the same flag only: a token lies on one side of what is trained. The one such boundary
        # between texts is behind assistant\n, where generation begins a new token too.
        if flag == trained and not isinstance(piece, Control) and not isinstance(before, Control):
            joined[-1] = (before + piece, trained)
        elif piece:
            joined.append((piece, trained))
    return joined
