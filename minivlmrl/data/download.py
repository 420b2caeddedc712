"""What a recipe names by its id: the folder of a model, and the parquet files of a data set's split."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from os.path import isdir
from pathlib import Path, PurePosixPath

from minivlmrl.files import INFERENCE_CONFIG, image_settings, weight_files

REPOSITORY = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
NETWORK_SECONDS = 5  # to wait for an answer of the hub
DOWNLOADED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "merges.txt",
    INFERENCE_CONFIG,
    "LICENSE*",
    "NOTICE*",
]
# its own files, or the hub's conversion of a public data set; cut at 5 GB that is "partial-train"
BRANCHES = None, "refs/convert/parquet"


def find_folder(name: str | Path) -> Path:
    """Turn what a recipe calls a model into a folder (ValueError: there is none to download).

    A folder wins over a repository on the hub: "Qwen/Qwen2.5-VL-3B-Instruct", "NAME@branch".
    """
    folder = Path(name)
    if isdir(folder):
        return folder
    replaced = Path(f"{folder.resolve()}.replaced")
    if isdir(replaced):
        warnings.warn(f"{folder}: the last save was killed; reading {replaced}", stacklevel=2)
        return replaced
    repository = REPOSITORY.fullmatch(str(name))
    if not repository or (isdir(folder.parent) and not repository["revision"]):
        raise ValueError(
            f"{name}: no such folder; a model is a Hugging Face folder or the id of a repository, "
            "NAME@main where its first part is a folder here"
        )
    with hub_errors(f"{name}: no such folder, not whole in the Hugging Face cache"):
        return _snapshot(repository["id"], repository["revision"])


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn errors into ValueErrors: each network library of huggingface_hub has its own."""
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}, and not downloaded ({reason}); "
            "check name and network, or download it elsewhere and give its folder"
        ) from error


def _snapshot(repo_id: str, revision: str | None) -> Path:
    """Find or download a repository; processes that do so at once wait for each other's files."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download,
        repo_id,
        revision=revision,
        allow_patterns=DOWNLOADED,
        ignore_patterns="*/*",  # of inner folders
    )
    # nothing of it, or parts that another program has asked for
    with suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(download(local_files_only=True))
        weight_files(cached)
        image_settings(cached)
        if (cached / "config.json").is_file() and (cached / "tokenizer.json").is_file():
            return cached
    # the download alone might wait forever
    HfApi().model_info(repo_id, revision=revision, timeout=NETWORK_SECONDS)
    return Path(download())


def find_split(name: str) -> list[Path] | None:
    """Find or download "OWNER/NAME@SPLIT", train without @ (ValueError: there is none).

    None: without @ the name is a path, whose first part is a folder here or which has a suffix.
    """
    repository = REPOSITORY.fullmatch(name)
    path = Path(name)
    is_path = isdir(path.parent) or re.fullmatch(r"\.[a-z]+", path.suffix)
    if not repository or (is_path and not repository["revision"]):
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    repo_id = repository["id"]
    split = repository["revision"] or "train"
    all_splits = set()
    with hub_errors(f"{name}: no such file, nor a data set of the hub"):
        for cached, branch in product((True, False), BRANCHES):
            # the cache lacks it, or the hub has no such branch
            with suppress(LocalEntryNotFoundError, RevisionNotFoundError):
                names = _parquet_files(repo_id, branch, split, cached)
                splits = {file: split_of(file) for file in names}
                all_splits.update(splits.values())
                files = [file for file in names if f"/{splits[file]}".endswith(f"/{split}")]
                if len({splits[file] for file in files}) == 1:
                    folder = _download(repo_id, branch, files, cached)
                    return [folder / file for file in files]
        names = ", ".join(f"{repo_id}@{other}" for other in sorted(all_splits))
        raise ValueError(
            f"there is no one split {split}, of {names or 'none, and no parquet files'}"
        )


def _parquet_files(repo_id: str, branch: str | None, split: str, cached: bool) -> list[str]:
    """List the parquet files of a branch; of the cache those alone that may be of the split."""
    from huggingface_hub import HfApi

    if cached:
        folder = _download(repo_id, branch, f"*{split}*.parquet", cached)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    else:
        info = HfApi().dataset_info(repo_id, revision=branch, timeout=NETWORK_SECONDS)
        names = [file.rfilename for file in info.siblings or ()]
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"its file {name!r} would be written outside of its folder")
    return sorted(name for name in names if name.endswith(".parquet"))


def _download(repo_id: str, branch: str | None, patterns: list[str] | str, cached: bool) -> Path:
    """Download files into the cache; if they must be there already, look them up alone."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo_id,
        repo_type="dataset",
        revision=branch,
        allow_patterns=patterns,
        local_files_only=cached,
    )
    return Path(folder)


def split_of(file: str) -> str:
    """Name a file's split: data/train-00000-of-00002.parquet is of train, as default/train/0000.parquet
    is, and en/test.parquet of en/test."""
    *folders, name = PurePosixPath(file).with_suffix("").parts
    name = re.sub(r"-\d.*", "", name)
    if name.isdigit() and folders:
        name = folders.pop()
    subset = [part for part in folders if part not in ("data", "default", name)]
    return "/".join([*subset, name])
