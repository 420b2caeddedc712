"""The text of a row, in any of TRL's forms, becomes a prompt's messages and its answers."""

from itertools import takewhile

from minivlmrl.chat import content_parts, part_kind, render
from minivlmrl.data.forms import ASKING, ROLES
from minivlmrl.data.media import MARK, Media, place_media
from minivlmrl.data.turns import as_turns, check_ends, check_messages, shown_parts_of, text_of
from minivlmrl.hub.recipe_values import naming

# a row has one of them, or none: see _split
PROMPTS = {"problem": (str,), "prompt": (str, list), "messages": (list,)}
ANSWERS = dict.fromkeys(("completion", "chosen", "rejected"), (str, list))
FORMS = PROMPTS | ANSWERS  # column: what it may be
WORDS = {str: "text", list: "a list of turns"}


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
    written = {column: row[column] for column in FORMS if row.get(column) is not None}
    for column, value in written.items():
        with naming(f"column {column!r}"):
            if not isinstance(value, FORMS[column]):
                words = " or ".join(WORDS[kind] for kind in FORMS[column])
                raise ValueError(f"must be {words}, it is {value!r:.40}")
            check_messages(turns := as_turns(value))
            roles = [turn["role"] for turn in turns]
            if not turns or not set(roles) <= ROLES.keys():
                raise ValueError(f"needs turns with the roles {', '.join(ROLES)}; it has {roles}")
    pair = [render(as_turns(written[name])) for name in ("chosen", "rejected") if name in written]
    if len(pair) == 2 and pair[0] == pair[1]:
        raise ValueError("column 'rejected' equals column 'chosen': drop the row")
    source, prompt, answers = _split(written, row)
    wording = prompt, listed, prompt_template, system_prompt, media_options
    messages = None
    for name, answer in answers.items():
        with naming(f"column {(name if name in written else source)!r}"):
            turns = as_turns(answer)
            check_ends(turns)
            assistant = [turn for turn in turns if turn["role"] == "assistant"]
            if not all(text_of(turn).strip() or turn.get("tool_calls") for turn in assistant):
                raise ValueError("an answer is empty or blank; write it or drop the row")
            others = [text_of(turn) for turn in turns if turn["role"] != "assistant"]
            # <image> in a text of the assistant is text
            if not any(map(MARK.search, others)) and not shown_parts_of(turns):
                continue
            whole, media = _place(*wording, turns)
            messages = whole[: -len(turns)]
            answers[name] = whole[-len(turns) :]
            parts = shown_parts_of(answers[name])
            if any(part_kind(part) == "video" for part in parts):
                late = "there is a video after the assistant's first turn"
                raise ValueError(f"{late}; put it in the prompt")
            for part in reversed(parts):  # which file_dataset.py reads; the others are the prompt's
                part["image"] = media.pop()
    with naming(f"column {source!r}"):
        return *((messages, media) if messages else _place(*wording)), answers


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
        turns = _fill(prompt_template, turns)
    messages, media = place_media([*turns, *answer], listed, media_options or {})
    if system_prompt is not None and (not turns or turns[0]["role"] != "system"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages, media


def _fill(template: str, turns: list[dict]) -> list[dict]:
    """Put the question, the text of the last user turn, into a template."""
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = list(content_parts(turns[last])) if last >= 0 else []
    texts = [i for i, part in enumerate(parts) if part_kind(part) == "text"]
    if len(texts) != 1:
        has = f"the last user turn of this prompt has {len(texts)}"
        raise ValueError(f"data.prompt_template is put around one text, but {has}; make it one")
    [at] = texts
    parts[at] = {"type": "text", "text": template.replace("{problem}", parts[at]["text"])}
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
        return "chosen", *_implicit_prompt(answers, sorted(row))
    prompt = written[sources[0]]
    if sources == ["messages"]:
        start = [turn["role"] for turn in prompt].index("assistant")
        prompt, answers = prompt[:start], {"completion": prompt[start:], **answers}
    return sources[0], prompt, answers


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Return the turns that chosen and rejected share, and the answers without them."""
    both = {column: answers.get(column) for column in ("chosen", "rejected")}
    listed = all(isinstance(turns, list) for turns in both.values())
    pairs = zip(*both.values(), strict=False) if listed else ()
    start = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))  # turns that they share
    if start == 0:
        cure = "name its question, data.columns: {YOURS: problem}, ask all rows the same, "
        cure += f"data.prompt_template: 'What is it?', or use a form: {', '.join(ASKING)}"
        raise ValueError(f"column 'problem' is missing; the row has {columns}; {cure}")
    return both["chosen"][:start], answers | {name: turns[start:] for name, turns in both.items()}
