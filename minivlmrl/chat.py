"""The chat template of Qwen2-VL and Qwen2.5-VL: messages -> pieces of text and control tokens."""

from collections import Counter

DEFAULT_SYSTEM = "You are a helpful assistant."
TOOLS_ADVICE = "put a template that lays them out into the model's folder as chat_template.jinja"


class Control(str):
    """A control token, as opposed to text that happens to look like one."""


IMAGE = Control(
    "<|image_pad|>"
)  # one for each image; the processor repeats it once per merged image token
VIDEO = Control("<|video_pad|>")  # one for each video, likewise


class QwenTemplate:
    """The template of this file, in the shape that a folder's own one has too: see template.ChatTemplate."""

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        add_vision_id: bool = False,
        tools: list[dict] | None = None,
    ) -> list[str]:
        """Lay out a conversation; see `render`.

        Raises:
            ValueError: tools, of which this template has no word; or what `render` refuses.
        """
        _refuse_tools(tools)
        return render(
            messages, add_generation_prompt=add_generation_prompt, add_vision_id=add_vision_id
        )

    def render_completion(
        self,
        messages: list[dict],
        turns: list[dict],
        *,
        add_vision_id: bool = False,
        tools: list[dict] | None = None,
    ) -> list[tuple[str, bool]]:
        """Lay out what follows a rendered prompt; see `render_completion`. In this template it is the same for all."""
        _refuse_tools(tools)
        return render_completion(turns)


def render(
    messages: list[dict], *, add_generation_prompt: bool = True, add_vision_id: bool = False
) -> list[str]:
    r"""Lay out a conversation for the model to continue as the assistant.

    Example: one user message with an image and "What?" gives, joined,
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: each {"role": str, "content": str or a list of parts}; see part_kind. What else a part holds (where
            its image is, how large it may be) is not looked at. Without a leading system message the default one is
            put first; an empty one stays empty.
        add_generation_prompt: end with <|im_start|>assistant\n.
        add_vision_id: "Picture 1: " before the first image, "Video 1: " before the first video, and so on through
            the whole conversation.
    Returns:
        Pieces in order: each control token a Control, those of images IMAGE and those of videos VIDEO themselves, and
        neighbouring text one str. So text that looks like a control token stays text, and tokenization meets no
        boundary that the template does not have.
    Raises:
        ValueError: a message without role or content, a part that is neither text nor image nor video, or tool_calls.
    Source: chat_template.json of Qwen2.5-VL-Instruct and Qwen2-VL-Instruct. It would leave out tool_calls and parts
        that it does not know without a word, and show a picture for {"type": "text", "text": "hi", "image": None}, as
        Arrow fills up the columns of mixed parts; a key that is None counts as missing here.
    """
    seen = Counter() if add_vision_id else None
    turns = [_turn(i, message, seen) for i, message in enumerate(messages)]
    if not messages or messages[0]["role"] != "system":
        turns.insert(0, _turn(0, {"role": "system", "content": DEFAULT_SYSTEM}))
    pieces = [piece for turn in turns for piece in turn]
    if add_generation_prompt:
        pieces += [Control("<|im_start|>"), "assistant\n"]
    return [piece for piece, _ in join_text([(piece, False) for piece in pieces])]


def render_completion(turns: list[dict]) -> list[tuple[str, bool]]:
    r"""Lay out what follows a rendered prompt: an answer, or an answer and the rest of its conversation.

    Example, trained pieces in brackets: the turns assistant "two", user "And 2 + 2?", assistant "four" give, joined,
        [two<|im_end|>]\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]

    Args:
        turns: messages as in `render`, without images and videos; the first and the last are the assistant's.
    Returns:
        Pieces as in `render`, each with a flag: trained, that is written by the assistant. These are the texts of its
        turns and the <|im_end|> that closes each. The last piece is an <|im_end|>, where generation stops too.
    Raises:
        ValueError: turns that do not begin and end with the assistant's, an image or a video, or what `render` refuses.
    """
    laid_out = [_turn(i, turn) for i, turn in enumerate(turns)]
    roles = check_turns(turns)
    flagged = []
    for role, (start, name, *inside, newline) in zip(
        roles, laid_out, strict=True
    ):  # inside ends with <|im_end|>
        trained = role == "assistant"
        flagged += [
            (start, False),
            (name, False),
            *((piece, trained) for piece in inside),
            (newline, False),
        ]
    return join_text(
        flagged[2:-1]
    )  # the prompt has the first <|im_start|>assistant\n, and <|im_end|> is the end


def check_message(number: int, message: dict):
    """Refuse what is no message. One that calls tools may do without content."""
    role, inside = (
        (message.get("role"), content_parts(message)) if isinstance(message, dict) else (None, None)
    )
    if inside is None and role is not None and message.get("tool_calls"):
        inside = []
    if not isinstance(role, str) or not isinstance(inside, list):
        raise ValueError(
            f"message {number} needs a role, and content that is text or a list of parts: {message!r:.80}"
        )
    for part in inside:
        if part_kind(part) is None:
            shown = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            raise ValueError(
                f"message {number} has a part of type {shown!r}; text, image and video are supported: {part!r:.80}"
            )


def check_turns(turns: list[dict]) -> list[str]:
    """Refuse turns that are no completion; return their roles."""
    roles = [turn["role"] for turn in turns]
    if not roles or {roles[0], roles[-1]} != {"assistant"}:
        raise ValueError(
            f"turns must begin and end with an assistant turn; their roles are {roles}"
        )
    for kind in (part_kind(part) for turn in turns for part in content_parts(turn) or ()):
        if kind in ("image", "video"):
            raise ValueError(
                f"there is {'an' if kind == 'image' else 'a'} {kind} in or after the assistant's first "
                f"turn; {kind}s belong into the prompt"
            )
    return roles


def content_parts(message: dict) -> list[dict]:
    """Content of a message as a list of parts, also where it is text."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def part_kind(part: dict) -> str | None:
    """Tell what a part of a message shows: "image", "video" or "text"; None if that cannot be said.

    Args:
        part: {"type": "image"} or any part with the key image or image_url; {"type": "video"} or one with the key
            video or video_url; {"type": "text", "text": str}, where the type may be missing. None is as good as
            missing.
    """
    if not isinstance(part, dict):
        return None
    kind, keys = part.get("type"), {key for key, value in part.items() if value is not None}
    if kind == "image" or keys & {"image", "image_url"}:
        return "image"
    if kind == "video" or keys & {"video", "video_url"}:
        return "video"
    return "text" if kind in (None, "text") and isinstance(part.get("text"), str) else None


def join_text(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Make one piece of neighbouring text with one flag, and leave out empty text."""
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


def _turn(number: int, message: dict, seen: Counter | None = None) -> list[str]:
    """Lay out one message; seen counts images and videos if they are to be numbered."""
    check_message(number, message)
    if message.get("tool_calls"):
        raise ValueError(
            f"message {number} has tool_calls, which Qwen's default template leaves out; {TOOLS_ADVICE}"
        )
    pieces: list[str] = []
    for part in content_parts(message):
        kind = part_kind(part)
        pieces += [part["text"]] if kind == "text" else _vision(kind, seen)
    return [Control("<|im_start|>"), f"{message['role']}\n", *pieces, Control("<|im_end|>"), "\n"]


def _vision(kind: str, seen: Counter | None) -> list[str]:
    label = []
    if seen is not None:
        seen[kind] += 1
        label = [f"{'Picture' if kind == 'image' else 'Video'} {seen[kind]}: "]
    return [
        *label,
        Control("<|vision_start|>"),
        IMAGE if kind == "image" else VIDEO,
        Control("<|vision_end|>"),
    ]


def _refuse_tools(tools: list[dict] | None):
    if tools:
        raise ValueError(f"Qwen's default template has no place for tools; {TOOLS_ADVICE}")
