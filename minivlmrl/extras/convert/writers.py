"""Write rows in other projects' layouts. Paths are absolute, because projects resolve relative paths differently."""

from collections import Counter
from collections.abc import Callable
from os.path import abspath, join
from pathlib import Path

from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import ANSWERS, MEDIA, PROMPTS
from minivlmrl.data.media import Media
from minivlmrl.data.messages import LOSS_KEYS, as_turns, content_parts, is_trained, part_kind, shown_parts_of
from minivlmrl.data.row_checks import checked_row
from minivlmrl.errors import UserError, truncate


def write_trl(columns: dict, folder: Path, dropped: Counter) -> dict:
    """Write a row for TRL.

    A completion with several turns becomes `messages`: TRL would train on all turns in `completion`, even user turns.
    """
    prompt, answers, media, others = read(columns, folder)
    if any(item.kind == "video" for item in media):
        raise UserError("TRL reads no videos")
    shown = {"images": sources(media, "image", folder, dropped)}  # rows without images keep an empty list
    if answers.keys() == {"completion"} and len(answers["completion"]) > 1 and "label" not in others:
        turns = without_loss([*prompt, *answers["completion"]], dropped)
        return others | {"messages": [plain(turn) for turn in turns]} | shown
    answers = {name: [plain(turn) for turn in without_loss(turns, dropped)] for name, turns in answers.items()}
    return others | {"prompt": [plain(turn) for turn in without_loss(prompt, Counter())]} | answers | shown


def plain(turn: dict) -> dict:
    """Remove image paths from a turn, because TRL reads them from `images`."""
    parts = []
    for part in content_parts(turn):
        kind = part_kind(part)
        parts.append({"type": kind, "text": part["text"]} if kind == "text" else {"type": kind})
    return turn | {"content": [part for part in parts if part.get("text") != ""]}


def without_loss(turns: list[dict], dropped: Counter) -> list[dict]:
    """Return turns without loss mask keys, such as `loss: false`; count the masked assistant turns in `dropped`."""
    untrained = (turn for turn in turns if turn["role"] == "assistant" and not is_trained(turn))
    dropped.update("the mark that excludes an answer from training" for _ in untrained)
    return [{key: value for key, value in turn.items() if key not in LOSS_KEYS} for turn in turns]


def write_swift(columns: dict, folder: Path, dropped: Counter) -> dict:
    """Write a row for ms-swift or LLaMA-Factory, as messages with <image> tags."""
    prompt, answers, media, others = read(columns, folder)
    first, *_ = [*answers.values(), []]
    turns = [turn if is_trained(turn) or turn["role"] != "assistant" else turn | {"loss": False} for turn in first]
    new = others | {"messages": [tagged(turn) for turn in [*prompt, *turns]]}
    if "rejected" in answers:
        rejected = [tagged(turn) for turn in answers["rejected"]]
        is_short = len(rejected) == 1 and len(answers["chosen"]) == 1
        new |= {"rejected_response": rejected[0]["content"]} if is_short else {"rejected_messages": rejected}
    for kind in ("image", "video"):
        if listed := sources(media, kind, folder, dropped):
            new[f"{kind}s"] = listed
    return new


def write_verl(columns: dict, folder: Path, dropped: Counter) -> dict:
    """Write a row for verl: for RL, a prompt with its solution in `reward_model`; for SFT, messages."""
    prompt, answers, media, others = read(columns, folder)
    solution = others.pop("solution", None)
    if solution is not None:
        truth = {"style": "rule", "ground_truth": str(solution)}
        turns = without_loss(prompt, Counter())
        new = {"data_source": "minivlmrl", "prompt": [tagged(turn) for turn in turns], "reward_model": truth}
        dropped.update(f"column {name!r}, because the row has a solution" for name in answers)
        media = media[: len(shown_parts_of(prompt))]
    elif answers.keys() == {"completion"} and not isinstance(others.get("label"), bool):
        new = {"messages": [tagged(turn) for turn in without_loss([*prompt, *answers["completion"]], dropped)]}
    else:
        raise UserError("verl needs a solution or a completion, because verl's trainers read no pairs and no labels")
    new = others | new
    for kind in ("image", "video"):
        listed = sources(media, kind, folder, Counter())
        if listed:
            options = [item.options for item in media if item.kind == kind]
            new[f"{kind}s"] = [{kind: source, **own} for source, own in zip(listed, options, strict=True)]
    return new


WRITERS: dict[str, Callable[[dict, Path, Counter], dict]] = {
    "trl": write_trl,
    "ms-swift": write_swift,
    "verl": write_verl,
}


def read(columns: dict, folder: Path) -> tuple[list[dict], dict[str, list[dict]], list[Media], dict[str, Plain]]:
    """Read a row as training would.

    Returns:
        prompt turns; turns of each answer; media in prompt and answers; all other columns
    """
    row, media = checked_row(columns, ("problem",), columns, RowOptions(), folder)
    answers = {}
    for name in ("chosen", "rejected") if row.chosen else ("completion",):
        if answer := getattr(row, name):
            answers[name] = as_turns(answer)
            shown = [part["image"] for turn in answers[name] for part in content_parts(turn) if "image" in part]
            if name != "rejected":
                media += shown
            elif shown != media[len(media) - len(shown) :]:
                raise UserError("the chosen and the rejected answer must show the same images in other layouts")
    untrained = {"loss": False} if answers else {}
    prompt = [turn | untrained if turn["role"] == "assistant" else turn for turn in row.messages]
    placed = {*PROMPTS, *ANSWERS, *MEDIA, "system"}
    return prompt, answers, media, {name: value for name, value in columns.items() if name not in placed}


def tagged(turn: dict) -> dict:
    """Convert a turn to text with <image> and <video> tags."""
    texts = []
    for part in content_parts(turn):
        kind = part_kind(part)
        if kind == "text" and ("<image>" in part["text"] or "<video>" in part["text"]):
            raise UserError(f"the tag in the text {truncate(part['text'], 60)} would become an image or a video")
        texts.append(part["text"] if kind == "text" else f"<{kind}>")
    return turn | {"content": "".join(texts)}


def sources(media: list[Media], kind: str, folder: Path, dropped: Counter) -> list:
    """Return absolute media paths, and count dropped options such as max_pixels."""
    listed = []
    for item in media:
        if item.kind == kind:
            dropped.update(f"option {name} of the {kind}" for name in item.options)
            if isinstance(item.source, list):
                listed.append([source_of(frame, folder) for frame in item.source])
            else:
                listed.append(source_of(item.source, folder))
    return listed


def source_of(source: str | bytes, folder: Path) -> str | dict:
    """Return an absolute path, a URI, or {"bytes": ..., "path": None} as in Hugging Face datasets."""
    if isinstance(source, bytes):
        return {"bytes": source, "path": None}
    if source.startswith("data:;"):  # data URI without a media type
        return source.replace("data:;", "data:image;", 1)
    return source if source.startswith(("data:", "file:")) else abspath(join(folder, source))
