"""Find a model folder, or download the model from the Hugging Face Hub."""

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from os.path import isdir, isfile
from pathlib import Path

from minivlmrl.data.image_settings import image_settings
from minivlmrl.errors import UserError, optional_dependency
from minivlmrl.files import INFERENCE_CONFIG, weight_files

REPOSITORY = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
NETWORK_SECONDS = 5  # timeout per request to the Hub, in seconds
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "merges.txt", INFERENCE_CONFIG, "LICENSE*", "NOTICE*"]
SETTINGS = ["*.json", "*.jinja", "merges.txt"]  # model files other than weights


def find_folder(name: str | Path, patterns: Sequence[str] = DOWNLOADED) -> Path:
    """Return a local model folder, downloading the model if necessary.

    Args:
        name: a folder, which takes precedence, or a Hub repository id, such as "Qwen/Qwen2.5-VL-3B-Instruct" or
            "OWNER/NAME@BRANCH".
        patterns: which files to download, DOWNLOADED or SETTINGS.
    """
    folder = Path(name)
    if isdir(folder):
        return folder
    if isfile(folder):  # use os.path, because pathlib raises OSError for long names
        raise UserError(
            f"{name} is a file, but a model is a folder with config.json and safetensors files, in the Hugging Face "
            "format; a GGUF file of llama.cpp cannot be trained"
        )
    replaced = Path(f"{folder.resolve()}.replaced")
    if isdir(replaced):
        warnings.warn(
            f"{folder} does not exist, because saving it was interrupted; the folder before the "
            f"save, {replaced}, is used instead",
            stacklevel=2,
        )
        return replaced
    repository = REPOSITORY.fullmatch(str(name))
    if not repository or (isdir(folder.parent) and not repository["revision"]):
        raise UserError(
            f"{name}: this folder does not exist in the working folder, {Path.cwd()}. A model must be a folder in the "
            "Hugging Face format or the id of a repository, with its owner, such as Qwen/Qwen2.5-VL-3B-Instruct."
            + (f" If {name} is a repository, write {name}@main." if "/" in str(name) else "")
        )
    return _snapshot(repository["id"], repository["revision"], patterns, str(name))


def _snapshot(repo_id: str, revision: str | None, patterns: Sequence[str], name: str) -> Path:
    with optional_dependency("hub", f"{name}: there is no such folder, and a download requires huggingface_hub"):
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download,
        repo_id,
        revision=revision,
        allow_patterns=[*patterns],
        ignore_patterns="*/*",  # skip files in subfolders
    )
    # LocalEntryNotFoundError: a file of the model is not in the Hub cache
    with suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(download(local_files_only=True))
        names = ["config.json"]
        if patterns == DOWNLOADED:
            weight_files(cached)
            image_settings(cached)
            names.append("tokenizer.json")
        if all((cached / name).is_file() for name in names):
            return cached
    try:
        # snapshot_download could wait forever without a network, but model_info fails after NETWORK_SECONDS
        HfApi().model_info(repo_id, revision=revision, timeout=NETWORK_SECONDS)
        return Path(download())
    except Exception as error:  # exception types depend on the huggingface_hub version
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name}: there is no such folder, no complete copy in the Hugging Face cache, and the download failed "
            f"({reason}). Check the name and the network, or download the repository on another machine and use its "
            "folder."
        ) from error
