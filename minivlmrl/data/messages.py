"""Build and validate the messages of a conversation, and place images and videos in them.

A message is {"role": "user", "content": ...}, as transformers' chat templates expect. The content
is text or a list of parts such as {"type": "text", "text": "What is it?"} and {"type": "image"}. A
message of the assistant may have "tool_calls" instead of content. A turn is a message.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

MARK = re.compile("<(image|video)>")  # marks where an image or video goes in a text
KINDS = ("image", "video")
MAX_MEDIA = 1000  # maximum number of images and videos in a row
# maximum number of characters in a message; `tokenizers` needs a second for these, and fails on ten
# million
MAX_TEXT = 2**20


def content_parts(message: dict) -> list[dict]:
    """Return the content of a message as a list of parts, also if it is a text or missing."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def part_kind(part: dict) -> str | None:
    """Return the kind of a part of a message: "image", "video" or "text"; None if it is unclear.

    Args:
        part: {"type": "image"}, or any part with the key image or image_url. Video parts follow the
            same rule. A text part is {"type": "text", "text": str}, where the type may be missing.
            A None counts as missing.
    """
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    for shown in KINDS:
        url = part.get(f"{shown}_url")
        if kind == shown or part.get(shown) is not None or url is not None:
            return shown
    return "text" if kind in (None, "text") and isinstance(part.get("text"), str) else None


def as_turns(text_or_turns: str | list[dict], role: str = "assistant") -> list[dict]:
    """Return a list of turns as it is, and convert a text to one turn of the given role."""
    if isinstance(text_or_turns, str):
        return [{"role": role, "content": text_or_turns}]
    return text_or_turns


def parts_of(turns: Iterable[dict]) -> list[dict]:
    """Return the parts of several turns. A turn with only tool_calls has no parts."""
    return [part for turn in turns for part in content_parts(turn)]


def shown_parts_of(turns: Iterable[dict]) -> list[dict]:
    """Return the image and video parts of several turns."""
    return [part for part in parts_of(turns) if part_kind(part) != "text"]


def text_of(message: dict) -> str:
    """Join the text of a message, without its images and videos."""
    return "".join(part.get("text") or "" for part in parts_of([message]))


def conversation(
    problem: str,
    media: Mapping[str, int],
    prompt_template: str = "{problem}",
    system_prompt: str | None = None,
) -> list[dict]:
    """Build the messages of a prompt that asks a question about images and videos.

    Example: ("What is it?", {"image": 1}) gives one user message, whose parts are the image and
    the text. In "Is <image> left of <image>?" image parts replace the marks.

    Args:
        media: "image", "video" -> number of images or videos that the prompt shows.
        prompt_template: text around the question, which replaces {problem}.
        system_prompt: text of a first message with the role system; None adds no message.
    """
    turns = as_turns(problem, "user")
    if prompt_template != "{problem}":
        turns = put_in_template(prompt_template, turns)
    turns = add_placeholders(turns, media)
    kinds = [part_kind(part) for part in shown_parts_of(turns)]
    check_counts(kinds, media)
    check_total(len(kinds))
    return add_system_prompt(turns, system_prompt)


def put_in_template(template: str, turns: list[dict]) -> list[dict]:
    """Insert the question, which is the text of the last user turn, into a template.

    The template has {problem} in place of the question. ValueError unless the last user turn has
    exactly one text part.
    """
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = list(content_parts(turns[last_user])) if last_user >= 0 else []
    text_indices = [i for i, part in enumerate(parts) if part_kind(part) == "text"]
    if len(text_indices) != 1:
        raise ValueError(
            "data.prompt_template is put around one text, but the last user turn of this prompt "
            f"has {len(text_indices)}; make it one"
        )
    question = parts[text_indices[0]]["text"]
    parts[text_indices[0]] = {"type": "text", "text": template.replace("{problem}", question)}
    return [*turns[:last_user], {**turns[last_user], "content": parts}, *turns[last_user + 1 :]]


def add_placeholders(turns: list[dict], media: Mapping[str, int]) -> list[dict]:
    """Replace <image> and <video> in texts by image and video parts.

    If the texts have neither, the parts are inserted before the first user text.

    Args:
        media: "image", "video" -> number of images or videos that come with the turns.
    """
    turns = [{**turn, "content": _cut_at_marks(content_parts(turn))} for turn in turns]
    if shown_parts_of(turns):
        return turns
    for turn in turns:
        if turn["role"] == "user":
            placeholders = []
            for kind in KINDS:
                placeholders += [{"type": kind} for _ in range(media.get(kind, 0))]
            turn["content"] = placeholders + turn["content"]
            break
    return turns


def _cut_at_marks(parts: list[dict]) -> list[dict]:
    """Split texts at <image> and <video>. "<image>What?" gives an empty text, an image, "What?"."""
    cut_parts = []
    for part in parts:
        for number, piece in enumerate(MARK.split(part["text"])):  # text, kind, text, ..., text
            is_kind = number % 2 == 1
            cut_parts.append({"type": piece} if is_kind else {"type": "text", "text": piece})
    return cut_parts


def add_system_prompt(messages: list[dict], system_prompt: str | None) -> list[dict]:
    """Prepend a system prompt, unless the conversation has one or the prompt is None."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def check_counts(kinds: Sequence[str | None], media: Mapping[str, int]):
    """Raise ValueError if the number of placeholders differs from the number of images or videos.

    Args:
        kinds: kind of each placeholder.
        media: "image", "video" -> number of images or videos.
    """
    for kind in KINDS:
        placeholders = kinds.count(kind)
        given = media.get(kind, 0)
        if placeholders != given:
            raise ValueError(
                f"the prompt has {placeholders} {kind} placeholder(s) but {given} {kind}(s) came "
                f"with it; put one where each {kind} belongs and name as many {kind}s"
            )


def check_total(num_media: int):
    """Raise ValueError if a row has too many images and videos."""
    if num_media > MAX_MEDIA:
        raise ValueError(f"{num_media} images and videos are over {MAX_MEDIA}; split the row")


def check_ends(turns: list[dict]):
    """Raise ValueError if turns do not begin and end with a turn of the assistant."""
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise ValueError(f"turns must begin and end with an assistant turn; their roles: {roles}")


def check_messages(messages: list[dict]):
    """Raise ValueError if a chat template cannot render a message."""
    for number, message in enumerate(messages):
        if not _has_fields(message):
            raise ValueError(
                f"message {number} needs a role, and content that is text or a list of parts: "
                f"{message!r:.80}"
            )
        for part in content_parts(message):
            if part_kind(part) is None:
                raise ValueError(
                    f"message {number} has a part that is not text, image or video: {part!r:.80}"
                )
        if len(text_of(message)) > MAX_TEXT:
            raise ValueError(f"message {number} has over {MAX_TEXT} characters; cut it")


def _has_fields(message: object) -> bool:
    """Return True if a message has a role, and content or tool calls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return False
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
            return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and len(calls) > 0)
