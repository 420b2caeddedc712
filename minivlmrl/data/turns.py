"""Messages that a chat template cannot lay out, refused with their number."""

from minivlmrl.chat import content_parts, part_kind


def check_messages(messages: list[dict]):
    """Refuse what Qwen's default template cannot show: see check_message; tool_calls, which it would leave out."""
    for number, message in enumerate(messages):
        check_message(number, message)
        if message.get("tool_calls"):
            raise ValueError(
                f"message {number} has tool_calls, which Qwen's default template leaves out; put a template that lays "
                "them out into the model's folder as chat_template.jinja"
            )


def check_message(number: int, message: dict):
    """Refuse a message without role or content, or with a part that is neither text nor image nor video.

    A message that calls tools may do without content.
    """
    role = inside = None
    if isinstance(message, dict):
        role, inside = message.get("role"), content_parts(message)
        inside = [] if inside is None and message.get("tool_calls") else inside
    if not isinstance(role, str) or not isinstance(inside, list):
        raise ValueError(f"message {number} needs a role, and content that is text or a list of parts: {message!r:.80}")
    for part in inside:
        if part_kind(part) is None:
            shown = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            supported = "text, image and video are supported"
            raise ValueError(f"message {number} has a part of type {shown!r}; {supported}: {part!r:.80}")


def check_completion(turns: list[dict]):
    """Refuse turns that are no completion in Qwen's default template."""
    check_messages(turns)
    check_ends(turns)


def check_ends(turns: list[dict]):
    """Refuse turns that do not begin and end with the assistant's, or that have images or videos."""
    roles = [turn["role"] for turn in turns]
    if not roles or {roles[0], roles[-1]} != {"assistant"}:
        raise ValueError(f"turns must begin and end with an assistant turn; their roles are {roles}")
    for kind in (part_kind(part) for turn in turns for part in content_parts(turn) or ()):
        if kind != "text":
            one = f"an {kind}" if kind == "image" else f"a {kind}"
            raise ValueError(f"there is {one} in or after the assistant's first turn; {kind}s belong into the prompt")
