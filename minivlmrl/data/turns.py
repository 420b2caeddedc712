"""Answers as tokens, for what is trained on demonstrations."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import torch
from PIL.Image import Image

from minivlmrl.chat import ENDS, IMAGE, Control, content_parts, join_text, layout_turn, part_kind
from minivlmrl.rows import Completion, Processor, shown_parts

VISION = ("<|vision_start|>", IMAGE, "<|vision_end|>")  # the environment's, whoever's turn it is
MAX_TEXT = 2**20  # characters of a message: a second for `tokenizers`, which fails on ten million


def encode_completion(processor: Processor, messages: list[dict], completion) -> Completion:
    """Turn an answer to a prompt (messages) into tokens, as the model has to write them.

    They are the text, then <|im_end|>; of several turns also what is between them. What the
    assistant's turns say is written; other turns, and pictures wherever they are, are forced.
    """
    check_ends(turns := as_turns(completion))
    turns = in_one_turn(turns, processor.tools)
    if processor.template is None:
        pieces = render_completion(turns)
    else:
        pieces = processor.template.render_completion(messages, turns)
    pieces = [pair for pair in without_answers(pieces, processor.tools) if pair[0]]
    if pieces[-1][0] not in ENDS:
        closes = f"closes a turn with {pieces[-1][0]!r}, at which no completion stops"
        raise ValueError(f"the chat template {closes}")
    images = [p["image"] for p in parts_of(turns) if isinstance(p.get("image"), Image)]
    shown = shown_parts(turns, images, ())
    pictures = [(image, *processor.image_processor(image, **options)) for image, options in shown]
    if len(pictures) != sum(p is IMAGE for p, _ in pieces):
        raise ValueError("the chat template has no place for a picture of the answer")
    encoded = processor.encode([p for p, _ in pieces], [grid for *_, grid in pictures])
    flags = [flag and not (isinstance(p, Control) and p in VISION) for p, flag in pieces]
    written = [flag for ids, flag in zip(encoded, flags, strict=True) for _ in ids]
    ids = torch.tensor([*chain(*encoded)])
    return Completion(ids, written=torch.tensor(written), pictures=pictures)


def in_one_turn(turns: list[dict], tools: Sequence[str]) -> list[dict]:
    """Put what answers a call in tags into the assistant's turn, as environments do."""
    joined = []
    answered = False
    tags = tuple(f"</{name}>" for name in tools)
    for turn in turns:
        parts = content_parts(turn)
        if turn["role"] == "tool" and joined and text_of(joined[-1]).rstrip().endswith(tags):
            parts = [part for part in parts if part.get("text") != ""]
            for i, part in enumerate(parts):
                if part_kind(part) == "text":
                    parts[i] = {"text": f"<result>{part['text']}</result>"}
        elif turn["role"] != "assistant" or not answered:
            joined, answered = [*joined, turn], False
            continue
        answered = turn["role"] == "tool"
        joined[-1] = joined[-1] | {"content": [*content_parts(joined[-1]), *parts]}
    return joined


def without_answers(
    pieces: list[tuple[str, bool]], tools: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Cut <result>...</result> after a call in tags from what the assistant writes: it is read."""
    ends = "|".join(["^", *(f"(?<=</{name}>)" for name in ("result", *tools))])
    answer = re.compile(rf"((?:{ends})\s*<result>.*?</result>)", re.DOTALL)
    for piece, flag in pieces:
        is_text = tools and not isinstance(piece, Control)
        for i, text in enumerate(answer.split(piece) if is_text else [piece]):
            yield text, flag and i % 2 == 0


def as_turns(answer: str | list[dict], role: str = "assistant") -> list[dict]:
    """Return turns, also where they are one text."""
    return [{"role": role, "content": answer}] if isinstance(answer, str) else answer


def parts_of(turns: list[dict]) -> list[dict]:
    """List the parts of several turns, none where one has tool_calls alone."""
    return [part for turn in turns for part in content_parts(turn)]


def shown_parts_of(turns: list[dict]) -> list[dict]:
    """List those that are an image or a video."""
    return [part for part in parts_of(turns) if part_kind(part) != "text"]


def text_of(message: dict) -> str:
    """Join the text of a message, without its images and videos."""
    return "".join(part.get("text") or "" for part in parts_of([message]))


def render_completion(turns: list[dict]) -> list[tuple[str, bool]]:
    r"""Lay out what follows a rendered prompt: an answer, or an answer and further turns.

    Example, the assistant's pieces in brackets: "two", user "And 2?", "four" give, joined,
        [two<|im_end|>]\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]

    Returns:
        Pieces as in chat.render, each with a flag: the assistant writes it, the texts of its turns
        and the <|im_end|> that closes each. The last piece is where generation stops.
    """
    flagged = []
    for turn in turns:
        start, role, *inside, newline = layout_turn(turn)  # inside ends with <|im_end|>
        inside = [(piece, turn["role"] == "assistant") for piece in inside]
        flagged += [(start, False), (role, False), *inside, (newline, False)]
    return join_flagged(flagged[2:-1])  # the prompt ends with the first <|im_start|>assistant\n


def join_flagged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighbouring text of one flag, no empty text: no token is half the assistant's."""
    runs = groupby(((piece, flag) for piece, flag in pieces if piece), key=lambda pair: pair[1])
    return [(piece, flag) for flag, run in runs for piece in join_text([piece for piece, _ in run])]


def check_ends(turns: list[dict]):
    """Refuse turns that do not begin and end with the assistant's."""
    if not turns or turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
        roles = [turn["role"] for turn in turns]
        raise ValueError(f"turns must begin and end with an assistant turn; their roles: {roles}")


def check_messages(messages: list[dict]):
    """Refuse a message that cannot be laid out."""
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        content = fields.get("content")
        calls = fields.get("tool_calls") or []
        has_content = isinstance(content, str | list) or (content is None and calls)
        called = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        called = called and all(isinstance(call.get("function", call), dict) for call in calls)
        if not has_content or not called or not isinstance(fields.get("role"), str):
            needed = "a role, and content that is text or a list of parts"
            raise ValueError(f"message {number} needs {needed}: {message!r:.80}")
        for part in parts_of([message]):
            if part_kind(part) is None:
                wrong = "a part that is not text, image or video"
                raise ValueError(f"message {number} has {wrong}: {part!r:.80}")
        if len(text_of(message)) > MAX_TEXT:
            raise ValueError(f"message {number} has over {MAX_TEXT} characters; cut it")
