"""Check conversations, texts, answers and unread columns once, when a data file is opened."""

import ast
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from os.path import join
from pathlib import Path

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import read_value
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import ANSWERS, MEDIA, PROMPTS, TEXTS, VALUES, LayoutError, missing_column
from minivlmrl.data.media import Media, read_media
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
from minivlmrl.data.read_row import answer_image_parts, column_of, read_row
from minivlmrl.data.rows import Row
from minivlmrl.errors import UserError, error_context, pluralize, require, truncate
from minivlmrl.json_files import parse_json

TYPE_WORDS = {str: "a string", list: "a list of turns", str | list: "a string or a list of turns"}
TURN_KEYS = {  # {role: allowed keys in its turns}
    "system": ("role", "content", *LOSS_KEYS),
    "user": ("role", "content", *LOSS_KEYS),
    "assistant": ("role", "content", "tool_calls", *THOUGHT_KEYS, *LOSS_KEYS),
    "tool": ("role", "content", "name", "tool_call_id", *LOSS_KEYS),  # name and id of the answered tool call
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
# start of a conversation rendered by a chat template
RENDERED = re.compile(r"\s*<\|im_start\|>(system|user)\n")
# other projects' tags: ms-swift (names and boxes from column `objects`), Qwen-VL (image path in <img> tags), MMMU
# <image 1>, Phi <|image_1|>, LLaVA-OneVision <image_placeholder>, InternLM <ImageHere>
OBJECT_TAG = re.compile("<ref-object>|<bbox>")
PATH_TAG = re.compile("<img>.*?</img>")
OTHER_TAG = re.compile(r"<\|?\s*image[ _-]?(\d*)\s*\|?>|<image_?placeholder>|<imagehere>|\[img\]", re.IGNORECASE)
LIST = re.compile(r"""\s*\[\s*(\{\s*)?['"]""")  # start of a JSON or Python list with objects or strings


def checked_row(
    columns: dict, required: Collection[str], known: Collection[str], options: RowOptions, folder: Path
) -> tuple[Row, list[Media]]:
    """Check and read a row; see read_row.

    Args:
        required: columns that need a value; the prompt in any column, such as `messages`, counts as "problem".
        known: columns read by a stage, a reward or data.columns.
    Raises:
        UserError: invalid row.
        LayoutError: the row has another project's format.
    """
    check_columns(columns, known)
    check_prompts(columns, options.prompt_template)
    check_texts(columns)
    listed = [item for items in read_media(columns).values() for item in items]
    try:
        row, media = read_row(columns, options)
        check_answers(row, columns, media)
    except LayoutError:
        raise
    except ValueError:
        # check_unread raises a clearer error for misspelled columns
        check_unread(columns, listed, folder, known)
        raise
    check_required(row, required)
    shown = [*media, *(part["image"] for part in answer_image_parts(row))]
    if shown:  # data.columns may name columns with images that only rewards read
        known = {*known, *options.columns.values()}
    check_unread(columns, shown, folder, known)
    return row, media


def check_columns(columns: dict, known: Collection[str]):
    """Raise UserError for columns with invalid turns or a wrong type."""
    for name, value in columns.items():
        if value is None:
            continue
        if name in VALUES and (name != "label" or name in known):  # `label` may be anything unless a stage reads it
            read_value(VALUES[name], value, f"column {name!r}", json=True)
        if name == "solution":
            require(
                str(value).count("<answer>") < 2, "column 'solution'", value, "a string with at most one <answer> tag"
            )
        if name in ("tools", "functions") and name not in known:
            # tools such as {"type": "function", "function": {...}}
            items = literal_list(value) if isinstance(value, str) else value
            keys = {"function", "parameters", "input_schema"}
            if isinstance(items, list) and any(isinstance(item, dict) and keys & item.keys() for item in items):
                raise UserError(
                    f"column {name!r} declares tools that the prompt would not show: {truncate(value, 60)}. Remove the "
                    f"column, or keep it for a reward with data.columns: {{{name}: {name}}}"
                )
        if name in TEXTS:
            if not isinstance(value, TEXTS[name]):
                kind = LayoutError if isinstance(value, str | dict) else UserError
                raise kind(f"column {name!r} is {truncate(value, 60)}, but it must be {TYPE_WORDS[TEXTS[name]]}")
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
        raise LayoutError(
            f"the row has both columns {given[0]!r} and {given[1]!r}, but only one of them is allowed; remove the other"
        )


def check_turns(turns: list[dict], is_prompt: bool = False):
    """Raise UserError for an invalid turn, or a key or image that would be ignored."""
    try:
        check_messages(turns)
    except ValueError as error:  # `minivlmrl convert` may be able to convert these messages
        raise LayoutError(error) from error
    roles = [turn["role"] for turn in turns]
    if not turns or not TURN_KEYS.keys() >= set(roles):
        raise LayoutError(
            f"there must be at least one turn, and the roles must be {', '.join(TURN_KEYS)}, but the roles are "
            f"{truncate(roles, 80)}"
        )
    for number, turn in enumerate(turns):
        check_turn(turn, f"message {number}", can_be_trained=turn["role"] == "assistant" and not is_prompt)
    indices = [part["index"] for part in shown_parts_of(turns) if part.get("index") is not None]
    if any(first >= second for first, second in pairwise(indices)):
        raise UserError(f"the parts show the images {indices}, but each image must be shown once, in order")


def check_turn(turn: dict, name: str, can_be_trained: bool):
    """Raise UserError if a turn has unknown keys, contradictory loss keys, or content that the model would not see."""
    try:
        check_keys(turn, TURN_KEYS[turn["role"]], f"{name} of the role {turn['role']}")
    except ValueError as error:  # `minivlmrl convert` removes unknown keys
        raise LayoutError(error) from error
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
    if encoded := ENCODED.match(text_of(turn)):
        raise UserError(
            f"a text seems to contain an image that the model would not see: {truncate(encoded[0], 60)}. Write it as a "
            "part {type: image, image: ...}"
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
    is_plain = isinstance(called, str) and json.dumps(called, ensure_ascii=False) == f'"{called}"'
    require(
        is_plain and called.strip() != "",
        f"the function name in {name}",
        called,
        "a string without quotes, backslashes and line breaks",
    )
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
    """Raise LayoutError for a list or conversation written as a string, or tags of other projects, such as <img>."""
    texts = {name: columns[name] for name in TEXTS if columns.get(name) is not None}
    for name in (*texts, *MEDIA):
        value = columns.get(name)
        if not isinstance(value, str):
            continue
        if RENDERED.match(value):
            raise LayoutError(f"column {name!r} is a conversation that a chat template has already rendered")
        if is_list_text(value, name):
            raise LayoutError(
                f"column {name!r} is a list written as a string, in JSON or Python: {truncate(value, 60)}"
            )
    all_text = repr(texts)
    if columns.get("objects") and (tag := OBJECT_TAG.search(all_text)):
        raise LayoutError(f"the texts contain {tag[0]}, which ms-swift replaces with `objects`")
    has_media = any(columns.get(name) not in (None, "", []) for name in MEDIA)
    if not has_media and PATH_TAG.search(all_text):
        raise LayoutError("the texts contain <img>, which Qwen-VL uses to name its images")
    if has_media and "<image>" not in all_text and (tag := OTHER_TAG.search(all_text)):
        raise LayoutError(f"the texts contain {tag[0]}, but the tag for an image is <image>")


def literal_list(text: str) -> list | None:
    """Parse a JSON or Python list with objects or strings; return None for other strings."""
    value = parse_literal(text) if LIST.match(text) else None
    return value if isinstance(value, list) else None


def parse_literal(text: str) -> Plain:
    """Parse JSON or a Python literal; return None if neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def is_list_text(text: str, column: str) -> bool:
    """Check whether a string contains a list of turns or images, or a list with one question: '["What is it?"]'."""
    items = literal_list(text)
    if column in MEDIA:
        return items is not None
    if not items:
        return False
    if len(items) == 1 and isinstance(items[0], str):
        return column in PROMPTS
    pairs = ({"role", "content"}, {"from", "value"})
    return all(isinstance(item, dict) and any(keys <= item.keys() for keys in pairs) for item in items)


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
            try:
                check_ends(turns)
            except ValueError as error:  # the answer may be a whole conversation, for `minivlmrl convert`
                raise LayoutError(error) from error
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


def check_unread(columns: dict, media: Sequence[Media], folder: Path, known: Collection[str]):
    """Raise UserError if a column contains an image or video outside the prompt and answers.

    Nested values are searched for paths, URLs, data URIs, base64 strings and bytes.

    Args:
        media: images and videos in the prompt and answers.
        known: columns read by stages or rewards, which need no check.
    """
    sources = [source for item in media for source in item.sources]
    for name in columns.keys() - {*known, *MEDIA, *TEXTS, "solution", "system"}:
        for item in leaves(columns[name]):
            kind = media_kind(item, folder)
            if not media and item and MEDIA_NAME.fullmatch(name.lower()):
                kind = kind or ("video" if "video" in name.lower() else "image")
            if not kind or any(_is_source(item, source) for source in sources):
                continue
            article = "an" if kind == "image" else "a"
            shown = pluralize(len(item), "byte") if isinstance(item, bytes) else truncate(item, 60)
            taken = [ours for ours, of_kind in MEDIA.items() if of_kind == kind and columns.get(ours)]
            target = f"{kind}s" if isinstance(columns[name], list) else kind
            cure = f"Add it to a list in {kind}s" if taken else f"Rename it with data.columns: {{{name}: {target}}}"
            raise UserError(
                f"column {name!r} seems to contain {article} {kind} that the model would not see: {shown}. {cure}, "
                f"remove it, or keep it for a reward with data.columns: {{{name}: {name}}}."
            )


def leaves(value: Plain) -> Iterator[str | bytes]:
    if isinstance(value, dict):
        # {"bytes": ..., "path": ...} is one image (Hugging Face)
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


def _is_source(item: str | bytes, source: str | bytes) -> bool:
    """Return True if two paths may be the same file, such as "/cats/1.png" and "1.png"."""
    if source in (item, f"data:;base64,{item!s}"):
        return True
    if isinstance(item, bytes) or isinstance(source, bytes):
        return False
    path, other = (re.split(r"[\\/]+", text.removeprefix("./")) for text in (item, source))
    length = min(len(path), len(other))
    return path[-length:] == other[-length:]
