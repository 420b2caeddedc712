"""Find question, answer and picture by column names, and write them into our columns."""

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
PARTS = re.compile(  # they belong into the question
    r"(\w+_)?(choices?|options?|candidates)|(choice|option|opt|ending)_?([a-hA-H]|\d)|(ans|answer)_?[a-hA-H]|[A-H]|a\d"
    r"|hint|history|input|context"
)
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in TURN_KEYS}


@dataclass
class Layout:
    """File column names, None without such a column."""

    question: str | None = None
    answer: str | None = None
    picture: str | None = None
    parts: Sequence[str] = ()  # columns needed in the question, such as `choices`
    left_out: Sequence[str] = ()  # other pictures, which the model would not see


class Unclear(UserError):
    """Raised if the columns are not clear.

    Attributes:
        choices: what the user may add to --columns, one {column: our name} per choice.
    """

    def __init__(self, message: str, choices: Sequence[dict[str, str]] = ()):
        super().__init__(message)
        self.choices = choices


def find_columns(layout: Layout, rows: list[dict], decided: Collection[str], folder: Path, has_question: bool):
    """Find the file columns.

    Args:
        layout: gets names found here.
        rows: rows in which each filled column occurs.
        decided: column names given by the user.
        has_question: True if --question gives one question for all rows.
    Raises:
        Unclear: several columns could be question, answer or picture.
    """
    values = first_values(rows)
    free = {name: value for name, value in values.items() if name not in decided}
    layout.picture = next((name for name in MEDIA if name in decided), None)
    pictures = find_pictures(free, folder)
    if layout.picture is None and pictures:
        there = [name for name in pictures if any(is_readable(item, folder) for item in leaves(values[name]))]
        layout.picture = choose("picture", there, values, "image") if there else pictures[0]
    layout.left_out = [name for name in pictures if name != layout.picture]
    layout.question = next((name for name in QUESTIONS if name in decided), None)
    rest = {name: value for name, value in free.items() if name not in pictures}
    is_pair = "chosen" in values or any(name.startswith("rejected") for name in values)
    questions = [name for name in QUESTIONS if name in free]
    if has_question:
        layout.left_out += questions
    # two whole conversations need no question, as in TRL
    elif layout.question is None and (questions or not isinstance(values.get("chosen"), list)):
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
    """Return the first filled value per column."""
    values: dict[str, Plain] = {}
    for row in reversed(rows):
        values |= filled_columns(row)
    return values


def filled_columns(row: dict) -> dict[str, Plain]:
    return {name: value for name, value in row.items() if value not in (None, "", [], {})}


def choose(role: str, names: list[str], values: dict[str, Plain], ours: str) -> str:
    """Return the only possible column for question, answer or picture, or ask the user."""
    if len(names) == 1:
        return names[0]
    if not names:
        other = ", or give all rows one question with --question='What is it?'" if role == "question" else ""
        raise Unclear(
            f"no column is known as the {role}; name one of {', '.join(values):.200} with "
            f"--columns='{{COLUMN: {ours}}}'{other}",
            [{name: ours} for name, value in values.items() if isinstance(value, str | int | float)][:6],
        )
    shown = " and ".join(f"{name} ({truncate(values[name], 60)})" for name in names)
    raise Unclear(f"{len(names)} columns could be the {role}: {shown}", [{name: ours} for name in names])


def find_pictures(columns: dict[str, Plain], folder: Path) -> list[str]:
    """Return picture and video columns: our names first, then columns with paths, data URIs or bytes."""
    others = [name for name in columns if name not in {*MEDIA, *QUESTIONS, *TEXTS, "solution"}]
    found = [name for name in others if any(media_kind(item, folder) for item in leaves(columns[name]))]
    return [name for name in MEDIA if name in columns] + found


def is_readable(item: str | bytes, folder: Path) -> bool:
    """Return True for image bytes, a data URI, or an existing file."""
    return isinstance(item, bytes) or bool(ENCODED.match(item)) or isfile(join(folder, item))


def find_answer(values: dict[str, Plain], free: dict[str, Plain], question: str | None) -> str | None:
    """Return the answer column; an assistant turn counts as one."""
    names = [name for name, value in free.items() if ANSWER.fullmatch(name) and not isinstance(value, bool)]
    said = last_answer(values.get(question or ""))
    if said is not None and question and question not in names:
        if all(str(values[name]) in said for name in names):
            return [*names, question][0]
        shown = " and ".join(f"{name} ({truncate(values[name], 60)})" for name in names)
        raise Unclear(
            f"the answer could be the assistant's turn ({truncate(said, 60)}) or {shown}",
            [{name: f"other_{name}" for name in names}, *({name: "solution"} for name in names)],
        )
    if not names and "completion" in values:
        return None
    return choose("answer", names, {name: value for name, value in free.items() if name != question}, "solution")


def last_answer(turns: Plain) -> str | None:
    """Return the first assistant text in a conversation ending with one."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    texts = [str(turn.get("value", turn.get("content"))) for turn in turns if role_of(turn) == "assistant"]
    return texts[0] if texts and role_of(turns[-1]) == "assistant" else None


def role_of(turn: dict) -> str | None:
    """Return our name for a role, None if unknown."""
    return ROLES.get(str(turn.get("from", turn.get("role"))))


def convert_row(row: dict, layout: Layout, question: str | None) -> dict:
    """Write question, answer and picture into our columns; other columns stay.

    Args:
        question: the same question for all rows.
    """
    columns = {name: value for name, value in row.items() if value is not None and name not in layout.left_out}
    answer = columns.pop(layout.answer, None) if layout.answer else None
    if layout.answer and layout.answer == layout.question:
        columns[layout.question] = answer
        answer = last_answer(answer)
    if question:
        columns["problem"] = question
    elif layout.question:
        columns |= read_question(layout.question, columns.pop(layout.question, None), columns)
    if isinstance(answer, dict) and "ground_truth" in answer:  # verl: {"style": "rule", "ground_truth": ...}
        answer = answer["ground_truth"]
    if answer is not None:
        columns["solution"] = answer
        if isinstance(answer, str) and answer.strip() and layout.answer not in ("solution", layout.question):
            columns |= {} if "messages" in columns else {"completion": answer}
    if layout.picture and layout.picture in columns:
        shown = columns.pop(layout.picture)
        columns[our_name(layout.picture, shown)] = shown
    return columns


def our_name(picture: str, value: Plain) -> str:
    """Return our column for pictures or videos; video frames are a list in `video`."""
    if picture in MEDIA:
        return picture
    kind = next((kind for item in leaves(value) if (kind := media_kind(item, Path()))), "image")
    if kind == "image" and "video" in picture.lower():
        return "video"
    return f"{kind}s" if isinstance(value, list) else kind


def read_question(name: str, asked: Plain, columns: dict) -> dict:
    """Return prompt, and pair or conversation after it."""
    if not isinstance(asked, list):
        return {"problem" if name != "prompt" else name: asked}
    turns = read_turns(asked)
    rejected = next((columns.pop(other) for other in [*columns] if other.startswith("rejected")), None)
    chosen = columns.pop("chosen", None)
    if rejected is None:
        is_answered = turns[-1]["role"] == "assistant"
        return {"messages" if is_answered else "prompt": turns}
    start = [*(turn["role"] for turn in turns), "assistant"].index("assistant")
    pair = {"chosen": chosen or turns[start:], "rejected": rejected}
    answers = {
        key: read_turns(value if isinstance(value, list) else [value])
        for key, value in pair.items()
        if not isinstance(value, str)
    }
    if "rejected" in answers and answers["rejected"][:start] == turns[:start]:
        answers["rejected"] = answers["rejected"][start:]
    return {"prompt": turns[:start]} | pair | answers


def read_turns(raw: list[dict]) -> list[dict]:
    """Convert turns with from and value, as in LLaVA and ShareGPT, to role and content."""
    turns = []
    for number, turn in enumerate(raw):
        role = role_of(turn) if isinstance(turn, dict) else None
        if role is None:
            raise Unclear(f"turn {number} is {truncate(turn, 60)}, but its role must be one of {', '.join(ROLES)}")
        content = turn.get("value", turn.get("content"))
        if not isinstance(content, str | list | None) or (isinstance(content, list) and not as_parts(content)):
            content = json.dumps(content, ensure_ascii=False)  # VLM-R1: numbers, boxes or objects as answers
        kept = {key: turn[key] for key in TURN_KEYS[role] if turn.get(key) is not None}
        turns.append(kept | {"role": role, "content": content})
    return turns


def as_parts(content: list) -> bool:
    """Return whether a list holds message parts."""
    return bool(content) and all(isinstance(part, dict) and part.keys() & {"type", "text", "image"} for part in content)
