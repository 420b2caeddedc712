"""The text of a row, in any of TRL's forms, becomes a prompt's messages and its answers."""

from collections.abc import Callable
from functools import partial
from types import UnionType

from minivlmrl.config.parsing import naming
from minivlmrl.config.types import Plain
from minivlmrl.data.chat_template import render
from minivlmrl.data.formats import QUESTION_FORMS, ROLES
from minivlmrl.data.media import Media, place_media
from minivlmrl.data.messages import (
    MARK,
    add_system_prompt,
    as_turns,
    check_ends,
    check_messages,
    fill_template,
    part_kind,
    shown_parts_of,
    text_of,
)

# a column with text, and the types that it may have; of PROMPTS a row has one, or none: see _split
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXT_COLUMNS = PROMPTS | ANSWERS
TYPE_WORDS = {str: "text", list: "a list of turns", str | list: "text or a list of turns"}


def read_conversation(
    row: dict, row_media: dict[str, list[Media]], prompt_template, system_prompt, media_options
) -> tuple[list[dict], list[Media], dict[str, str | list[dict]]]:
    """Find the prompt of a row, what its parts show in order, and its answers by column.

    Args:
        row: columns, of which these are read; None counts as missing. Turns are messages as in
            chat.render. problem, prompt: text; or prompt: turns. Text, or that of the last user
            turn, goes through prompt_template. messages: a whole conversation. All before its first
            assistant turn is the prompt, the rest the completion. completion, chosen, rejected:
            text, or turns that begin and end with one of the assistant's. chosen, rejected: alone
            two whole conversations; what both begin with is the prompt (TRL's implicit one).
        row_media, media_options: see place_media.
    """
    row_texts = {column: row[column] for column in TEXT_COLUMNS if row.get(column) is not None}
    for column, text_or_turns in row_texts.items():
        with naming(f"column {column!r}"):
            _check_column(text_or_turns, TEXT_COLUMNS[column])
    pair = ("chosen", "rejected")
    rendered = [render(as_turns(row_texts[name])) for name in pair if name in row_texts]
    if len(rendered) == 2 and rendered[0] == rendered[1]:
        raise ValueError("column 'rejected' equals column 'chosen': drop the row")
    prompt_column, prompt, answers = _split(row_texts, row)
    place = partial(_place, prompt, row_media, prompt_template, system_prompt, media_options)
    messages = None
    for answer_column, answer in answers.items():
        column = answer_column if answer_column in row_texts else prompt_column
        with naming(f"column {column!r}"):
            turns = as_turns(answer)
            _check_answer(turns)
            if _shows_images(turns):
                messages, media, answers[answer_column] = _place_answer(place, turns)
    if messages is None:
        with naming(f"column {prompt_column!r}"):
            messages, media = place()
    return messages, media, answers


def _check_column(text_or_turns: Plain, types: type | UnionType):
    """Refuse what is neither text nor turns, and turns that cannot be laid out."""
    if not isinstance(text_or_turns, types):
        raise ValueError(f"must be {TYPE_WORDS[types]}, it is {text_or_turns!r:.40}")
    turns = as_turns(text_or_turns)
    check_messages(turns)
    roles = [turn["role"] for turn in turns]
    if not turns or not set(roles) <= set(ROLES):
        raise ValueError(f"needs turns with the roles {', '.join(ROLES)}; it has {roles}")


def _check_answer(turns: list[dict]):
    """Refuse an answer in which the assistant says nothing."""
    check_ends(turns)
    for turn in turns:
        is_blank = not text_of(turn).strip() and not turn.get("tool_calls")
        if turn["role"] == "assistant" and is_blank:
            raise ValueError("an answer is empty or blank; write it or drop the row")


def _shows_images(turns: list[dict]) -> bool:
    """Tell whether an answer shows something; <image> in a text of the assistant is text."""
    for turn in turns:
        if turn["role"] != "assistant" and MARK.search(text_of(turn)):
            return True
    return bool(shown_parts_of(turns))


def _place_answer(place: Callable, turns: list[dict]) -> tuple[list[dict], list[Media], list[dict]]:
    """Return the messages of the prompt, what they show, and the answer with its images in it."""
    conversation, media = place(turns)
    answer = conversation[-len(turns) :]
    shown_parts = shown_parts_of(answer)
    if any(part_kind(part) == "video" for part in shown_parts):
        raise ValueError("there is a video after the assistant's first turn; put it in the prompt")
    for part in reversed(shown_parts):  # the last of the media; those before are the prompt's
        part["image"] = media.pop()  # file_dataset.py reads it
    return conversation[: -len(turns)], media, answer


def _place(prompt, row_media, prompt_template, system_prompt, media_options, answer=()) -> tuple:
    """Return the messages of a prompt and an answer, and what their parts show."""
    turns = as_turns(prompt, "user")
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move that turn into the answers")
    if prompt_template != "{problem}":
        turns = fill_template(prompt_template, turns)
    messages, media = place_media([*turns, *answer], row_media, media_options)
    return add_system_prompt(messages, system_prompt), media


def _split(row_texts: dict, row: dict) -> tuple[str, str | list[dict], dict]:
    """Tell prompt and answers apart; also name the column that the prompt is from."""
    prompt_columns = [column for column in row_texts if column in PROMPTS]
    if prompt_columns == ["messages"] and "completion" in row_texts:
        prompt_columns.append("completion")
    if len(prompt_columns) > 1:
        raise ValueError(
            f"columns {prompt_columns[0]!r} and {prompt_columns[1]!r} say the same thing; keep one"
        )
    answers = {column: value for column, value in row_texts.items() if column in ANSWERS}
    if not prompt_columns:
        prompt, answers = _implicit_prompt(answers, sorted(row))
        return "chosen", prompt, answers
    prompt = row_texts[prompt_columns[0]]
    if prompt_columns == ["messages"]:
        answer_start = [turn["role"] for turn in prompt].index("assistant")
        answers = {"completion": prompt[answer_start:], **answers}
        prompt = prompt[:answer_start]
    return prompt_columns[0], prompt, answers


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Return the turns that chosen and rejected begin with, and the answers without them."""
    chosen = answers.get("chosen")
    rejected = answers.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        chosen = rejected = []
    num_shared = 0  # turns that they share
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if chosen_turn != rejected_turn:
            break
        num_shared += 1
    if num_shared == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}; name its question, data.columns: "
            "{YOURS: problem}, ask all rows the same, data.prompt_template: 'What is it?', or use "
            f"a form: {', '.join(QUESTION_FORMS)}"
        )
    endings = {"chosen": chosen[num_shared:], "rejected": rejected[num_shared:]}
    return chosen[:num_shared], answers | endings
