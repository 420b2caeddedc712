"""Rows as other projects write them -> the columns that we read.

Forms add up: a row may have `conversations`, and `file_name` too. docs/data.md has examples.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import chain, cycle

from minivlmrl.hub.folder import parse_json
from minivlmrl.hub.recipe_values import naming, require

QUESTIONS = ("problem", "prompt", "messages")
ROLES = {  # role: who `from` says
    "system": "system",
    "user": "human user",
    "assistant": "gpt assistant chatgpt bing model function_call tool_call",
    "tool": "observation tool tool_response function",
}
SPEAKERS = {name: role for role, names in ROLES.items() for name in names.split()}


def to_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Return the row with columns `renamed`, and with those of every form that fits it."""
    for theirs, ours in renamed.items():
        if row.get(theirs) is not None:
            if row.get(ours) is not None:
                raise ValueError(f"data.columns calls {theirs!r} {ours!r}; leave one of both out")
            row = {**row, theirs: None, ours: row[theirs]}
    for name, (keys, unless, read) in FORMS.items():
        if None not in map(row.get, keys) and [*map(row.get, unless)].count(None) == len(unless):
            try:
                row = row | ({read: row[name]} if isinstance(read, str) else read(row))
            except ValueError as error:
                raise ValueError(f"form {name!r}: {error}") from error
    return row


def _conversations(row: dict) -> dict:
    """Read turns of `from` and `value`: VLM-R1, LLaVA, sharegpt; the first answer is a solution."""
    listed = row["conversations"]
    require(isinstance(listed, list), "column 'conversations'", listed, "a list of turns")
    turns = _system(row) + [_turn(turn, number) for number, turn in enumerate(listed)]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not answers or turns[-1]["role"] != "assistant":  # without an answer it is a prompt
        return {"messages": None, "prompt": turns}
    negative = len(answers) == 1 and isinstance(answers[0], str) and not answers[0].strip()
    columns = {"messages": None, "prompt": turns[:-1]} if negative else _answered(turns, row)
    if row.get("solution") is None:
        columns["solution"] = "" if negative else answers[0]
    return columns


def _answered(turns: list[dict], row: dict) -> dict:
    """Read a conversation with its answer; ms-swift has a worse one in `rejected_response`."""
    if row.get("rejected_response") is None:
        return {"messages": turns}
    start = [turn.get("role") for turn in turns].index("assistant")
    answers = {"chosen": turns[start:], "rejected": row["rejected_response"]}
    return {"messages": None, "prompt": turns[:start], **answers, **_chosen(answers)}


def _turn(turn: dict, number: int) -> dict:
    speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(f"turn {number} is {turn!r:.60}; 'from' has to be {', '.join(SPEAKERS)}")
    value = turn.get("value", turn.get("content"))
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # of VLM-R1
        value = str(value)
    if speaker in ("function_call", "tool_call"):  # laid out as Qwen writes it
        with naming(f"the call of turn {number}"):
            call = parse_json(str(value))
            require(isinstance(call, dict) and "name" in call, "it", value, 'JSON: {"name": ...}')
        value = f"<tool_call>\n{value.strip()}\n</tool_call>"
    return {"role": SPEAKERS[speaker], "content": value}


def _system(row: dict) -> list[dict]:
    """Read the system message of LLaMA-Factory and ms-swift, which is in a column."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _messages(row: dict) -> dict:
    """Read `messages`; of ms-swift they are a prompt if they end with the user's turn."""
    turns = row["messages"]
    if not turns or not isinstance(turns, list) or not all(isinstance(x, dict) for x in turns):
        return {}  # conversations.py says what is wrong
    other = SPEAKERS.keys() - ROLES.keys()
    turns = [_turn(x, i) if str(x.get("role")) in other else x for i, x in enumerate(turns)]
    if turns[-1].get("role") == "assistant":
        return _answered(turns, row)
    return {"messages": None, "prompt": turns}


def _asked(question: str, answer: str, row: dict) -> dict:
    """Read a question and its answer in two columns; `history` has earlier pairs."""
    text = row[question]
    reply = row.get(answer)
    require(isinstance(text, str), f"column {question!r}", text, "text")
    if row.get("input"):  # Alpaca's
        text = f"{text}\n{row['input']}"
    before = row.get("history") or []
    for pair in before if isinstance(before, list) else [before]:
        paired = isinstance(pair, list) and len(pair) == 2
        require(paired, "column 'history'", before, "a list of pairs: a question, its answer")
    turns = zip(cycle(("user", "assistant")), [*chain(*before), text], strict=False)
    turns = [{"role": role, "content": content} for role, content in turns]
    columns = {"prompt": [*_system(row), *turns]}
    if reply is not None and row.get("solution") is None:
        columns["solution"] = reply
    if isinstance(reply, str) and reply.strip() and row.get("chosen") is None:
        columns["completion"] = reply
    return columns


def _chosen(row: dict) -> dict:
    """Read answers of LLaMA-Factory, which are turns of `from` and `value`."""
    names = (name for name in ("chosen", "rejected") if isinstance(row.get(name), dict))
    return {name: [_turn(row[name], 0)] for name in names}


def _ground_truth(row: dict) -> dict:
    """Read verl's {"style": "rule", "ground_truth": ...}."""
    rule = row["reward_model"]
    return {"solution": rule.get("ground_truth")} if isinstance(rule, dict) else {}


def _objects(row: dict) -> dict:
    """Fill <ref-object> and <bbox> of ms-swift's texts with `ref` and `bbox` of `objects`."""
    objects = row["objects"]
    texts = _texts(row)
    written = json.dumps(texts, default=str)
    waiting = {}
    for key, mark in (("ref", "<ref-object>"), ("bbox", "<bbox>")):
        if marks := written.count(mark):
            listed = objects.get(key) if isinstance(objects, dict) else None
            count = len(listed) if isinstance(listed, list) else 0
            if count != marks:
                raise ValueError(f"column 'objects' has {count} {key}, the texts {marks} {mark}")
            waiting[mark] = (item if isinstance(item, str) else json.dumps(item) for item in listed)

    def fill(text: str) -> str:
        return re.sub("|".join(waiting), lambda mark: next(waiting[mark[0]]), text)

    return changed(texts, fill) if waiting else {}


def _choices(row: dict) -> dict:
    """Write choices, of a list or MMBench's columns A, B, ..., after a question without them."""
    columns = [row[letter] for letter in LETTERS if row.get(letter) is not None]
    choices = row.get("options") or row.get("choices") or columns
    name = next((name for name in ASKED if isinstance(row.get(name), str)), None)
    if not choices or name is None:  # an open question; turns, whose text is the whole prompt
        return {}
    answer = row.get("answer", row.get("solution"))
    valid = isinstance(choices, list)
    require(valid and len(choices) <= 26, "its choices", choices, "a list of texts")
    valid = not isinstance(answer, int) or answer in choices
    require(valid, "the answer beside choices", answer, "a letter or one of them")
    if all(re.search(rf"\b{letter}[.:)]", row[name]) for letter in LETTERS[: len(choices)]):
        return {}
    texts = (re.sub(r"^[A-Z][.:)]\s*", "", str(choice)) for choice in choices)
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    return {name: "\n".join([row.get("hint") or "", row[name], *lines]).strip()}


def _pictures_in_text(row: dict) -> dict:
    """Read <img>path</img> of texts, as Qwen-VL and older ms-swift write it."""
    texts = _texts(row)
    paths = re.findall("<img>(.*?)</img>", json.dumps(texts, ensure_ascii=False, default=str))
    marked = changed(texts, lambda text: re.sub("<img>.*?</img>", "<image>", text))
    return {**marked, "images": paths} if paths else {}


def _texts(row: dict) -> dict:
    """Return the columns with text that a row has."""
    return {name: row[name] for name in TEXTS if row.get(name) is not None}


def changed(value, change: Callable, kinds=str):
    """Return the same lists and objects with another text for each, or for values of these types."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, list):
        return [changed(item, change, kinds) for item in value]
    if isinstance(value, dict):
        return {key: changed(item, change, kinds) for key, item in value.items()}
    return value


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ASKED = ("problem", "question", "query", "instruction", "prefix", "prompt")  # a question as text
TEXTS = ("problem", "prompt", "messages", "completion", "chosen", "rejected", "solution")
SHOWN = ("image", "images", "video", "videos")
READ = (*QUESTIONS, "completion")  # a row that has one is in our form
# form: a row with all these columns, none of those, and what returns the columns that it adds,
# or what its column is called here
FORMS = {
    "A, B": (("A", "B"), ("options", "choices"), _choices),
    "options": (("options",), (), _choices),
    "choices": (("choices",), ("options",), _choices),
    "conversations": (("conversations",), QUESTIONS, _conversations),
    "messages": (("messages",), ("problem", "prompt", "completion"), _messages),
    "prefix and suffix": (("prefix", "suffix"), READ, partial(_asked, "prefix", "suffix")),
    "query": (("query",), READ, partial(_asked, "query", "response")),
    "instruction": (("instruction",), READ, partial(_asked, "instruction", "output")),
    "question": (("question",), READ, partial(_asked, "question", "answer")),
    "chosen": (("chosen", "rejected"), (), _chosen),
    "kto_tag": (("kto_tag",), ("label",), "label"),
    "answer": (("answer",), ("solution",), "solution"),
    "reward_model": (("reward_model",), ("solution",), _ground_truth),
    "ground_truth": (("ground_truth",), ("solution",), "solution"),
    "file_name": (("file_name",), SHOWN, "image"),
    "objects": (("objects",), (), _objects),
    "<img>": ((), SHOWN, _pictures_in_text),
}
# these have a question
ASKING = [name for name, (_, unless, _) in FORMS.items() if "problem" in unless]
