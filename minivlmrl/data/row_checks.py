"""Check conversations, texts, answers and unread columns once, when a data file is opened."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from os.path import join
from pathlib import Path

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import read_value
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import ANSWERS, MEDIA, PROMPTS, TEXTS, VALUES, missing_column
from minivlmrl.data.media import Media
from minivlmrl.data.messages import (
    ENCODED,
    LOSS_KEYS,
    THOUGHT_KEYS,
    as_turns,
    check_ends,
    check_keys,
    check_messages,
    content_parts,
    is_trained,
    part_kind,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.read_row import column_of, read_row
from minivlmrl.data.rows import Row
from minivlmrl.errors import UserError, error_context, require, truncate
from minivlmrl.json_files import parse_json

TYPE_WORDS = {str: "a string", list: "a list of turns", str | list: "a string or a list of turns"}
TURN_KEYS = {  # {role: allowed keys in its turns}
    "system": ("role", "content", *LOSS_KEYS),
    "user": ("role", "content", *LOSS_KEYS),
    "assistant": ("role", "content", "tool_calls", *THOUGHT_KEYS, *LOSS_KEYS),
    "tool": ("role", "content", "name", "tool_call_id", *LOSS_KEYS),  # name and id of the tool call with this result
}
CALL_KEYS = ("id", "type", "index", "function", "name", "arguments")
# typical names of image and video columns
MEDIA_NAME = re.compile(
    r"(img|image|pic|picture|photo|video|media)s?(_?(path|file|name|url|uri|src|bytes)s?)*"
    r"|file_?names?"
)
# media file path or URL, with an optional query string
FILE_NAMES = {
    kind: re.compile(rf"[^\n\t]{{1,400}}\.({suffixes})(\?\S*)?", re.IGNORECASE)
    for kind, suffixes in {
        "image": "png|jpe?g|jfif|webp|bmp|gif|tiff?|heic|heif|avif|jp2|ppm",
        "video": "mp4|webm|mov|avi|mkv|m4v|mpe?g",
    }.items()
}
# first bytes of JPEG, PNG, GIF, WebP, BMP and TIFF files
MAGIC = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|RIFF.{4}WEBP|BM.{4}\0{4}|II\*\0|MM\0\*", re.DOTALL)
# start of a conversation written as one string: rendered by a chat template, or a list of turns
TURNS = re.compile(r"""\s*(<\|im_start\|>(system|user)\n|\[\s*\{\s*['"](role|content|from|value)['"])""")
# image and box tags of other projects: Qwen-VL's <img>, MMMU's <image 1>, Phi's <|image_1|>, ms-swift's <bbox>
OTHER_TAG = re.compile(
    r"(?-i:(?!<image>))<\|?\s*image[ _-]?\d*\s*\|?>|<image_?placeholder>|<imagehere>|<img>.*?</img>|<ref-object>"
    r"|<bbox>",
    re.IGNORECASE,
)


def checked_row(
    columns: dict, required: Collection[str], known: Collection[str], options: RowOptions
) -> tuple[Row, list[Media]]:
    """Check and read a row; see read_row.

    Args:
        required: columns that need a value; "problem" stands for the prompt, in any column such as `messages`.
        known: columns read by a training stage, a reward or data.columns.
    Raises:
        UserError: invalid row.
    """
    check_columns(columns, known)
    check_prompts(columns, options.prompt_template)
    check_texts(columns)
    row, media = read_row(columns, options)
    check_answers(row, columns, media)
    check_required(row, required)
    return row, media


def check_columns(columns: dict, known: Collection[str]):
    """Raise UserError for columns with invalid turns or a wrong type."""
    for name, value in columns.items():
        if value is None:
            continue
        if name in VALUES and (name != "label" or name in known):  # `label` may be anything unless a stage reads it
            read_value(VALUES[name], value, f"column {name!r}", json=True)
        if name in TEXTS:
            if not isinstance(value, TEXTS[name]):
                raise UserError(f"column {name!r} is {truncate(value, 60)}, but it must be {TYPE_WORDS[TEXTS[name]]}")
            with error_context(f"column {name!r}"):
                check_turns(as_turns(value), name == "prompt")


def check_prompts(columns: dict, template: str):
    """Raise UserError for a row with two prompts, or with a prompt if data.prompt_template contains no {problem}."""
    given = [name for name in PROMPTS if columns.get(name) is not None]
    if "{problem}" not in template:
        require(
            not given,
            "data.prompt_template",
            template,
            f"a string that contains {{problem}}, because the row has {given}",
        )
    # column `messages` may contain prompt and answer
    is_answered = given == ["messages"] and columns["messages"][-1]["role"] == "assistant"
    if is_answered and columns.get("completion") is not None:
        given.append("completion")
    if len(given) > 1:
        raise UserError(
            f"the row has both columns {given[0]!r} and {given[1]!r}, but only one of them is allowed; remove the other"
        )


def check_turns(turns: list[dict], is_prompt: bool = False):
    """Raise UserError for an invalid turn, or a key or image that would be ignored."""
    check_messages(turns)
    roles = [turn["role"] for turn in turns]
    if not turns or not TURN_KEYS.keys() >= set(roles):
        raise UserError(
            f"there must be at least one turn, and the roles must be {', '.join(TURN_KEYS)}, but the roles are "
            f"{truncate(roles, 80)}"
        )
    for number, turn in enumerate(turns):
        check_turn(turn, f"message {number}", can_be_trained=turn["role"] == "assistant" and not is_prompt)


def check_turn(turn: dict, name: str, can_be_trained: bool):
    """Raise UserError if a turn has unknown keys, contradictory loss keys, or content that the model would not see."""
    check_keys(turn, TURN_KEYS[turn["role"]], f"{name} of the role {turn['role']}")
    flags = {key: turn[key] for key in LOSS_KEYS if turn.get(key) is not None}
    is_mixed = any(flags.values()) and not all(flags.values())
    if is_mixed or any(flag not in (False, True) for flag in flags.values()):
        raise UserError(
            f"{name}: {truncate(flags, 80)} must be true, 1, false or 0, and must not contradict each other"
        )
    if any(flags.values()) and not can_be_trained:
        raise UserError(
            f"{name}: {flags} asks for a loss on this turn, but only assistant turns in the answer are trained; "
            "remove the key, or move the turn into the answer"
        )
    for part in content_parts(turn):
        kind = part_kind(part)
        if kind == "text":
            check_keys(part, ("type", "text"), f"a text of {name}")
        elif part.get("text") or part.get("type") not in (None, kind, f"{kind}_url"):
            raise UserError(f"{name} has a part of two kinds: {truncate(part, 80)}; write two parts")
    for call in turn.get("tool_calls") or []:
        check_call(call, name)


def check_call(call: dict, turn_name: str):
    """Raise UserError for a tool call with unknown keys, or one that templates render as invalid JSON."""
    name = f"a tool call of {turn_name}"
    check_keys(call, CALL_KEYS, name)
    function = call.get("function", call)
    if function is not call:
        check_keys(function, ("name", "arguments"), f"the function of {name}")
    called = function.get("name")
    arguments = function.get("arguments")
    # chat templates do not escape quotes in function names
    is_name = isinstance(called, str) and re.fullmatch(r"[\w.-]+", called) is not None
    require(is_name, f"the function name in {name}", called, "letters, digits, _, . and -")
    if isinstance(arguments, str):
        with error_context(f"the arguments in {name}, {truncate(arguments, 40)}"):
            arguments = parse_json(arguments)
    require(
        isinstance(arguments, dict | None),
        f"the value of arguments in {name}",
        arguments,
        "an object or its JSON text, {} for a function without arguments",
    )


def check_texts(columns: dict):
    """Raise UserError for a conversation written as a string, or an image tag of another project, such as <img>."""
    texts = {name: columns[name] for name in TEXTS if columns.get(name) is not None}
    for name, value in texts.items():
        if isinstance(value, str) and TURNS.match(value):
            raise UserError(
                f"column {name!r} is a conversation written as one string, {truncate(value, 60)}; write a list of turns"
            )
    if tag := OTHER_TAG.search(repr(texts)):
        raise UserError(
            f"the texts contain {tag[0]}, but the tags for an image and a video are <image> and <video>, and a box is "
            "written as numbers"
        )


def check_answers(row: Row, columns: dict, media: Sequence[Media]):
    """Raise UserError for an empty question or answer, an answer without loss, or identical answers in a pair."""
    place = next((name for name in PROMPTS if columns.get(name) is not None), "chosen")
    asked = [turn for turn in as_turns(columns.get(place) or "", "user") if turn["role"] == "user"]
    if place in PROMPTS and not media and not any(text_of(turn).strip() for turn in asked):
        raise UserError(
            f"column {place!r}: the question is empty or blank; write its text, add an image or remove the row"
        )
    contents = {}  # {answer column: turns}, with the text parts of each turn joined
    for name in ANSWERS:
        answer = getattr(row, name)
        if answer is None:
            continue
        turns = as_turns(answer)
        contents[name] = [{**turn, "content": (text_of(turn), shown_parts_of([turn]))} for turn in turns]
        with error_context(f"column {column_of(name, place)!r}"):
            check_ends(turns)
            for turn in turns:
                if turn["role"] == "assistant" and not text_of(turn).strip() and not turn.get("tool_calls"):
                    raise UserError("an answer is empty or blank; add its text or remove the row")
            if not any(map(is_trained, turns)):
                raise UserError(
                    f"every assistant turn of the answer has {' or '.join(LOSS_KEYS)}: false; remove this key"
                )
    if "chosen" in contents and contents["chosen"] == contents.get("rejected"):
        raise UserError("the columns 'chosen' and 'rejected' are identical; remove the row")
    if row.messages and row.messages[-1]["role"] == "assistant":
        raise UserError(
            f"column {place!r}: the prompt ends with an assistant turn; move this turn into the column of the answer"
        )


def check_required(row: Row, required: Collection[str]):
    for name in required:
        if name == "problem" or row.columns.get(name) is not None or getattr(row, name, None) is not None:
            continue
        cure = f"Rename a column with data.columns: {{YOURS: {name}}}"
        if name not in (*ANSWERS, "label", "solution"):
            cure += (
                f". A reward function has the argument {name!r}; docs/rewards.md lists the arguments that are not "
                "columns of the rows"
            )
        raise missing_column(name, row.columns, cure)


def check_unread(columns: dict, folder: Path, known: Collection[str], shows_media: bool):
    """Raise UserError if an unread column seems to contain tools, images or videos, which the model would not see.

    Nested values are searched for paths, URLs, data URIs, base64 strings and bytes.

    Args:
        known: columns read by training stages or rewards, which need no check.
    """
    for name in columns.keys() - {*known, *MEDIA, *TEXTS, "solution", "system"}:
        if name in ("tools", "functions") and "parameters" in repr(columns[name]):
            raise UserError(
                f"column {name!r} declares tools that the prompt would not show: {truncate(columns[name], 60)}. Remove "
                f"the column, or keep it for a reward with data.columns: {{{name}: {name}}}"
            )
        for item in () if shows_media else leaves(columns[name]):
            if media_kind(item, folder) or (item and MEDIA_NAME.fullmatch(name.lower())):
                raise UserError(
                    f"column {name!r} seems to contain an image or video that the model would not see: "
                    f"{truncate(item, 60)}. Rename it with data.columns: {{{name}: image}} (or images, video, videos), "
                    f"remove it, or keep it for a reward with data.columns: {{{name}: {name}}}."
                )


def leaves(value: Plain) -> Iterator[str | bytes]:
    if isinstance(value, dict):
        # Hugging Face stores one image as {"bytes": ..., "path": ...}
        value = [value["bytes"]] if isinstance(value.get("bytes"), str | bytes) else [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str | bytes):
        yield value


def media_kind(item: str | bytes, folder: Path) -> str | None:
    """Return "image" or "video" for a media file or file name, else None."""
    if isinstance(item, bytes):
        return "image" if MAGIC.match(item) else None
    if encoded := ENCODED.match(item):
        return encoded[1] if encoded[1] in FILE_NAMES else "image"
    for kind, pattern in FILE_NAMES.items():
        # "Describe cat.png" is a question, so a text with spaces is a file name only if the file exists
        if pattern.fullmatch(item) and (" " not in item or os.path.isfile(join(folder, item))):
            return kind
    return None
