"""The text of a row, in whichever of TRL's forms it is, becomes a prompt's messages and the answers to it."""

import re

from minivlmrl.chat import content_parts, part_kind, render
from minivlmrl.data.forms import nearest_form
from minivlmrl.data.media import check_counts, has_source
from minivlmrl.data.turns import as_turns, check_ends, check_messages
from minivlmrl.hub.checker import naming

KINDS = ("image", "video")  # <image> and <video> in a prompt's text are where one goes
ROLES = ("system", "user", "assistant", "tool")
PROMPTS = {"problem": (str,), "prompt": (str, list), "messages": (list,)}  # a row has one of them, or none: see _split
ANSWERS = dict.fromkeys(("completion", "chosen", "rejected"), (str, list))
FORMS = PROMPTS | ANSWERS  # column: what it may be


def read_conversation(
    row: dict, media: dict[str, int], prompt_template: str = "{problem}", system_prompt: str | None = None
) -> tuple[list[dict], dict[str, str | list[dict]]]:
    """Find the prompt of a row, with a part for each image and video, and its answers by column.

    Args:
        row: columns, of which these are read; None counts as missing. Turns are messages as in chat.render.
            problem, prompt: text; or prompt: turns. Text, or that of the last user turn, goes through prompt_template.
            messages: a whole conversation. All before its first assistant turn is the prompt, the rest the completion.
            completion, chosen, rejected: text, or turns that begin and end with one of the assistant's.
            chosen, rejected: alone two whole conversations; what both begin with is the prompt (TRL's implicit one).
        media: how many come with the row, {"image": n, "video": m}. They go to the parts of their kind that the prompt
            has and that do not say what they show, else where its text says <image> or <video>, else before the text
            of its first user turn.
    """
    found = {column: row[column] for column in FORMS if row.get(column) is not None}
    for column, value in found.items():
        with naming(f"column {column!r}"):
            _check_form(value, FORMS[column])
    both = [as_turns(found[column]) for column in ("chosen", "rejected") if column in found]
    if len(both) == 2 and render(both[0]) == render(both[1]):
        raise ValueError("column 'rejected' equals column 'chosen': there is no preference to learn; drop the row")
    column, prompt, answers = _split(found, sorted(row))
    for name, answer in answers.items():
        with naming(f"column {name if name in found else column!r}"):
            _check_answer(as_turns(answer))
    with naming(f"column {column!r}"):
        return conversation(prompt, media, prompt_template, system_prompt), answers


def conversation(
    prompt: str | list[dict], media: dict[str, int], prompt_template="{problem}", system_prompt: str | None = None
) -> list[dict]:
    """Make messages that ask about a problem, or of a prompt's turns; for the arguments see read_conversation."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move that turn into the answers")
    own = system_prompt is None or (turns and turns[0]["role"] == "system")
    system = [] if own else [{"role": "system", "content": system_prompt}]
    return system + _place_media(_fill(prompt_template, turns), media)


def _fill(template: str, turns: list[dict]) -> list[dict]:
    """Put the question, the text of the last user turn, into a template."""
    if template == "{problem}":
        return turns
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = list(content_parts(turns[last])) if last >= 0 else []
    texts = [i for i, part in enumerate(parts) if part_kind(part) == "text"]
    if len(texts) != 1:
        question = f"the last user turn of this prompt has {len(texts)} texts"
        raise ValueError(f"data.prompt_template is put around one text, but {question}; make it one, or leave it out")
    parts[texts[0]] = {"type": "text", "text": template.replace("{problem}", parts[texts[0]]["text"])}
    return [*turns[:last], {**turns[last], "content": parts}, *turns[last + 1 :]]


def _place_media(turns: list[dict], media: dict[str, int]) -> list[dict]:
    """Give a prompt its images and videos: at its parts, else at placeholders, else before its text."""
    inside = [content_parts(turn) for turn in turns]
    shown = [part for parts in inside for part in parts if part_kind(part) != "text"]
    if shown:  # then <image> is text
        check_counts([part_kind(part) for part in shown if not has_source(part)], "{} part(s)", media)
        return turns
    split = [[piece for part in parts for piece in _split_text(part["text"])] for parts in inside]
    kinds = [piece["type"] for parts in split for piece in parts]
    if set(kinds) > {"text"}:
        check_counts(kinds, "<{}> placeholder(s)", media)
        inside = split
    elif any(media.values()):
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
        if first is None:
            shown = " and ".join(f"{count} {kind}(s)" for kind, count in media.items() if count)
            raise ValueError(f"the prompt has no user turn that could show the row's {shown}; add one")
        inside[first] = [{"type": kind} for kind in KINDS for _ in range(media.get(kind, 0))] + inside[first]
    return [{**turn, "content": parts} for turn, parts in zip(turns, inside, strict=True)]


def _split_text(text: str) -> list[dict]:
    pieces = re.split("<(image|video)>", text)  # text, kind, text, kind, ..., text
    return [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]


def _split(found: dict, columns: list[str]) -> tuple[str, str | list[dict], dict]:
    """Tell prompt and answers apart; also name the column that the prompt is from."""
    given = [column for column in PROMPTS if column in found]
    if given == ["messages"] and "completion" in found:
        given.append("completion")
    if len(given) > 1:
        raise ValueError(f"columns {given[0]!r} and {given[1]!r} say the same thing twice; keep one of them")
    answers = {column: found[column] for column in ANSWERS if column in found}
    if not given:
        return "chosen", *_implicit_prompt(answers, columns)
    turns = found[given[0]]
    if given != ["messages"]:
        return given[0], turns, answers
    start = [turn["role"] for turn in turns].index("assistant")
    return "messages", turns[:start], {"completion": turns[start:], **answers}


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Return the turns that chosen and rejected share, and the answers without them."""
    both = {column: answers.get(column) for column in ("chosen", "rejected")}
    pairs = list(zip(*both.values(), strict=False)) if all(isinstance(turns, list) for turns in both.values()) else []
    start = [*(turn == other for turn, other in pairs), False].index(False)  # how many turns they share
    if start == 0:
        raise ValueError(f"column 'problem' is missing; the row has {columns}: {nearest_form(columns)}")
    for column, turns in both.items():
        if len(turns) == start or turns[start]["role"] != "assistant":
            after = f"after the {start} turn(s) that chosen and rejected share"
            roles = [turn["role"] for turn in turns]
            raise ValueError(f"column {column!r} must go on with an assistant turn {after}; its roles are {roles}")
    return both["chosen"][:start], answers | {column: turns[start:] for column, turns in both.items()}


def _check_form(value: str | list[dict], types: tuple[type, ...]):
    if not isinstance(value, types):
        names = {str: "text", list: "a list of turns"}
        raise ValueError(f"must be {' or '.join(names[kind] for kind in types)}, it is {value!r:.40}")
    check_messages(as_turns(value))
    roles = [turn["role"] for turn in as_turns(value)]
    if not roles or not set(roles) <= set(ROLES):
        raise ValueError(f"needs turns with the roles {', '.join(ROLES)}; it has {roles}")


def _check_answer(turns: list[dict]):
    check_ends(turns)
    for turn in turns:
        text = "".join(part["text"] for part in content_parts(turn))
        if turn["role"] == "assistant" and not text.strip():
            raise ValueError("an answer is empty or blank, and would teach to say nothing; write it or drop the row")
        for kind in KINDS:
            if turn["role"] != "assistant" and f"<{kind}>" in text:
                raise ValueError(f"there is <{kind}> after the assistant's first turn; {kind}s belong into the prompt")
