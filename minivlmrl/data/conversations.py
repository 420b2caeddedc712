"""The text of a row, in whichever of TRL's forms it is, becomes a prompt's messages and the answers to it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from minivlmrl.chat import content_parts, part_kind, render
from minivlmrl.data.media import has_source
from minivlmrl.data.turns import render_completion

KINDS = ("image", "video")  # <image> and <video> in a prompt's text are where one goes
ROLES = ("system", "user", "assistant", "tool")
PROMPTS = {"problem": (str,), "prompt": (str, list), "messages": (list,)}  # a row has one of them, or none: see _split
ANSWERS = dict.fromkeys(("completion", "chosen", "rejected"), (str, list))


def read_conversation(
    row: dict, media: dict[str, int], prompt_template: str = "{problem}", system_prompt: str | None = None
) -> tuple[list[dict], dict[str, str | list[dict]]]:
    """Find the prompt of a row and its answers.

    Args:
        row: columns, of which these are read; None counts as missing. Turns are messages as in chat.render.
            problem, prompt: text, which goes through prompt_template.
            prompt: or turns, taken as they are (TRL's conversational form).
            messages: a whole conversation. All before its first assistant turn is the prompt, the rest the completion.
            completion, chosen, rejected: text, or turns that begin and end with one of the assistant's.
            chosen, rejected: without any of problem, prompt and messages two whole conversations, and the turns that
                both begin with are the prompt (TRL's implicit prompt).
        media: how many come with the row, {"image": n, "video": m}. They go to the parts of their kind that the prompt
            has (besides those that say themselves what they show), else where its text says <image> or <video>, else
            before the text of its first user turn.
        prompt_template, system_prompt: see json_lines.RowOptions.
    Returns:
        the prompt, with a part for each image and video; completion, chosen and rejected, as far as the row has them.
    """
    found = {column: row[column] for column in (*PROMPTS, *ANSWERS) if row.get(column) is not None}
    for column, value in found.items():
        with _naming(column):
            _check_form(value, {**PROMPTS, **ANSWERS}[column])
    if {"chosen", "rejected"} <= set(found) and render(_turns(found["chosen"])) == render(_turns(found["rejected"])):
        raise ValueError("column 'rejected' equals column 'chosen': there is no preference to learn; drop the row")
    column, prompt, answers = _split(found, sorted(row))
    for name, answer in answers.items():
        with _naming(name if name in found else column):
            _check_answer(_turns(answer))
    with _naming(column):
        if isinstance(prompt, str):
            return conversation(prompt, media, prompt_template, system_prompt), answers
        if prompt and prompt[-1]["role"] == "assistant":
            raise ValueError("the prompt ends with an assistant turn; move that turn into the answers")
        own = system_prompt is None or (prompt and prompt[0]["role"] == "system")
        system = [] if own else [{"role": "system", "content": system_prompt}]
        return system + _place_in_turns(prompt, media), answers


def conversation(
    problem: str, media: dict[str, int], prompt_template: str = "{problem}", system_prompt: str | None = None
) -> list[dict]:
    """Make messages that ask about a problem; for the arguments see read_conversation."""
    user = {"role": "user", "content": split_at_media(prompt_template.replace("{problem}", problem), media)}
    return [user] if system_prompt is None else [{"role": "system", "content": system_prompt}, user]


def split_at_media(text: str, media: dict[str, int]) -> list[dict]:
    """Split a text at its <image> and <video> placeholders into parts; without any, images and videos come first."""
    parts = _split_text(text)
    if len(parts) == 1:
        return _parts(media) + parts
    _check_counts(parts, "<{}> placeholder(s)", media)
    return parts


def _place_in_turns(turns: list[dict], media: dict[str, int]) -> list[dict]:
    """Give a conversational prompt its images and videos: at its parts, else at placeholders, else before its text."""
    inside = [content_parts(turn) for turn in turns]
    shown = [part for parts in inside for part in parts if part_kind(part) != "text"]
    if shown:  # then <image> is text
        _check_counts([part for part in shown if not has_source(part)], "{} part(s)", media)
        return turns
    split = [[piece for part in parts for piece in _split_text(part["text"])] for parts in inside]
    pieces = [piece for parts in split for piece in parts]
    if any(piece["type"] != "text" for piece in pieces):
        _check_counts(pieces, "<{}> placeholder(s)", media)
        inside = split
    elif any(media.values()):
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
        if first is None:
            shown = " and ".join(f"{count} {kind}(s)" for kind, count in media.items() if count)
            raise ValueError(f"the prompt has no user turn that could show the row's {shown}; add one")
        inside[first] = _parts(media) + inside[first]
    return [{**turn, "content": parts} for turn, parts in zip(turns, inside, strict=True)]


def _parts(media: dict[str, int]) -> list[dict]:
    return [{"type": kind} for kind in KINDS for _ in range(media.get(kind, 0))]


def _split_text(text: str) -> list[dict]:
    pieces = re.split("<(image|video)>", text)  # text, kind, text, kind, ..., text
    return [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]


def _check_counts(parts: list[dict], what: str, media: dict[str, int]):
    for kind in KINDS:
        found, count = sum(part_kind(part) == kind for part in parts), media.get(kind, 0)
        if found != count:
            raise ValueError(
                f"the prompt has {found} {what.format(kind)} but {count} {kind}(s) came with it; put one where each "
                f"{kind} belongs and name as many {kind}s"
            )


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
    if given != ["messages"]:
        return given[0], found[given[0]], answers
    turns = found["messages"]
    if turns[-1]["role"] != "assistant":
        raise ValueError("column 'messages' must end with an assistant turn; cut it there, or call the column prompt")
    start = [turn["role"] for turn in turns].index("assistant")
    return "messages", turns[:start], {"completion": turns[start:], **answers}


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """The turns that chosen and rejected share, and the answers without them."""
    both = [answers.get(column) for column in ("chosen", "rejected")]
    pairs = list(zip(*both, strict=False)) if all(isinstance(turns, list) for turns in both) else []
    start = [*(turn == other for turn, other in pairs), False].index(False)  # how many turns they share
    if start == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}: give it a problem, a prompt or messages, "
            "or let chosen and rejected be whole conversations that begin with the same turns"
        )
    for column, turns in zip(("chosen", "rejected"), both, strict=True):
        if len(turns) == start or turns[start]["role"] != "assistant":
            raise ValueError(
                f"column {column!r} must go on with an assistant turn after the {start} turn(s) that chosen and "
                f"rejected share; its roles are {[turn['role'] for turn in turns]}"
            )
    return both[0][:start], {**answers, "chosen": both[0][start:], "rejected": both[1][start:]}


def _check_form(value: str | list[dict], types: tuple[type, ...]):
    if not isinstance(value, types):
        names = {str: "text", list: "a list of turns"}
        raise ValueError(f"must be {' or '.join(names[kind] for kind in types)}, it is {value!r:.40}")
    render(_turns(value))  # refuses turns without role or content
    roles = [turn["role"] for turn in _turns(value)]
    if not roles or not set(roles) <= set(ROLES):
        raise ValueError(f"needs turns with the roles {', '.join(ROLES)}; it has {roles}")


def _check_answer(turns: list[dict]):
    render_completion(turns)  # refuses other turns than the assistant's at its ends, and images
    for turn in turns:
        text = "".join(part["text"] for part in content_parts(turn))
        if turn["role"] == "assistant" and not text.strip():
            raise ValueError("an answer is empty or blank, and would teach to say nothing; write it or drop the row")
        for kind in KINDS:
            if turn["role"] != "assistant" and f"<{kind}>" in text:
                raise ValueError(f"there is <{kind}> after the assistant's first turn; {kind}s belong into the prompt")


def _turns(answer: str | list[dict]) -> list[dict]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


@contextmanager
def _naming(column: str) -> Iterator[None]:
    """Begin what an error says with the column that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error
