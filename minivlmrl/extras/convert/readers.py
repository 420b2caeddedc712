"""Convert rows from other projects' layouts to the layout in docs/data.md, keeping unknown columns."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from minivlmrl.config.types import Plain
from minivlmrl.data.columns import MEDIA
from minivlmrl.data.messages import LOSS_KEYS, THOUGHT_KEYS, as_turns, text_of
from minivlmrl.data.processor import PART_KEYS
from minivlmrl.data.row_checks import FILE_NAMES, OTHER_TAG, is_list_text, literal_list
from minivlmrl.data.row_files import map_nested
from minivlmrl.errors import UserError, error_context, pluralize, require, truncate
from minivlmrl.json_files import parse_json

Reader = Callable[["Columns"], "Columns | None"]  # a reader returns None if it does not know the row's layout
ANSWERS = ("response", "output", "suffix", "answer")
# columns to drop once their content is in other columns
BESIDE = (
    "response", "output", "suffix", "history", "rejected_response", "rejected_messages", "rejected_conversations",
    "kto_tag", "reward_model", "options", "choices",
)  # fmt: skip
SPEAKERS = {  # {speaker: role}
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response", "function"), "tool"),
}
KEPT_KEYS = ("tool_calls", "name", "tool_call_id", *THOUGHT_KEYS, *LOSS_KEYS)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUESTIONS = ("problem", "question", "query", "instruction", "prefix", "prompt")
# answer columns that may hold a list as a string
ANSWER_TEXTS = ("completion", "chosen", "rejected")
LISTS = ("messages", "conversations", "conversation", "history", *MEDIA, "options", "choices", "texts",
         *QUESTIONS, *ANSWER_TEXTS)  # fmt: skip
# counts rows where boxes from the ms-swift column `objects` were written into the text
BOX_UNIT = "the unit of the boxes in `objects`, which are in pixels of the image file"
TAGS = {"<ref-object>": "ref", "<bbox>": "bbox"}  # {ms-swift tag: its list in `objects`}
RENDERED = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\s*|$)(?=<\|im_start\|>|\s*$)", re.DOTALL)
VISION = re.compile(r"<\|vision_start\|>(?:<\|(image|video)_pad\|>)+<\|vision_end\|>")


class Columns(dict):
    """Dict of a row's columns, without missing values. `dropped` counts columns and keys lost in the conversion."""

    def __init__(self, row: dict, dropped: Counter):
        # value == value is False for NaN
        super().__init__({name: value for name, value in row.items() if value is not None and value == value})
        self.dropped = dropped

    def put(self, **columns: Plain) -> "Columns":
        self.update(columns)
        return self

    def first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self), None)

    def drop(self, name: str) -> Plain:
        """Remove a column and return its value; count it in `dropped` unless it is empty."""
        if self.get(name) not in (None, "", [], {}):
            self.dropped[f"column {name!r}"] += 1
        return self.pop(name, None)

    def turns(self, name: str) -> list[dict]:
        """Remove a column of turns from the row, and return the turns as messages with `role` and `content`."""
        raw_turns = self.pop(name)
        if isinstance(raw_turns, dict):
            raw_turns = [raw_turns]
        require(isinstance(raw_turns, list) and bool(raw_turns), f"column {name!r}", raw_turns, "a list of turns")
        turns = []
        for number, turn in enumerate(raw_turns):
            speaker = str(turn.get("from", turn.get("role")) if isinstance(turn, dict) else None)
            if speaker not in SPEAKERS:
                names = ", ".join(SPEAKERS)
                raise UserError(
                    f"turn {number} is {truncate(turn, 60)}, but its 'from' or 'role' must be one of {names}"
                )
            value = turn.get("value", turn.get("content"))
            is_parts = isinstance(value, list) and all(isinstance(p, dict) and p.keys() & PART_KEYS for p in value)
            if not (value is None or isinstance(value, str) or is_parts):
                value = json.dumps(value, ensure_ascii=False)  # in VLM-R1, answers may be numbers, boxes or objects
            if value is None and not turn.get("tool_calls"):
                raise UserError(
                    f"turn {number} of {name!r} has no text in 'value' or 'content', only the keys {[*turn]}"
                )
            if speaker in ("function_call", "tool_call"):
                with error_context(f"turn {number}: tool call"):
                    call = parse_json(str(value))
                    expected = 'a JSON object with the name of a tool, such as {"name": "zoom"}'
                    require(isinstance(call, dict) and "name" in call, "the call", value, expected)
                value = f"<tool_call>\n{str(value).strip()}\n</tool_call>"
            kept = {key: turn[key] for key in KEPT_KEYS if turn.get(key) not in (None, "", [])}
            lost = turn.keys() - {"from", "role", "value", "content", *KEPT_KEYS}
            self.dropped.update(f"key {key!r} of turns" for key in lost if turn[key] not in (None, "", [], {}))
            turns.append(turn_of(SPEAKERS[speaker], value) | kept)
        return turns


def prepare(row: dict, dropped: Counter) -> Columns:
    """Parse lists stored as strings, and write boxes, image tags and choices into the text."""
    columns = Columns(row, dropped)
    read_lists(columns)
    fill_objects(columns)
    fill_images(columns)
    number_images(columns)
    add_choices(columns)
    if "kto_tag" in columns and "label" not in columns:
        tag = columns.pop("kto_tag")
        columns["label"] = {"true": True, "false": False}.get(str(tag).lower(), tag)
    return columns


def finish(row: Columns) -> dict:
    """Rename answer, solution and image columns to the names in docs/data.md."""
    name = row.first(ANSWERS[:2])
    if name and not row.keys() & {"messages", "completion", "chosen"}:
        row["completion"] = row.pop(name)
    if "rejected_response" in row and "completion" in row:
        row["chosen"], row["rejected"] = row.pop("completion"), row.pop("rejected_response")
    name = row.first(("reward_model", "answer", "ground_truth"))
    if name and "solution" not in row:
        truth = row.pop(name)
        if name == "reward_model":  # verl: {"style": "rule", "ground_truth": ...}
            row.dropped.update(f"key {key!r} of reward_model" for key in truth if key != "ground_truth")
            truth = truth.get("ground_truth")
        row["solution"] = truth
    if "file_name" in row and not any(row.get(name) for name in MEDIA):
        row["image"] = row.pop("file_name")
    for name in BESIDE:
        row.drop(name)
    return dict(row)


def read_lists(row: Columns):
    """Parse lists stored as JSON or Python strings, as in CSV files and pandas exports."""
    for name in LISTS:
        value = row.get(name)
        if not isinstance(value, str):
            continue
        items = literal_list(value)
        if items is None or (name in ANSWER_TEXTS and not is_list_text(value, name)):
            continue  # an answer such as "[1, 2]" stays text
        is_question = name in QUESTIONS and all(isinstance(item, str) for item in items)
        row[name] = items[0] if is_question and len(items) == 1 else items
    for name in ("image", "images"):
        if isinstance(value := row.get(name), list):  # flatten image lists given per turn
            row[name] = [item for items in value for item in (items if isinstance(items, list) else [items])]


def read_conversations(row: Columns) -> Columns | None:
    """Read {from, value} turns from LLaVA, VLM-R1, ShareGPT or LLaMA-Factory."""
    name = row.first(("conversations", "conversation"))
    if name is None or is_pairs(row[name], "human"):
        return None
    turns = row.turns(name)
    if "rejected_conversations" in row:
        return row.put(chosen=turns, rejected=row.turns("rejected_conversations"))
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if turns[-1]["role"] == "assistant":
        if len(answers) == 1 or str(answers[0] or "").strip():
            row.setdefault("solution", answers[0])
        if len(answers) == 1 and not str(answers[0]).strip():  # the answer is empty if the object is not in the image
            return row.put(prompt=turns[:-1], solution=row["solution"] or "")
    return split_pair(row, turns)


def read_messages(row: Columns) -> Columns | None:
    """Read `messages` from ms-swift, possibly with a rejected answer or a label."""
    turns = row.get("messages")
    is_list = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if not is_list or "problem" in row or "prompt" in row or isinstance(row.get("chosen"), list):
        return None
    turns = row.turns("messages")
    answer = next((turn["content"] for turn in turns if turn["role"] == "assistant"), None)
    is_right = turns[-1]["role"] == "assistant" and "label" not in row  # a KTO label may mark a wrong answer
    if isinstance(answer, str) and answer.strip() and is_right:  # a turn with a tool call may have empty content
        row.setdefault("solution", answer)
    return split_pair(row, turns)


def read_pairs(row: Columns) -> Columns | None:
    """Read question-answer pairs: `conversation` from ms-swift or `texts` from the_cauldron."""
    for name, question, answer in (("conversation", "human", "assistant"), ("texts", "user", "assistant")):
        if is_pairs(row.get(name), question):
            turns = []
            for pair in row.pop(name):
                turns += [turn_of("user", pair[question]), turn_of("assistant", pair.get(answer, ""))]
                row.dropped.update(
                    f"key {key!r} of {name}" for key in pair if key not in (question, answer) and pair[key]
                )
            return row.put(messages=turns)
    return None


def is_pairs(value: Plain, asked: str) -> bool:
    """Return True for a non-empty list of dicts that all have the key named by `asked`."""
    return isinstance(value, list) and bool(value) and all(isinstance(pair, dict) and asked in pair for pair in value)


def read_question(asked: str) -> Reader:
    """Create a reader for a question column, such as "query", and an answer column."""

    def read(row: Columns) -> Columns | None:
        if asked not in row or "conversations" in row or has_prompt(row):
            return None
        question = row.pop(asked)
        if extra := row.pop("input", None):  # in Alpaca, `input` is the second part of the question
            question = f"{question}\n{extra}"
        turns = []
        history = row.pop("history", ())
        for pair in history:
            require(
                isinstance(pair, list) and len(pair) == 2,
                "column 'history'",
                history,
                "a list of [question, answer] pairs",
            )
            turns += [turn_of("user", pair[0]), turn_of("assistant", pair[1])]
        row["prompt"] = [*turns, turn_of("user", question)]
        if name := row.first(ANSWERS):
            answer = row.pop(name)
            row.setdefault("solution", answer)
            if isinstance(answer, str) and answer.strip() and "chosen" not in row:
                row["completion"] = answer
        return row

    return read


def read_rendered(row: Columns) -> Columns | None:
    """Read a conversation that was rendered with Qwen's chat template."""
    names = [name for name in ("text", "prompt", "problem") if str(row.get(name)).lstrip().startswith("<|im_start|>")]
    if not names:
        return None
    name = names[0]
    text = row.pop(name).strip().removesuffix("<|endoftext|>").removesuffix("<|im_start|>assistant").rstrip()
    turns = [turn_of(role, VISION.sub(r"<\1>", content)) for role, content in RENDERED.findall(text)]
    if RENDERED.sub("", text).strip() or not turns:
        raise UserError(
            f"column {name!r}: {truncate(text, 80)} is not a whole conversation of <|im_start|> and <|im_end|>"
        )
    is_whole = turns[-1]["role"] == "assistant" and name == "text"
    return row.put(**{"messages" if is_whole else "prompt": turns})


def read_ours(row: Columns) -> Columns | None:
    """Read a row in minivlmrl's layout, converting only its role names."""
    if not has_prompt(row) and not row.first(("file_name", *MEDIA)):
        return None
    for name in ("prompt", "completion", "chosen", "rejected"):
        if isinstance(row.get(name), list | dict):
            row[name] = row.turns(name)
    talks: list[Plain] = [row.get(name) for name in ("chosen", "rejected")]
    if all(isinstance(talk, list) and talk and talk[0]["role"] != "assistant" for talk in talks):
        # `chosen` and `rejected` already contain the prompt, as in UltraFeedback
        row.drop("messages")
        if prompt := row.pop("prompt", row.pop("problem", None)):
            asked = text_of(as_turns(prompt, "user")[-1])
            if asked not in [text_of(turn) for turn in talks[0] if turn["role"] == "user"]:
                raise UserError(
                    f"the prompt {truncate(asked, 60)} is not a turn of the conversation `chosen`; remove the prompt, "
                    "or the turns before the answer in `chosen` and `rejected`"
                )
    return row


READERS: dict[str, Reader] = {
    "conversations": read_conversations,
    "messages": read_messages,
    "pairs": read_pairs,
    "query": read_question("query"),
    "alpaca": read_question("instruction"),
    "prefix": read_question("prefix"),
    "question": read_question("question"),
    "rendered": read_rendered,
    "ours": read_ours,  # minivlmrl's own layout, tried last
}


def has_prompt(row: dict) -> bool:
    return any(name in row for name in ("problem", "prompt", "messages")) or isinstance(row.get("chosen"), list)


def turn_of(role: str, content: Plain) -> dict:
    return {"role": role, "content": content}


def split_pair(row: Columns, turns: list[dict]) -> Columns:
    """Add a conversation to a row, as a chosen-rejected pair if there is a rejected answer."""
    if turns[-1]["role"] != "assistant":  # without a final answer, all turns are the prompt
        for name in ("chosen", "rejected"):  # LLaMA-Factory stores each answer as a single turn
            if isinstance(row.get(name), dict):
                row[name] = row.turns(name)
        return row.put(prompt=turns)
    name = "rejected_messages" if row.get("rejected_messages") else "rejected_response"
    if name not in row:
        return row.put(messages=turns)
    rejected = row.turns(name) if isinstance(row[name], list) else row.pop(name)
    if isinstance(rejected, list) and rejected[0]["role"] != "assistant":
        return row.put(chosen=turns, rejected=rejected)
    start = [turn["role"] for turn in turns].index("assistant")
    return row.put(prompt=turns[:start], chosen=turns[start:], rejected=rejected)


def add_choices(row: Columns):
    """Append choices from `options`, `choices` or A, B, C to a question without choices."""
    used = [name for name in ("options", "choices") if row.get(name)][:1]
    choices: Plain = row[used[0]] if used else []
    if not used and {"A", "B"} <= row.keys():
        used = [letter for letter in LETTERS if letter in row]
        choices = [row[letter] for letter in used]
    column = row.first(QUESTIONS)
    if not used or column is None:
        return
    is_list = isinstance(choices, list) and len(choices) <= len(LETTERS)
    require(is_list, "the list of choices", row[used[0]], "a list of at most 26 texts")
    if any(FILE_NAMES["image"].fullmatch(str(choice)) for choice in choices):
        raise UserError(
            f"the choices {truncate(choices, 60)} seem to be images, which the prompt must show; see --format"
        )
    answer = str(row.get("answer", row.get("solution"))).strip()
    # reject a choice index, as in AI2D: it may start at 0 or 1
    is_choice = not answer.isdecimal() or answer in map(str, choices)
    require(is_choice, "the answer", answer, "a letter or one of the choices of the row; write it with --format")
    names = LETTERS[: len(choices)]
    if not isinstance(row[column], str) or all(re.search(rf"\b{letter}[.:)]", row[column]) for letter in names):
        for name in used:  # the question already lists the choices
            row.drop(name)
        return
    lines = [row.pop("hint", ""), row[column]]
    for letter, choice in zip(names, choices, strict=True):
        lines.append(f"{letter}. " + re.sub(r"^[A-Z][.:)]\s*", "", str(choice)))
    for name in used:
        del row[name]
    row[column] = "\n".join(lines).strip()


def fill_objects(row: Columns):
    """Replace ms-swift's <ref-object> and <bbox> tags with names and boxes from `objects`."""
    text = json.dumps([value for name, value in row.items() if name != "objects"], default=str)
    if "objects" not in row or not any(tag in text for tag in TAGS):
        return
    objects = row.pop("objects")
    objects = parse_json(objects) if isinstance(objects, str) else objects
    if isinstance(objects, list):  # older ms-swift files have a list of objects
        objects = {
            "ref": [one["caption"] for one in objects],
            "bbox": [box for one in objects for box in one["bbox"]],
            "bbox_type": next((one.get("bbox_type") for one in objects), None),
        }
    require(objects.get("bbox_type") in (None, "real"), "bbox_type", objects.get("bbox_type"), "real, or missing")
    row.dropped.update(f"key {key!r} of objects" for key in objects.keys() - {"ref", "bbox", "bbox_type"})
    items = {}
    for tag, name in TAGS.items():
        values = (objects.get(name) or []) if tag in text else []
        if len(values) != text.count(tag):
            raise UserError(
                f"column 'objects' has {pluralize(len(values), 'item')} in {name!r}, but the texts contain {tag} "
                f"{pluralize(text.count(tag), 'time')}"
            )
        items[tag] = iter(value if isinstance(value, str) else json.dumps(value) for value in values)
    replace_texts(row, "|".join(TAGS), lambda tag: next(items[tag[0]]))
    if "<bbox>" in text:
        row.dropped[BOX_UNIT] += 1


def fill_images(row: Columns):
    """Replace Qwen-VL's <img>cat.jpg</img> with <image>, and add the files to `images`."""
    paths = []
    if row.first(MEDIA):
        return

    def collect(tag: re.Match) -> str:
        paths.append(tag[1])
        return "<image>"

    replace_texts(row, "<img>(.*?)</img>", collect)
    if paths:
        row["images"] = paths


def number_images(row: Columns):
    """Replace <image 1>, <image 2> ... with <image>; raise UserError if they are out of order."""
    texts = json.dumps([value for name, value in row.items() if name not in MEDIA], default=str)
    if "<image>" in texts or not row.first(MEDIA):
        return
    numbers = [int(number) for number in OTHER_TAG.findall(texts) if number]
    if numbers != list(range(1, len(numbers) + 1)):
        raise UserError(f"the tags of images have the numbers {numbers}, but each image must be shown once, in order")
    replace_texts(row, OTHER_TAG, lambda tag: "<image>")


def replace_texts(row: Columns, pattern: str | re.Pattern, change: Callable[[re.Match], str]):
    for name, value in row.items():
        row[name] = map_nested(value, lambda text: re.sub(pattern, change, text))


def fitting(row: dict, names: Iterable[str] = READERS) -> list[str]:
    fits = []
    for name in names:
        columns = prepare(row, Counter())
        with suppress(ValueError):  # the layout matches, but this row is invalid
            if READERS[name](columns) is None:
                continue
        fits.append(name)
    return [name for name in fits if name != "ours"] or fits
