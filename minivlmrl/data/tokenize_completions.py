"""Answers as tokens, for what is trained on demonstrations."""

import re
from collections.abc import Sequence
from itertools import groupby

import torch
from PIL.Image import Image

from minivlmrl.data.chat_template import (
    IMAGE,
    Control,
    content_parts,
    join_text,
    layout_turn,
    part_kind,
)
from minivlmrl.data.rows import Completion, Processor, shown_parts

VISION = ("<|vision_start|>", IMAGE, "<|vision_end|>")  # never written by the model
MAX_TEXT = 2**20  # characters of a message: a second for `tokenizers`, which fails on ten million


def encode_completion(processor: Processor, messages: list[dict], completion) -> Completion:
    """Turn an answer to a prompt (messages) into tokens, as the model has to write them.

    They are the text, then <|im_end|>; of several turns also what is between them. What the
    assistant's turns say is written; other turns, and pictures wherever they are, are forced.
    """
    turns = as_turns(completion)
    check_ends(turns)
    turns = in_one_turn(turns, processor.tools)
    if processor.template is None:
        pieces = render_completion(turns)
    else:
        pieces = processor.template.render_completion(messages, turns)
    pieces = without_answers(pieces, processor.tools)
    images = [part["image"] for part in parts_of(turns) if isinstance(part.get("image"), Image)]
    pictures = []
    for image, options in shown_parts(turns, images, ()):
        pictures.append((image, *processor.image_processor(image, **options)))
    if len(pictures) != sum(piece is IMAGE for piece, _ in pieces):
        raise ValueError("the chat template has no place for a picture of the answer")
    grids = [grid for *_, grid in pictures]
    encoded_pieces = processor.encode([piece for piece, _ in pieces], grids)
    ids = []
    written = []
    for piece_ids, (piece, is_written) in zip(encoded_pieces, pieces, strict=True):
        is_vision = isinstance(piece, Control) and piece in VISION
        ids += piece_ids
        written += [is_written and not is_vision] * len(piece_ids)
    return Completion(torch.tensor(ids), written=torch.tensor(written), pictures=pictures)


def in_one_turn(turns: list[dict], tools: Sequence[str]) -> list[dict]:
    """Put what answers a call in tags into the assistant's turn, as environments do."""
    joined = []
    is_answered = False  # the last turn that was joined ends with the answer of a tool
    closing_tags = tuple(f"</{name}>" for name in tools)
    for turn in turns:
        parts = content_parts(turn)
        goes_on = is_answered and turn["role"] == "assistant"
        is_answered = False
        if turn["role"] == "tool" and joined:
            is_answered = text_of(joined[-1]).rstrip().endswith(closing_tags)
        if is_answered:
            parts = [_as_result(part) for part in parts if part.get("text") != ""]
        if is_answered or goes_on:
            joined[-1] = joined[-1] | {"content": [*content_parts(joined[-1]), *parts]}
        else:
            joined.append(turn)
    return joined


def _as_result(part: dict) -> dict:
    if part_kind(part) != "text":
        return part
    return {"text": f"<result>{part['text']}</result>"}


def without_answers(pieces: list[tuple[str, bool]], tools: Sequence[str]) -> list[tuple[str, bool]]:
    """Flag <result>...</result> after a call in tags as not written: the assistant reads it."""
    tag_ends = "|".join(["^", *(f"(?<=</{name}>)" for name in ("result", *tools))])
    answer = re.compile(rf"((?:{tag_ends})\s*<result>.*?</result>)", re.DOTALL)
    cut_pieces = []
    for piece, is_written in pieces:
        is_text = tools and not isinstance(piece, Control)
        for i, text in enumerate(answer.split(piece) if is_text else [piece]):
            if text:  # every second one is the answer of a tool
                cut_pieces.append((text, is_written and i % 2 == 0))
    return cut_pieces


def as_turns(answer: str | list[dict], role: str = "assistant") -> list[dict]:
    """Return turns, also where they are one text."""
    return [{"role": role, "content": answer}] if isinstance(answer, str) else answer


def parts_of(turns: list[dict]) -> list[dict]:
    """List the parts of several turns, none where one has tool_calls alone."""
    return [part for turn in turns for part in content_parts(turn)]


def shown_parts_of(turns: list[dict]) -> list[dict]:
    """List the parts of several turns that are an image or a video."""
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
        flagged += [(start, False), (role, False)]
        flagged += [(piece, turn["role"] == "assistant") for piece in inside]
        flagged.append((newline, False))
    return join_flagged(flagged[2:-1])  # the prompt ends with the first <|im_start|>assistant\n


def join_flagged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighbouring text of one flag, so that no token is half the assistant's; none is empty."""
    joined_pieces = []
    filled_pieces = [pair for pair in pieces if pair[0]]
    for is_written, run in groupby(filled_pieces, key=lambda pair: pair[1]):
        texts = join_text([piece for piece, _ in run])
        joined_pieces += [(text, is_written) for text in texts]
    return joined_pieces


def check_ends(turns: list[dict]):
    """Refuse turns that do not begin and end with the assistant's."""
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise ValueError(f"turns must begin and end with an assistant turn; their roles: {roles}")


def check_messages(messages: list[dict]):
    """Refuse a message that cannot be laid out."""
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
    """Tell whether a message has a role, and content, or calls of tools instead."""
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
