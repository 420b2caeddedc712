"""Rename and check the columns of a row in a data file; docs/data.md describes all columns."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.options import VideoOptions
from minivlmrl.config.parsing import read_value
from minivlmrl.config.types import BoxSpace, Plain
from minivlmrl.data.rows import REWARD_ARGUMENTS
from minivlmrl.errors import check_field, error_context

# {column: allowed types}; a row may have only one of the columns problem, prompt and messages
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXTS = PROMPTS | ANSWERS
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# columns that are read in every training stage
READ = {*PROMPTS, *MEDIA, "system", "box_space"}
# {column name that rows must not have: how to mend the row}
RESERVED = {
    **dict.fromkeys(
        REWARD_ARGUMENTS - {"images"},
        "renamed with data.columns, because reward functions receive another argument of this name",
    ),
    **dict.fromkeys(
        vars(VideoOptions()).keys() - {"fps", "min_frames", "max_frames"},  # data sets have columns of these names
        "renamed with data.columns, or moved into the entry of its image as an option, such as "
        '{"image": ..., "max_pixels": 200704}',
    ),
}
# {column that minivlmrl ignores: the column's meaning in other projects}
MEANINGS = {
    **dict.fromkeys(("tools", "functions", "tool_choice", "tools_kwargs"), "which tools the prompt declares"),
    **dict.fromkeys(("chat_template_kwargs", "chat_template", "enable_thinking"), "how the prompt is rendered"),
    **dict.fromkeys(("prefill", "continue_final_message", "add_generation_prompt"), "how the answer begins"),
    **dict.fromkeys(("loss", "loss_mask", "loss_weight", "loss_scale", "train"), "which tokens are trained"),
    **dict.fromkeys(("completion_mask", "assistant_masks", "train_on_input", "segments"), "which tokens are trained"),
    **dict.fromkeys(("weight", "weights", "sample_weight"), "how much the row counts in the loss"),
    **dict.fromkeys(("input_ids", "prompt_ids", "attention_mask", "labels"), "what the tokens are"),
    **dict.fromkeys(("audio", "audios", "documents"), "what the model sees"),
    **dict.fromkeys(("rejected_images", "rejected_videos", "chosen_images"), "what the model sees in an answer"),
    **dict.fromkeys(("positive", "negative", "positive_messages", "negative_messages"), "which answers are a pair"),
    **dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), "what the reference model computes"),
    **dict.fromkeys(("teacher_prompt", "teacher_messages", "privileged_context"), "what a teacher sees"),
    "label": "whether the completion is a good answer",
}
# columns in which other projects store a prompt
LAYOUTS = ("conversations", "conversation", "query", "instruction", "question", "prefix", "texts", "file_name")
# columns in which other projects store an answer, a rating, earlier turns or answer choices
BESIDE = (
    "response", "output", "suffix", "history", "rejected_response", "rejected_messages", "rejected_conversations",
    "kto_tag", "reward_model", "options", "choices",
)  # fmt: skip
RENDERED = re.compile(r"\s*<\|im_start\|>(system|user)\n")
OTHER_TAG = re.compile(r"<\s*image[ _-]?(\d*)\s*>", re.IGNORECASE)  # MMMU's <image 1>
# roles that turns have in other projects
FOREIGN_ROLES = {"human", "gpt", "chatgpt", "bing", "model", "tool_call", "tool_response", "function_call",
                 "observation", "function", "developer"}  # fmt: skip
COLUMN_TYPES = {  # {column: its values' type and bounds}
    "system": str,
    "box_space": BoxSpace,
    "margin": Annotated[float, "(-inf, inf)"],  # how much better `chosen` is than `rejected`
    "label": bool,  # for KTO: True if the completion is a good answer
}


class ForeignLayoutError(ValueError):
    """Raised for a row in the layout of another project, such as ms-swift; the command `convert` can read the row."""


def find_format(name: str) -> Callable[[dict], dict]:
    """Return the function for the option data.format, which converts a row of a data file."""
    with error_context(f"data.format {name}"):
        return with_options(*resolve_object("format", name, {}))


def rename_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename a row's columns all at once, so that two columns can swap names. pandas' NaN becomes None."""
    row = {name: value if value == value else None for name, value in row.items()}  # NaN differs from itself
    renamed = {theirs: ours for theirs, ours in renamed.items() if theirs != ours and row.get(theirs) is not None}
    columns = row | dict.fromkeys(renamed)
    for theirs, ours in renamed.items():
        if columns.get(ours) is not None:
            raise ValueError(
                f"data.columns renames {theirs!r} to {ours!r}, but the row already has both columns; remove one of them"
            )
        columns[ours] = row[theirs]
    return columns


def check_columns(columns: dict, required: Sequence[str], known: Collection[str]):
    """Raise ValueError if a column has a reserved name or a wrong value, or would be ignored.

    Args:
        columns: {column: value}; columns whose value is None are ignored.
        known: columns that a stage or a reward reads, or that data.columns names.

    Raises:
        ForeignLayoutError: the row has the layout of another project.
    """
    given = {name: value for name, value in columns.items() if value is not None}
    for name, value in given.items():
        if name in RESERVED:
            check_field(False, f"column {name!r}", value, RESERVED[name])
        # A bool in the column `label` rates the row's completion, as for KTO. Other labels name a class.
        is_class = name == "label" and (not isinstance(value, bool) or "completion" not in known)
        if name in MEANINGS and name not in known and value not in ("", [], {}) and not is_class:
            raise ValueError(
                f"column {name!r} is {value!r:.60}. In other projects, this column says {MEANINGS[name]}, but "
                f"minivlmrl ignores it. Remove the column, or keep it for a reward: data.columns: {{{name}: {name}}}"
            )
        if name in COLUMN_TYPES and (name != "label" or name in required):  # `label` has other meanings, too
            read_value(COLUMN_TYPES[name], value, f"column {name!r}", json=True)
        if name == "solution" and str(value).count("<answer>") > 1:
            check_field(False, "column 'solution'", value, "a text with at most one <answer> tag")
    check_layout({name: value for name, value in given.items() if value not in ("", [])}, known)


def check_layout(columns: dict[str, Plain], known: Collection[str]):
    """Raise ForeignLayoutError if the columns, turns or tags of a row belong to another project's layout."""
    foreign = BESIDE if columns.keys() & PROMPTS else BESIDE + LAYOUTS
    for name in (*foreign, *(["A"] if "B" in columns else [])):
        if name in columns and name not in known:
            raise ForeignLayoutError(f"column {name!r} belongs to the layout of another project")
    texts = {name: columns[name] for name in TEXTS if name in columns}
    for name, value in texts.items():
        for turn in [value] if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(turn, dict) and ("from" in turn or str(turn.get("role")) in FOREIGN_ROLES):
                raise ForeignLayoutError(f"column {name!r} has a turn of another project, {turn!r:.60}")
        if isinstance(value, str) and RENDERED.match(value):
            raise ForeignLayoutError(f"column {name!r} is a conversation that a chat template has already rendered")
    all_text = repr(texts)
    if columns.get("objects") and (tag := re.search("<ref-object>|<bbox>", all_text)):
        raise ForeignLayoutError(f"the texts contain {tag[0]}, which ms-swift replaces by `objects`")
    has_media = any(name in columns for name in MEDIA)
    if not has_media and re.search("<img>.*?</img>", all_text):
        raise ForeignLayoutError("the texts contain <img>, with which Qwen-VL names its images")
    if has_media and "<image>" not in all_text and (tag := OTHER_TAG.search(all_text)):
        raise ForeignLayoutError(f"the texts contain {tag[0]}, but the place of an image is <image>")
