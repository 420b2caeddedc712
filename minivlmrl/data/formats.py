"""Convert rows in other projects' formats to minivlmrl's columns, and validate them.

Several formats can apply to the same row: for example, one format reads the column `conversations` and another one the
column `file_name`. docs/rows.md has examples.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.options import VideoOptions
from minivlmrl.config.parsing import read_value
from minivlmrl.config.types import Plain
from minivlmrl.data.media import COLUMNS as MEDIA_COLUMNS
from minivlmrl.data.rows import REWARD_ARGUMENTS
from minivlmrl.errors import check_field, error_context
from minivlmrl.json_files import parse_json

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {  # {name of a speaker in other projects' formats: role}
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
}
# names of video options that a column may also have, because data sets use columns with these names
COMMON_VIDEO_COLUMNS = {"fps", "min_frames", "max_frames"}
# {name that no column may have: end of the error message after "it must be"}
RESERVED = {
    **dict.fromkeys(
        REWARD_ARGUMENTS - {"images"},
        "renamed with data.columns, because reward functions receive another argument of this name",
    ),
    **dict.fromkeys(
        vars(VideoOptions()).keys() - COMMON_VIDEO_COLUMNS,
        "renamed with data.columns, or moved into the entry of its image as an option, such as "
        '{"image": ..., "max_pixels": 200704}',
    ),
}
COLUMN_TYPES = {  # {column: its values' type and bounds}
    "margin": Annotated[float, "(-inf, inf)"],  # how much better `chosen` is than `rejected`
    # an answer's log-probability under the reference model, summed over its tokens
    "ref_chosen_logps": Annotated[float, "(-inf, 0]"],
    "ref_rejected_logps": Annotated[float, "(-inf, 0]"],
    "label": bool,  # for KTO: True if the completion is a good answer
}


def find_format(name: str) -> Callable[[dict], dict]:
    """Return a function that converts a row of the file with the function that data.format names."""
    with error_context(f"data.format {name}"):
        function = with_options(*resolve_object("format", name, {}))

    def convert(row: dict) -> dict:
        columns = function(row)
        if not isinstance(columns, dict) or not all(isinstance(key, str) for key in columns):
            raise ValueError(
                f"data.format {name} returned {columns!r:.60}, but it must "
                "return a dictionary that maps the names of columns to values"
            )
        for column, value in columns.items():
            if getattr(value, "ndim", 0):
                raise ValueError(
                    f"data.format {name} returned an array of type "
                    f"{type(value).__name__} in the column {column!r}; convert it with tolist()"
                )
        return columns

    return convert


def to_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename a row's columns (data.columns), and add the columns of every matching format."""
    row = rename_columns(row, renamed)
    for row_format in FORMATS:
        if row_format.matches(row):
            with error_context(f"format {row_format.name!r}"):
                row = row | row_format.read(row)
    check_layout(row)
    return row


def rename_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename all columns of `renamed` at once, so that their order does not matter and two names can be swapped."""
    renamed = {theirs: ours for theirs, ours in renamed.items() if theirs != ours and row.get(theirs) is not None}
    columns = row | dict.fromkeys(renamed)
    for theirs, ours in renamed.items():
        if columns.get(ours) is not None:
            raise ValueError(
                f"data.columns renames {theirs!r} to {ours!r}, but the row already has both columns; remove one of them"
            )
        columns[ours] = row[theirs]
    return columns


class ForeignLayoutError(ValueError):
    """A row has a layout that only recipes/convert_rows.py reads."""


def check_layout(row: dict):
    """Raise ForeignLayoutError if tags in the texts stand for values in other columns."""
    texts = json.dumps([row.get(name) for name in TEXTS], default=str)
    if row.get("objects") is not None and (tag := re.search("<ref-object>|<bbox>", texts)):
        raise ForeignLayoutError(f"the texts contain {tag[0]}, which ms-swift replaces by `objects`")
    has_media = any(row.get(name) is not None for name in MEDIA_COLUMNS)
    if not has_media and re.search("<img>.*?</img>", texts):
        raise ForeignLayoutError("the texts contain <img>, with which Qwen-VL names its images")


def check_columns(columns: dict, required: Sequence[str]):
    """Raise ValueError if a column has a reserved name, or a value that cannot be used.

    Args:
        columns: {column: value}; columns whose value is None are ignored.
        required: columns that every row must have. The column `label` is validated only if it is
            a required column, because data sets may use this name for another purpose.
    """
    for name, value in columns.items():
        if value is None:
            continue
        if name in RESERVED:
            check_field(False, f"column {name!r}", value, RESERVED[name])
        if name in COLUMN_TYPES and (name != "label" or name in required):
            read_value(COLUMN_TYPES[name], value, f"column {name!r}", json=True)
        if name == "solution":
            check_field(
                str(value).count("<answer>") <= 1, "column 'solution'", value, "a text with at most one <answer> tag"
            )


@dataclass
class RowFormat:
    """A format of another project: rows that have all `required_columns` and none in `excluded`."""

    required_columns: tuple[str, ...]
    excluded: Iterable[str]
    read: Callable[[dict], dict]  # takes a row; returns the columns to add or replace

    @property
    def name(self) -> str:
        return " and ".join(self.required_columns)

    def matches(self, row: dict) -> bool:
        has_all = all(row.get(name) is not None for name in self.required_columns)
        return has_all and all(row.get(name) is None for name in self.excluded)


def _read_conversations(row: dict) -> dict:
    """Read `conversations`, whose turns have `from` and `value`, as in VLM-R1, LLaVA and ShareGPT.

    The first answer becomes the solution if the row has none.
    """
    raw_turns = row["conversations"]
    check_field(isinstance(raw_turns, list), "column 'conversations'", raw_turns, "a list of turns")
    turns = _system_turns(row) + [_read_turn(turn, number) for number, turn in enumerate(raw_turns)]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not answers or turns[-1]["role"] != "assistant":  # all turns belong to the prompt
        return {"messages": None, "prompt": turns}
    solution = answers[0]
    if len(answers) == 1 and isinstance(solution, str) and not solution.strip():
        solution = ""  # a blank answer means that the image does not show the object
        columns = {"messages": None, "prompt": turns[:-1]}
    else:
        columns = _with_rejected(turns, row)
    return columns if row.get("solution") is not None else columns | {"solution": solution}


def _with_rejected(turns: list[dict], row: dict) -> dict:
    """Return `messages`, or a pair for rows with ms-swift's column `rejected_response`."""
    if row.get("rejected_response") is None:
        return {"messages": turns}
    start = [turn.get("role") for turn in turns].index("assistant")
    answers = {"chosen": turns[start:], "rejected": row["rejected_response"]}
    return {"messages": None, "prompt": turns[:start], **answers, **_read_pair(answers)}


def _read_turn(turn: dict, number: int) -> dict:
    speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(
            f"turn {number} is {turn!r:.60}, but its 'from' or 'role' must be one of {', '.join(SPEAKERS)}"
        )
    value = turn.get("value", turn.get("content"))
    if type(value) in (int, float):  # answers in VLM-R1's data can be numbers
        value = str(value)
    if speaker in ("function_call", "tool_call"):  # a tool call is written in Qwen's format
        value = str(value)
        with error_context(f"turn {number}: tool call"):
            call = parse_json(value)
            named = isinstance(call, dict) and "name" in call
            expected = 'a JSON object with the name of a tool, such as {"name": "zoom"}'
            check_field(named, "the call", value, expected)
        value = f"<tool_call>\n{value.strip()}\n</tool_call>"
    return {"role": SPEAKERS[speaker], "content": value}


def _system_turns(row: dict) -> list[dict]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _read_messages(row: dict) -> dict:
    """Read `messages`; as in ms-swift, all turns are the prompt if the last one is no answer."""
    messages = row["messages"]
    is_list = isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages)
    if not messages or not is_list:
        return {}  # file_dataset.py raises an error for such messages
    turns = []
    for number, message in enumerate(messages):
        role = str(message.get("role"))
        is_renamed = role in SPEAKERS and role not in ROLES
        turns.append(_read_turn(message, number) if is_renamed else message)
    is_answered = turns[-1].get("role") == "assistant"
    return _with_rejected(turns, row) if is_answered else {"messages": None, "prompt": turns}


def _read_question(question_column: str, answer_column: str, row: dict) -> dict:
    """Read a question and its answer from two columns, after the [question, answer] pairs `history`."""
    question, answer = row[question_column], row.get(answer_column)
    check_field(isinstance(question, str), f"column {question_column!r}", question, "text")
    if row.get("input"):  # Alpaca's column `input` contains additional text for the question
        question = f"{question}\n{row['input']}"
    turns = _system_turns(row)
    history = row.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, list) and len(pair) == 2
        check_field(is_pair, "column 'history'", history, "a list of [question, answer] pairs")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    columns: dict[str, Plain] = {"prompt": [*turns, {"role": "user", "content": question}]}
    if answer is not None and row.get("solution") is None:
        columns["solution"] = answer
    if isinstance(answer, str) and answer.strip() and row.get("chosen") is None:
        columns["completion"] = answer
    return columns


def _read_pair(row: dict) -> dict:
    """Read LLaMA-Factory's `chosen` and `rejected`, each a single turn with `from` and `value`."""
    names = (name for name in ("chosen", "rejected") if isinstance(row.get(name), dict))
    return {name: [_read_turn(row[name], 0)] for name in names}


def _read_reward_model(row: dict) -> dict:
    """Read the solution from verl's {"style": "rule", "ground_truth": ...}."""
    rule = row["reward_model"]
    return {"solution": rule.get("ground_truth")} if isinstance(rule, dict) else {}


def _read_choices(row: dict) -> dict:
    """Append the choices `options`, `choices` or A, B, C (MMBench) to a question without them."""
    lettered = [row[letter] for letter in LETTERS if row.get(letter) is not None]
    choices = row.get("options") or row.get("choices") or lettered
    column = next((name for name in QUESTION_TEXTS if isinstance(row.get(name), str)), None)
    if not choices or column is None:
        return {}  # an open question, or turns, whose text already is the whole prompt
    answer = row.get("answer", row.get("solution"))
    is_list = isinstance(choices, list) and len(choices) <= len(LETTERS)
    check_field(is_list, "the list of choices", choices, "a list of at most 26 texts")
    is_choice = not isinstance(answer, int) or answer in choices
    check_field(is_choice, "the answer", answer, "a letter or one of the choices of the row")
    if all(re.search(rf"\b{letter}[.:)]", row[column]) for letter in LETTERS[: len(choices)]):
        return {}  # the question already lists the choices
    lines = [row.get("hint") or "", row[column]]
    for letter, choice in zip(LETTERS, choices, strict=False):
        lines.append(f"{letter}. " + re.sub(r"^[A-Z][.:)]\s*", "", str(choice)))
    return {column: "\n".join(lines).strip()}


def map_nested(value: Plain, change: Callable, types: type | tuple[type, ...] = str) -> Plain:
    """Return a copy of nested lists and dicts with a function applied to all values of `types`."""
    if isinstance(value, types):
        return change(value)
    if isinstance(value, list):
        return [map_nested(item, change, types) for item in value]
    if isinstance(value, dict):
        return {key: map_nested(item, change, types) for key, item in value.items()}
    return value


def rename_column(file_column: str, our_column: str, excluded: Iterable[str] = ()) -> RowFormat:
    """Create a format that copies a column to `our_column`, unless the row has this or `excluded`."""
    excluded = our_column, *excluded
    return RowFormat((file_column,), excluded, lambda row: {our_column: row[file_column]})


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUESTION_TEXTS = ("problem", "question", "query", "instruction", "prefix", "prompt")
QUESTION_COLUMNS = ("problem", "prompt", "messages")
# a row with such a column is already in minivlmrl's own format
OUR_COLUMNS = (*QUESTION_COLUMNS, "completion")
TEXTS = (*OUR_COLUMNS, "chosen", "rejected", "solution")
FORMATS = [
    RowFormat(("A", "B"), (), _read_choices),
    RowFormat(("options",), (), _read_choices),
    RowFormat(("choices",), (), _read_choices),
    RowFormat(("conversations",), QUESTION_COLUMNS, _read_conversations),
    RowFormat(("messages",), ("problem", "prompt", "completion"), _read_messages),
    RowFormat(("prefix", "suffix"), OUR_COLUMNS, partial(_read_question, "prefix", "suffix")),
    RowFormat(("query",), OUR_COLUMNS, partial(_read_question, "query", "response")),
    RowFormat(("instruction",), OUR_COLUMNS, partial(_read_question, "instruction", "output")),
    RowFormat(("question",), OUR_COLUMNS, partial(_read_question, "question", "answer")),
    RowFormat(("chosen", "rejected"), (), _read_pair),
    rename_column("kto_tag", "label"),
    rename_column("answer", "solution"),
    RowFormat(("reward_model",), ("solution",), _read_reward_model),
    rename_column("ground_truth", "solution"),
    rename_column("file_name", "image", MEDIA_COLUMNS),
]
# formats that contain a question, by name
QUESTION_FORMATS = [row_format.name for row_format in FORMATS if "problem" in row_format.excluded]
