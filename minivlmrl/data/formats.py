"""Convert rows in the formats of other projects to the columns of minivlmrl, and validate them.

A row can have several formats at once: for example, one format reads its `conversations`, another
its `file_name`. docs/data.md has examples.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from minivlmrl.config.options import VideoOptions
from minivlmrl.config.parsing import check_field, error_context, parse_json, read_value
from minivlmrl.config.types import Plain
from minivlmrl.data.media import COLUMNS as MEDIA_COLUMNS
from minivlmrl.data.rows import REWARD_ARGUMENTS

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {  # name of a speaker in the formats of other projects -> role
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
# video options that are allowed as column names, because they are common
COMMON_VIDEO_COLUMNS = {"fps", "min_frames", "max_frames"}
RESERVED = {  # name that no column may have -> end of the error message, with the reason
    **dict.fromkeys(
        REWARD_ARGUMENTS - {"images"},
        "renamed, because reward functions receive another argument of this name; use data.columns",
    ),
    **dict.fromkeys(
        vars(VideoOptions()).keys() - COMMON_VIDEO_COLUMNS,
        'renamed, or moved to its image as an option: {"image": ..., "max_pixels": 200704}',
    ),
}
Side = Annotated[float, "(0, inf)"]
COLUMN_TYPES = {  # column -> type and bounds of its values
    "margin": Annotated[float, "(-inf, inf)"],  # margin by which `chosen` is better
    "ref_chosen_logps": Annotated[float, "(-inf, 0]"],  # reference model's, summed over tokens
    "ref_rejected_logps": Annotated[float, "(-inf, 0]"],
    "answer_extent": tuple[Side, Side],  # width, height of the whole image
    "label": bool,  # True if the completion is good, for KTO
}


def to_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename columns of a row, and add the columns that every matching format in FORMATS computes.

    Args:
        row: column -> value; a value None counts as missing.
        renamed: column of the file -> our column; option data.columns.
    Raises:
        ValueError: the row has a column both under its old and its new name, or has a wrong value.
    """
    for file_column, our_column in renamed.items():
        if row.get(file_column) is not None:
            if row.get(our_column) is not None:
                raise ValueError(
                    f"data.columns renames {file_column!r} to {our_column!r}, but the row has "
                    "both; remove one"
                )
            row = {**row, file_column: None, our_column: row[file_column]}
    for row_format in FORMATS:
        if row_format.matches(row):
            with error_context(f"format {row_format.name!r}"):
                row = row | row_format.read(row)
    return row


def check_columns(columns: dict, required: Sequence[str]):
    """Raise ValueError for a column with a reserved name, or with a value that rewards cannot use.

    Columns that are None are ignored, and `label` is validated only if it is in `required`.
    """
    for name, value in columns.items():
        if value is None:
            continue
        if name in RESERVED:
            check_field(False, f"column {name!r}", value, RESERVED[name])
        if name in COLUMN_TYPES and (name != "label" or name in required):
            read_value(COLUMN_TYPES[name], value, f"column {name!r}", json=True)
        if name == "solution":
            check_field(str(value).count("<answer>") <= 1, "column 'solution'", value, "one answer")


@dataclass
class RowFormat:
    """A row format of another project, and the function that converts it.

    A format matches rows that have all of `required_columns` and no column of `excluded`.
    """

    required_columns: tuple[str, ...]
    excluded: Iterable[str]
    read: Callable[[dict], dict]  # row -> columns to add or replace

    @property
    def name(self) -> str:
        return " and ".join(self.required_columns)

    def matches(self, row: dict) -> bool:
        for name in self.required_columns:
            if row.get(name) is None:
                return False
        return all(row.get(name) is None for name in self.excluded)


def _read_conversations(row: dict) -> dict:
    """Read `conversations`, whose turns have `from` and `value`, as in VLM-R1, LLaVA and ShareGPT.

    The first answer becomes the solution, if the row has none. Without a final answer, all turns
    are the prompt.
    """
    raw_turns = row["conversations"]
    check_field(isinstance(raw_turns, list), "column 'conversations'", raw_turns, "a list of turns")
    turns = _system_turns(row) + [_read_turn(turn, number) for number, turn in enumerate(raw_turns)]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    # without a final answer, all turns are the prompt
    if not answers or turns[-1]["role"] != "assistant":
        return {"messages": None, "prompt": turns}
    solution = answers[0]
    if len(answers) == 1 and isinstance(solution, str) and not solution.strip():
        solution = ""  # a blank answer: the object in question is not in the image
        columns = {"messages": None, "prompt": turns[:-1]}
    else:
        columns = _with_rejected(turns, row)
    if row.get("solution") is None:
        columns["solution"] = solution
    return columns


def _with_rejected(turns: list[dict], row: dict) -> dict:
    """Return a conversation with its answer as columns.

    If ms-swift's column `rejected_response` is there, the answer becomes `chosen`, and that column
    `rejected`.
    """
    if row.get("rejected_response") is None:
        return {"messages": turns}
    answer_start = [turn.get("role") for turn in turns].index("assistant")
    answers = {"chosen": turns[answer_start:], "rejected": row["rejected_response"]}
    return {"messages": None, "prompt": turns[:answer_start], **answers, **_read_pair(answers)}


def _read_turn(turn: dict, number: int) -> dict:
    speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(
            f"turn {number} is {turn!r:.60}; 'from' must be one of {', '.join(SPEAKERS)}"
        )
    value = turn.get("value", turn.get("content"))
    if type(value) in (int, float):  # VLM-R1 has numbers as answers
        value = str(value)
    if speaker in ("function_call", "tool_call"):  # rendered in Qwen's format
        value = str(value)
        with error_context(f"the call of turn {number}"):
            call = parse_json(value)
            check_field(
                isinstance(call, dict) and "name" in call, "it", value, 'JSON: {"name": ...}'
            )
        value = f"<tool_call>\n{value.strip()}\n</tool_call>"
    return {"role": SPEAKERS[speaker], "content": value}


def _system_turns(row: dict) -> list[dict]:
    """Return the system turn that LLaMA-Factory and ms-swift have in the column `system`, or []."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _read_messages(row: dict) -> dict:
    """Read `messages`. As in ms-swift, they are a prompt if they end with a user turn."""
    messages = row["messages"]
    is_list_of_turns = isinstance(messages, list) and all(
        isinstance(turn, dict) for turn in messages
    )
    if not messages or not is_list_of_turns:
        return {}  # file_dataset.py raises the error
    turns = []
    for number, message in enumerate(messages):
        role = str(message.get("role"))
        is_renamed = role in SPEAKERS and role not in ROLES
        turns.append(_read_turn(message, number) if is_renamed else message)
    if turns[-1].get("role") == "assistant":
        return _with_rejected(turns, row)
    return {"messages": None, "prompt": turns}


def _read_question(question_column: str, answer_column: str, row: dict) -> dict:
    """Read a question and its answer from two columns.

    The column `history` may have earlier pairs of question and answer, which precede the question.
    """
    question_text = row[question_column]
    answer_text = row.get(answer_column)
    check_field(
        isinstance(question_text, str), f"column {question_column!r}", question_text, "text"
    )
    if row.get("input"):  # Alpaca has additional text in `input`
        question_text = f"{question_text}\n{row['input']}"
    turns = _system_turns(row)
    history = row.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, list) and len(pair) == 2
        check_field(is_pair, "column 'history'", history, "a list of pairs: a question, its answer")
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": "assistant", "content": pair[1]})
    columns: dict[str, Plain] = {"prompt": [*turns, {"role": "user", "content": question_text}]}
    if answer_text is not None and row.get("solution") is None:
        columns["solution"] = answer_text
    if isinstance(answer_text, str) and answer_text.strip() and row.get("chosen") is None:
        columns["completion"] = answer_text
    return columns


def _read_pair(row: dict) -> dict:
    """Read `chosen` and `rejected` of LLaMA-Factory: single turns with `from` and `value`."""
    names = (name for name in ("chosen", "rejected") if isinstance(row.get(name), dict))
    return {name: [_read_turn(row[name], 0)] for name in names}


def _read_reward_model(row: dict) -> dict:
    """Read the solution from verl's {"style": "rule", "ground_truth": ...}."""
    rule = row["reward_model"]
    return {"solution": rule.get("ground_truth")} if isinstance(rule, dict) else {}


def _read_objects(row: dict) -> dict:
    """Replace <ref-object> and <bbox> in texts of ms-swift by the items in the column `objects`.

    The n-th <ref-object> becomes the n-th item of `ref`, and the n-th <bbox> that of `bbox`.
    ValueError if the number of marks and the number of items differ.
    """
    objects = row["objects"]
    texts = _text_columns(row)
    all_text = json.dumps(texts, default=str)
    mark_values = {}  # mark -> replacement of each occurrence, in order
    for key, mark in (("ref", "<ref-object>"), ("bbox", "<bbox>")):
        num_marks = all_text.count(mark)
        if num_marks == 0:
            continue
        mark_items = objects.get(key) if isinstance(objects, dict) else None
        if not isinstance(mark_items, list):
            mark_items = []
        if len(mark_items) != num_marks:
            raise ValueError(
                f"column 'objects' has {len(mark_items)} items in {key!r}, but the texts have "
                f"{num_marks} marks {mark}"
            )
        mark_values[mark] = [
            item if isinstance(item, str) else json.dumps(item) for item in mark_items
        ]
    if not mark_values:
        return {}

    def fill_mark(mark: re.Match) -> str:
        return mark_values[mark[0]].pop(0)

    return map_nested(texts, lambda text: re.sub("|".join(mark_values), fill_mark, text))


def _read_choices(row: dict) -> dict:
    """Append multiple-choice options "A. ...", "B. ..." to a question that does not list them.

    The options come from a list, or from the columns A, B, ... of MMBench.
    """
    lettered_choices = [row[letter] for letter in LETTERS if row.get(letter) is not None]
    choices = row.get("options") or row.get("choices") or lettered_choices
    question_columns = [name for name in QUESTION_TEXTS if isinstance(row.get(name), str)]
    if not choices or not question_columns:
        return {}  # an open question, or turns whose text is the whole prompt already
    answer = row.get("answer", row.get("solution"))
    is_list = isinstance(choices, list) and len(choices) <= len(LETTERS)
    check_field(is_list, "the list of choices", choices, "a list of texts")
    is_choice = not isinstance(answer, int) or answer in choices
    check_field(is_choice, "the answer beside choices", answer, "a letter or one of the choices")
    question_column = question_columns[0]
    question_text = row[question_column]
    if all(re.search(rf"\b{letter}[.:)]", question_text) for letter in LETTERS[: len(choices)]):
        return {}  # the question lists the choices already
    lines = [row.get("hint") or "", question_text]
    for letter, choice in zip(LETTERS, choices, strict=False):
        lines.append(f"{letter}. " + re.sub(r"^[A-Z][.:)]\s*", "", str(choice)))
    return {question_column: "\n".join(lines).strip()}


def _read_img_tags(row: dict) -> dict:
    """Replace <img>path</img> in texts by <image>, and return the paths in the column `images`.

    Qwen-VL and older ms-swift use this tag.
    """
    image_paths = []

    def collect_path(tag: re.Match) -> str:
        image_paths.append(tag[1])
        return "<image>"

    texts = map_nested(
        _text_columns(row), lambda text: re.sub("<img>(.*?)</img>", collect_path, text)
    )
    return {**texts, "images": image_paths} if image_paths else {}


def _text_columns(row: dict) -> dict:
    """Return the columns of a row that may hold text."""
    return {name: row[name] for name in TEXTS if row.get(name) is not None}


def map_nested(value: Plain, change: Callable, types: type | tuple[type, ...] = str) -> Plain:
    """Apply a function to all texts in nested lists and dicts, or to all values of the given types.

    Returns a copy; other values stay as they are.
    """
    if isinstance(value, types):
        return change(value)
    if isinstance(value, list):
        return [map_nested(item, change, types) for item in value]
    if isinstance(value, dict):
        return {key: map_nested(item, change, types) for key, item in value.items()}
    return value


def rename_column(file_column: str, our_column: str, excluded: Iterable[str] = ()) -> RowFormat:
    """Create a format that copies the column `file_column` to `our_column`.

    It does not match rows that have `our_column` already, or one of the columns `excluded`.
    """
    return RowFormat(
        (file_column,), (our_column, *excluded), lambda row: {our_column: row[file_column]}
    )


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUESTION_TEXTS = ("problem", "question", "query", "instruction", "prefix", "prompt")
QUESTION_COLUMNS = ("problem", "prompt", "messages")
OUR_COLUMNS = (*QUESTION_COLUMNS, "completion")  # a row with one of these columns is in our format
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
    RowFormat(("objects",), (), _read_objects),
    RowFormat((), MEDIA_COLUMNS, _read_img_tags),
]
# names of the formats that contain a question
QUESTION_FORMATS = [row_format.name for row_format in FORMATS if "problem" in row_format.excluded]
