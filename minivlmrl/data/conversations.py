"""The text of a row, in any of TRL's forms, becomes a prompt's messages and its answers."""

from collections.abc import Callable
from functools import partial

from minivlmrl.chat import content_parts, part_kind, render
from minivlmrl.data.forms import ASKING, ROLES
from minivlmrl.data.media import MARK, Media, place_media
from minivlmrl.data.turns import as_turns, check_ends, check_messages, shown_parts_of, text_of
from minivlmrl.hub.recipe_values import naming

# a column with text, and the types that it may have; of PROMPTS a row has one, or none: see _split
PROMPTS = {"problem": (str,), "prompt": (str, list), "messages": (list,)}
ANSWERS = {"completion": (str, list), "chosen": (str, list), "rejected": (str, list)}
TEXT_COLUMNS = PROMPTS | ANSWERS
TYPE_WORDS = {str: "text", list: "a list of turns"}


def read_conversation(
    row: dict, listed: dict[str, list[Media]], prompt_template, system_prompt, media_options
) -> tuple[list[dict], list[Media], dict[str, str | list[dict]]]:
    """Find the prompt of a row, what its parts show in order, and its answers by column.

    Args:
        row: columns, of which these are read; None counts as missing. Turns are messages as in
            chat.render. problem, prompt: text; or prompt: turns. Text, or that of the last user
            turn, goes through prompt_template. messages: a whole conversation. All before its first
            assistant turn is the prompt, the rest the completion. completion, chosen, rejected:
            text, or turns that begin and end with one of the assistant's. chosen, rejected: alone
            two whole conversations; what both begin with is the prompt (TRL's implicit one).
        listed, media_options: see place_media.
    """
    written = {column: row[column] for column in TEXT_COLUMNS if row.get(column) is not None}
    for column, value in written.items():
        with naming(f"column {column!r}"):
            _check_column(value, TEXT_COLUMNS[column])
    pair = [render(as_turns(written[name])) for name in ("chosen", "rejected") if name in written]
    if len(pair) == 2 and pair[0] == pair[1]:
        raise ValueError("column 'rejected' equals column 'chosen': drop the row")
    source, prompt, answers = _split(written, row)
    place = partial(_place, prompt, listed, prompt_template, system_prompt, media_options)
    messages = None
    for name, answer in answers.items():
        with naming(f"column {(name if name in written else source)!r}"):
            turns = as_turns(answer)
            _check_answer(turns)
            if _shows_images(turns):
                messages, media, answers[name] = _place_answer(place, turns)
    if messages is None:
        with naming(f"column {source!r}"):
            messages, media = place()
    return messages, media, answers


def _check_column(value: object, types: tuple[type, ...]):
    """Refuse what is neither text nor turns, and turns that cannot be laid out."""
    if not isinstance(value, types):
        words = " or ".join(TYPE_WORDS[kind] for kind in types)
        raise ValueError(f"must be {words}, it is {value!r:.40}")
    turns = as_turns(value)
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


def conversation(
    prompt: str | list[dict], media: dict[str, int], prompt_template="{problem}", system_prompt=None
) -> list[dict]:
    """Make messages that ask about a problem, or a prompt's turns, and show so many media."""
    listed = {kind: [Media(kind, "", {})] * count for kind, count in media.items()}
    return _place(prompt, listed, prompt_template, system_prompt)[0]


def _place(prompt, listed, prompt_template, system_prompt, media_options=None, answer=()) -> tuple:
    """Return the messages of a prompt and an answer, and what their parts show."""
    turns = as_turns(prompt, "user")
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move that turn into the answers")
    if prompt_template != "{problem}":
        turns = _fill_template(prompt_template, turns)
    messages, media = place_media([*turns, *answer], listed, media_options or {})
    if system_prompt is not None and (not turns or turns[0]["role"] != "system"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages, media


def _fill_template(template: str, turns: list[dict]) -> list[dict]:
    """Put the question, the text of the last user turn, into a template."""
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = list(content_parts(turns[last])) if last >= 0 else []
    texts = [i for i, part in enumerate(parts) if part_kind(part) == "text"]
    if len(texts) != 1:
        raise ValueError(
            "data.prompt_template is put around one text, but the last user turn of this prompt "
            f"has {len(texts)}; make it one"
        )
    question = parts[texts[0]]["text"]
    parts[texts[0]] = {"type": "text", "text": template.replace("{problem}", question)}
    return [*turns[:last], {**turns[last], "content": parts}, *turns[last + 1 :]]


def _split(written: dict, row: dict) -> tuple[str, str | list[dict], dict]:
    """Tell prompt and answers apart; also name the column that the prompt is from."""
    sources = [column for column in written if column in PROMPTS]
    if sources == ["messages"] and "completion" in written:
        sources.append("completion")
    if len(sources) > 1:
        raise ValueError(f"columns {sources[0]!r} and {sources[1]!r} say the same thing; keep one")
    answers = {column: value for column, value in written.items() if column in ANSWERS}
    if not sources:
        prompt, answers = _implicit_prompt(answers, sorted(row))
        return "chosen", prompt, answers
    prompt = written[sources[0]]
    if sources == ["messages"]:
        start = [turn["role"] for turn in prompt].index("assistant")
        answers = {"completion": prompt[start:], **answers}
        prompt = prompt[:start]
    return sources[0], prompt, answers


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Return the turns that chosen and rejected begin with, and the answers without them."""
    chosen = answers.get("chosen")
    rejected = answers.get("rejected")
    start = 0  # turns that they share
    if isinstance(chosen, list) and isinstance(rejected, list):
        for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
            if chosen_turn != rejected_turn:
                break
            start += 1
    if start == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}; name its question, data.columns: "
            "{YOURS: problem}, ask all rows the same, data.prompt_template: 'What is it?', or use "
            f"a form: {', '.join(ASKING)}"
        )
    return chosen[:start], {**answers, "chosen": chosen[start:], "rejected": rejected[start:]}
