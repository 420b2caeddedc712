"""Build and check conversations with images and videos.

A message (turn) is {"role": "user", "content": ...}, as in transformers. Content is a string, or a list of parts such
as {"type": "text", "text": "What is it?"} and {"type": "image"}. Assistant messages may have "tool_calls" instead.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from minivlmrl.errors import UserError, pluralize, truncate

MARK = re.compile("<(image|video)>")
KINDS = ("image", "video")
BASE64 = r"(/9j/|iVBORw0KGgo|UklGR|R0lGOD)[\w+/=\s]{32}"  # beginnings of JPEG, PNG, WebP and GIF files, in base64
ENCODED = re.compile(rf"data:(image|video)/|{BASE64}", re.IGNORECASE)
# message keys for reasoning outside "content"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
# message keys for turning the loss on (true or 1) or off (false or 0)
LOSS_KEYS = ("loss", "loss_mask", "weight", "train")


def content_parts(message: dict) -> list[dict]:
    """Return a message's content as a list of parts; a string becomes one part."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def part_kind(part: dict) -> str | None:
    """Return a message part's kind: "image", "video" or "text"; None if unclear.

    An image part has type "image" or a key image or image_url, and a video part type "video" or a key video or
    video_url. A text part has a key text, and type "text" or no type. Keys with value None count as missing.
    """
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind == "text" and len(part) == 2 and isinstance(part.get("text"), str):
        return "text"
    for shown in KINDS:
        if kind == shown or part.get(shown) is not None or part.get(f"{shown}_url") is not None:
            return shown
    return "text" if kind in (None, "text") and isinstance(part.get("text"), str) else None


def as_turns(text_or_turns: str | list[dict], role: str = "assistant") -> list[dict]:
    """Convert a string to a list with one turn; return a list unchanged."""
    if isinstance(text_or_turns, str):
        return [{"role": role, "content": text_or_turns}]
    return text_or_turns


def parts_of(turns: Iterable[dict]) -> list[dict]:
    return [part for turn in turns for part in content_parts(turn)]


def shown_parts_of(turns: Iterable[dict]) -> list[dict]:
    """Return all image and video parts in turns."""
    return [part for part in parts_of(turns) if part_kind(part) != "text"]


def text_of(message: dict) -> str:
    return "".join(part.get("text") or "" for part in content_parts(message))


def conversation(
    problem: str, media: Mapping[str, int], prompt_template: str = "{problem}", system_prompt: str | None = None
) -> list[dict]:
    """Build the messages for a question about images and videos.

    Example: "What is it?" about one image gives a user message with an image and a text part. In "Is <image> left of
    <image>?", image parts replace the tags.

    Args:
        media: number of images and videos, such as {"image": 2, "video": 1}.
    """
    turns = as_turns(problem, "user")
    if prompt_template != "{problem}":
        turns = put_in_template(prompt_template, turns)
    turns = add_placeholders(turns, media)
    check_counts([part_kind(part) for part in shown_parts_of(turns)], media)
    return add_system_prompt(turns, system_prompt)


def put_in_template(template: str, turns: list[dict]) -> list[dict]:
    """Insert the question, the last user text, into data.prompt_template.

    Raises:
        UserError: no or several text parts in the last user turn, or images in both template and turns.
    """
    if MARK.search(template) and shown_parts_of(turns):
        raise UserError(
            f"data.prompt_template {truncate(template, 60)} contains a tag for an image or video, but the "
            "prompt's parts already contain images or videos; remove the tag"
        )
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = list(content_parts(turns[last_user])) if last_user >= 0 else []
    text_indices = [i for i, part in enumerate(parts) if part_kind(part) == "text"]
    if len(text_indices) != 1:
        raise UserError(
            "data.prompt_template is inserted around one text, but the last user turn of this "
            f"prompt has {len(text_indices)} texts; give the question as a single text"
        )
    [index] = text_indices
    parts[index] = {"type": "text", "text": template.replace("{problem}", parts[index]["text"])}
    return [*turns[:last_user], {**turns[last_user], "content": parts}, *turns[last_user + 1 :]]


def add_placeholders(turns: list[dict], media: Mapping[str, int]) -> list[dict]:
    """Convert the tags <image> and <video> in text to image and video parts.

    Example: "<image>What?" becomes an empty text part, an image part and the text part "What?". Without tags, image
        and video parts are inserted at the start of the first user turn.
    """
    placed = []
    for turn in turns:
        parts = [
            {"type": piece} if number % 2 else {"type": "text", "text": piece}
            for part in content_parts(turn)
            # text and tag names alternate: "a<image>b" -> "a", "image", "b"
            for number, piece in enumerate(MARK.split(part["text"]))
        ]
        placed.append({**turn, "content": parts})
    first_user = next((turn for turn in placed if turn["role"] == "user"), None)
    if first_user and not shown_parts_of(placed):
        placeholders = [{"type": kind} for kind in KINDS for _ in range(media.get(kind, 0))]
        first_user["content"] = placeholders + first_user["content"]
    return placed


def add_system_prompt(messages: list[dict], system_prompt: str | None) -> list[dict]:
    """Prepend the system prompt, if given, unless the conversation already has one."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def check_counts(kinds: Sequence[str | None], media: Mapping[str, int]):
    """Raise UserError unless a prompt has one placeholder per image and video."""
    places = [kinds.count(kind) for kind in KINDS]
    numbers = [media.get(kind, 0) for kind in KINDS]
    if places != numbers:
        raise UserError(
            f"the prompt has {pluralize(places[0], 'placeholder')} for an image and "
            f"{pluralize(places[1], 'placeholder')} for a video, but {pluralize(numbers[0], 'image')} and "
            f"{pluralize(numbers[1], 'video')} were given. A placeholder "
            "is a part {type: image} without a file or, in a prompt without parts, a tag <image> or <video>. Add what "
            "is missing, or reword a tag that is only text"
        )


def check_ends(turns: list[dict]):
    """Raise UserError unless an answer begins and ends with an assistant turn."""
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise UserError(
            f"the turns of an answer must begin and end with an assistant turn, but their roles are {roles}"
        )


def is_trained(turn: dict) -> bool:
    """Return True if a turn has a loss: an assistant turn, unless a key such as "loss" is false."""
    return turn["role"] == "assistant" and all(turn.get(key) in (None, True) for key in LOSS_KEYS)


def check_keys(value: dict, known: Iterable[str], name: str):
    """Raise UserError for unknown keys, unless their value is None, "", [] or {}."""
    for key in value:
        if key not in known and value[key] not in (None, "", [], {}):
            raise UserError(
                f"{name} has the key {key!r} with {truncate(value[key], 40)}, which is not read; the keys are "
                f"{', '.join(known)}. Remove the key; an image is a part {{type: image, image: ...}}"
            )


def check_messages(messages: list[dict]):
    """Raise UserError for a message without role or content, or with unknown parts."""
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        content = fields.get("content")
        calls = fields.get("tool_calls") or []
        are_calls = isinstance(calls, list) and all(
            isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
        )
        if not are_calls:
            raise UserError(
                f"message {number}: tool_calls must be a list of calls such as {{function: {{name: zoom, arguments: "
                f"{{factor: 2}}}}}}, but it is {truncate(calls, 80)}"
            )
        says = isinstance(content, str | list) or (content is None and calls)
        if not (isinstance(fields.get("role"), str) and says):
            raise UserError(
                f"message {number} must have a role, and content that is a string or a list of "
                f"parts, but it is {truncate(message, 80)}"
            )
        for part in content_parts(message):
            if part_kind(part) is None:
                raise UserError(
                    f"message {number} has a part that is neither text, image nor video: {truncate(part, 80)}"
                )
