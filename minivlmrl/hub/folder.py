"""The folder of a checkpoint: found by path or repository id, and its small files."""

import json
import re
import warnings
from contextlib import suppress
from pathlib import Path

from minivlmrl.hub.atomic_folder import beside

REPOSITORY = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)  # no path
# files that belong to a model without being its weights; a checkpoint that we write keeps those it was read with
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.json", "chat_template.jinja", "generation_config.json",
    "video_preprocessor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
NETWORK_SECONDS = 5  # to wait for an answer of the hub
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "LICENSE*", "NOTICE*")


def find_folder(name: str | Path) -> Path:
    """Turn what a recipe calls a model into a folder.

    Args:
        name: a folder, which wins over a repository of that name; or a repository on the Hugging Face hub,
            "Qwen/Qwen2.5-VL-3B-Instruct", of a branch, tag or commit "Qwen/Qwen2.5-VL-3B-Instruct@main".
    Returns:
        The folder. Of a repository it is the snapshot in huggingface_hub's cache, without asking the network when that
        is whole; otherwise it is downloaded first. Processes that do so at once wait for each other, since
        huggingface_hub locks every file that it downloads.
    Raises:
        ValueError: there is no such folder, and no such repository can be had.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    replaced = beside(folder.resolve(), "replaced")
    if replaced.is_dir():
        warnings.warn(
            f"{folder}: the last save was killed while it renamed; reading {replaced}, the checkpoint before it",
            stacklevel=2,
        )
        return replaced
    repository = REPOSITORY.fullmatch(str(name))
    if not repository:
        raise ValueError(f"{name}: no such folder; a model is a Hugging Face folder or the id of a repository")
    try:
        return _snapshot(repository["id"], repository["revision"])
    except Exception as error:  # each network library that huggingface_hub has stood on has its own family of errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}: there is no such folder, no whole copy of such a repository in the Hugging Face cache, and none "
            f"could be downloaded ({reason}); check name and network, or download it elsewhere and give its folder"
        ) from error


def _snapshot(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = {"repo_id": repo_id, "revision": revision}
    wanted |= {"allow_patterns": list(DOWNLOADED), "ignore_patterns": "*/*"}  # nothing out of folders inside
    with suppress(LocalEntryNotFoundError):  # nothing of it, or less than huggingface_hub knows it to have
        cached = Path(snapshot_download(**wanted, local_files_only=True))
        if _is_whole(cached):
            return cached
    HfApi().model_info(repo_id, revision=revision, timeout=NETWORK_SECONDS)  # the download alone might wait forever
    return Path(snapshot_download(**wanted))


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has what load_model and load_processor need: other programs may have asked for parts of it."""
    names = {file.name for file in folder.iterdir() if file.is_file()}  # a link into the cache may lead nowhere
    if "model.safetensors.index.json" in names and "model.safetensors" not in names:
        weights = set(read_index(folder / "model.safetensors.index.json"))
    else:
        weights = {"model.safetensors"}
    image_settings = {"preprocessor_config.json", "processor_config.json"}
    return weights | {"config.json", "tokenizer.json"} <= names and bool(image_settings & names)


def read_index(index: Path) -> list[str]:
    """Names of the shards that a model.safetensors.index.json lists, sorted.

    Raises:
        ValueError: it has no weight_map from tensor names to names of files beside it.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: it needs a weight_map, from the name of each tensor to the file that holds it")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise ValueError(f"{index}: weight_map says {file!r:.80} of {tensor:.80}, it must be a .safetensors here")
    return sorted(set(weight_map.values()))


def read_json(path: Path) -> dict:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: it is missing, unreadable, not JSON, or not an object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a Hugging Face folder has one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: it must hold a JSON object, not {content!r:.40}")
    return content


def write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_carried(folder: Path) -> dict[str, bytes]:
    """Contents of the CARRIED files that a folder has, by name: kept in memory, for it may be gone at the next save."""
    files = [file for pattern in CARRIED for file in sorted(folder.glob(pattern)) if file.is_file()]
    return {file.name: file.read_bytes() for file in files}
