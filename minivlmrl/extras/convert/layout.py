"""Recognize question, answer and picture columns by their names, and rename them to minivlmrl's columns."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os.path import isfile, join
from pathlib import Path

from minivlmrl.config.types import Plain
from minivlmrl.data.columns import MEDIA, TEXTS
from minivlmrl.data.messages import ENCODED
from minivlmrl.data.row_checks import TURN_KEYS, leaves, media_kind
from minivlmrl.errors import UserError, truncate

QUESTIONS = ("problem", "prompt", "messages", "conversations", "conversation", "question", "query", "instruction")
ANSWER = re.compile(
    r"(\w+_)?(solution|answers?|gt|truth|labels?|responses?|outputs?|targets?|captions?|bbox|class|class_?name)"
    r"|(gt|correct|label)_\w+|reward_model|suffix"
)
PARTS = re.compile(  # columns that belong in the question, such as choices or option_a
    r"(\w+_)?(choices?|options?|candidates)|(choice|option|opt|ending)_?([a-hA-H]|\d)|(ans|answer)_?[a-hA-H]|[A-H]|a\d"
    r"|hint|history|input|context"
)
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in TURN_KEYS}


@dataclass
class Layout:
    """Question, answer and picture columns of a file; None if there is no such column."""

    question: str | None = None
    answer: str | None = None
    picture: str | None = None
    parts: Sequence[str] = ()  # columns that belong in the question, such as `choices`
    left_out: Sequence[str] = ()  # columns not converted, such as a second picture column


class Unclear(UserError):
    """Raised if several columns, or none, could be question, answer or picture.

    Attributes:
        choices: possible values for --columns, such as {"caption": "solution"}.
    """

    def __init__(self, message: str, choices: Sequence[dict[str, str]] = ()):
        super().__init__(message)
        self.choices = choices


def find_columns(layout: Layout, rows: list[dict], decided: Collection[str], folder: Path, has_question: bool):
    """Find the question, answer and picture columns, and store their names in `layout`.

    Args:
        layout: is changed in place.
        rows: sample rows that together fill all columns.
        decided: columns assigned by the user with --columns, under their new names.
        has_question: True if --question gives one question for all rows.
    Raises:
        Unclear: several columns could be question, answer or picture.
    """
    values = first_values(rows)
    free = {name: value for name, value in values.items() if name not in decided}
    layout.picture = next((name for name in MEDIA if name in decided), None)
    pictures = find_pictures(free, folder)
    if layout.picture is None and pictures:
        readable = []
        for name in pictures:
            if any(is_readable(item, folder) for item in leaves(values[name])):
                readable.append(name)
        layout.picture = choose("picture", readable, values, "image") if readable else pictures[0]
    layout.left_out = [name for name in pictures if name != layout.picture]
    layout.question = next((name for name in QUESTIONS if name in decided), None)
    rest = {name: value for name, value in free.items() if name not in pictures}
    is_pair = "chosen" in values or any(name.startswith("rejected") for name in values)
    questions = [name for name in QUESTIONS if name in free]
    # chosen and rejected may be conversations that include the question, as in TRL
    is_included = not questions and isinstance(values.get("chosen"), list)
    if has_question:
        layout.left_out += questions
    elif layout.question is None and not is_included:
        layout.question = choose("question", questions, rest, "problem")
    if "solution" in decided:
        layout.answer = "solution"
    elif not is_pair:
        layout.answer = find_answer(values, rest, layout.question)
    layout.parts = [name for name in free if PARTS.fullmatch(name)]
    if layout.parts:
        raise Unclear(
            f"the model would not see {', '.join(layout.parts)}; keep them for a reward, or put them into the question",
            [{name: name for name in layout.parts}],
        )


def first_values(rows: list[dict]) -> dict[str, Plain]:
    """Return the first non-empty value per column."""
    values: dict[str, Plain] = {}
    for row in reversed(rows):
        values |= filled_columns(row)
    return values


def filled_columns(row: dict) -> dict[str, Plain]:
    return {name: value for name, value in row.items() if value not in (None, "", [], {})}


def choose(role: str, names: list[str], values: dict[str, Plain], ours: str) -> str:
    """Return the column if there is one candidate; otherwise raise Unclear with the columns to choose from."""
    if len(names) == 1:
        return names[0]
    if not names:
        other = ", or give all rows one question with --question='What is it?'" if role == "question" else ""
        plain = [name for name, value in values.items() if isinstance(value, str | int | float)]
        raise Unclear(
            f"no column is known as the {role}; name one of {', '.join(values):.200} with "
            f"--columns='{{COLUMN: {ours}}}'{other}",
            [{name: ours} for name in plain[:6]],
        )
    choices = [{name: ours} for name in names]
    raise Unclear(f"{len(names)} columns could be the {role}: {listed(names, values)}", choices)


def listed(names: list[str], values: dict[str, Plain]) -> str:
    """List columns with their values, such as "label (cat) and answer (a cat)"."""
    return " and ".join(f"{name} ({truncate(values[name], 60)})" for name in names)


def find_pictures(columns: dict[str, Plain], folder: Path) -> list[str]:
    """Return picture and video columns: those with minivlmrl's names, then others with paths, data URIs or bytes."""
    found = [name for name in MEDIA if name in columns]
    known = {*MEDIA, *QUESTIONS, *TEXTS, "solution"}
    for name, value in columns.items():
        if name not in known and any(media_kind(item, folder) for item in leaves(value)):
            found.append(name)
    return found


def is_readable(item: str | bytes, folder: Path) -> bool:
    """Return True for image bytes, a data URI, or an existing file."""
    return isinstance(item, bytes) or bool(ENCODED.match(item)) or isfile(join(folder, item))


def find_answer(values: dict[str, Plain], free: dict[str, Plain], question: str | None) -> str | None:
    """Return the answer column: the question column itself if its conversation ends with the answer."""
    names = [name for name, value in free.items() if ANSWER.fullmatch(name) and not isinstance(value, bool)]
    said = last_answer(values.get(question or ""))
    if said is not None and question and question not in names:
        if all(str(values[name]) in said for name in names):
            return [*names, question][0]
        choices = [{name: f"other_{name}" for name in names}]
        choices += [{name: "solution"} for name in names]
        raise Unclear(
            f"the answer could be the assistant's turn ({truncate(said, 60)}) or {listed(names, values)}", choices
        )
    if not names and "completion" in values:
        return None
    others = {name: value for name, value in free.items() if name != question}
    return choose("answer", names, others, "solution")


def last_answer(turns: Plain) -> str | None:
    """Return the first assistant text in a conversation; None if the last turn is not an assistant turn."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    answers = [turn for turn in turns if role_of(turn) == "assistant"]
    if not answers or answers[-1] is not turns[-1]:
        return None
    turn = answers[0]
    return str(turn.get("value", turn.get("content")))


def role_of(turn: dict) -> str | None:
    """Return the role of a turn, under its name in minivlmrl: "assistant" for "gpt". None if unknown."""
    role = turn.get("from", turn.get("role"))
    return ROLES.get(str(role))


def convert_row(row: dict, layout: Layout, question: str | None) -> dict:
    """Rename a row's question, answer and picture to minivlmrl's columns; other columns stay.

    Args:
        question: the same question for all rows.
    """
    columns = {}
    for name, value in row.items():
        if value is not None and name not in layout.left_out:
            columns[name] = value
    answer = columns.pop(layout.answer, None) if layout.answer else None
    if layout.answer and layout.answer == layout.question:
        columns[layout.question] = answer
        answer = last_answer(answer)
    if question:
        columns["problem"] = question
    elif layout.question:
        columns |= read_question(layout.question, columns.pop(layout.question, None), columns)
    if isinstance(answer, dict) and "ground_truth" in answer:  # as in verl: {"style": "rule", "ground_truth": ...}
        answer = answer["ground_truth"]
    if answer is not None:
        columns["solution"] = answer
        is_text = isinstance(answer, str) and answer.strip()
        if is_text and layout.answer not in ("solution", layout.question) and "messages" not in columns:
            columns["completion"] = answer
    if layout.picture and layout.picture in columns:
        shown = columns.pop(layout.picture)
        columns[our_name(layout.picture, shown)] = shown
    return columns


def our_name(picture: str, value: Plain) -> str:
    """Return the column for pictures or videos: image, images, video or videos.

    Lists of video frames belong in the column `video`.
    """
    if picture in MEDIA:
        return picture
    kinds = [media_kind(item, Path()) for item in leaves(value)]
    kind = next(filter(None, kinds), "image")
    if kind == "image" and "video" in picture.lower():
        return "video"
    return f"{kind}s" if isinstance(value, list) else kind


def read_question(name: str, asked: Plain, columns: dict) -> dict:
    """Convert the question column: to `problem`, or to prompt and answers if it is a conversation."""
    if not isinstance(asked, list):
        return {"problem" if name != "prompt" else name: asked}
    turns = read_turns(asked)
    rejected_names = [other for other in columns if other.startswith("rejected")]
    rejected = columns.pop(rejected_names[0]) if rejected_names else None
    chosen = columns.pop("chosen", None)
    if rejected is None:
        is_answered = turns[-1]["role"] == "assistant"
        return {"messages" if is_answered else "prompt": turns}
    roles = [turn["role"] for turn in turns]
    start = [*roles, "assistant"].index("assistant")
    prompt = turns[:start]
    found = {"prompt": prompt, "chosen": chosen or turns[start:], "rejected": rejected}
    for key in ("chosen", "rejected"):
        value = found[key]
        if not isinstance(value, str):
            found[key] = read_turns(value if isinstance(value, list) else [value])
    if isinstance(found["rejected"], list) and found["rejected"][:start] == prompt:
        found["rejected"] = found["rejected"][start:]
    return found


def read_turns(raw: list[dict]) -> list[dict]:
    """Convert chat turns with the keys from and value, as in LLaVA and ShareGPT, to role and content."""
    turns = []
    for number, turn in enumerate(raw):
        role = role_of(turn) if isinstance(turn, dict) else None
        if role is None:
            raise Unclear(f"turn {number} is {truncate(turn, 60)}, but its role must be one of {', '.join(ROLES)}")
        content = turn.get("value", turn.get("content"))
        if not isinstance(content, str | None) and not as_parts(content):
            content = json.dumps(content, ensure_ascii=False)  # VLM-R1 answers may be numbers, boxes or objects
        kept = {key: turn[key] for key in TURN_KEYS[role] if turn.get(key) is not None}
        turns.append(kept | {"role": role, "content": content})
    return turns


def as_parts(content: Plain) -> bool:
    """Return whether a turn's content is a list of message parts, such as {"type": "image"}."""
    if not isinstance(content, list) or not content:
        return False
    return all(isinstance(part, dict) and part.keys() & {"type", "text", "image"} for part in content)
