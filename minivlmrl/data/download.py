"""Find or download models and data sets of the Hugging Face hub by their ids."""

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
NETWORK_SECONDS = 5  # timeout of a request to the hub
DOWNLOADED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "merges.txt",
    INFERENCE_CONFIG,
    "LICENSE*",
    "NOTICE*",
]
# branches of a data set: its own files, then the hub's conversion of a public data set to parquet,
# which is called "partial-train" if it was cut at 5 GB
BRANCHES = None, "refs/convert/parquet"


def find_folder(name: str | Path) -> Path:
    """Return the folder of a model, and download the model if necessary.

    Args:
        name: a folder, or the id of a repository on the hub, for example
            "Qwen/Qwen2.5-VL-3B-Instruct" or "NAME@branch". An existing folder has priority.

    Raises:
        ValueError: there is no such folder, and the model cannot be downloaded.
    """
    folder = Path(name)
    if isdir(folder):
        return folder
    replaced = Path(f"{folder.resolve()}.replaced")
    if isdir(replaced):
        warnings.warn(
            f"{folder}: the last save was killed, so {replaced} is read instead", stacklevel=2
        )
        return replaced
    repository = REPOSITORY.fullmatch(str(name))
    if not repository or (isdir(folder.parent) and not repository["revision"]):
        raise ValueError(
            f"{name}: no such folder. A model is a Hugging Face folder or the id of a repository. "
            f"If the first part of the id is also a local folder, write {name}@main."
        )
    with hub_errors(f"{name}: no such folder, not completely in the Hugging Face cache"):
        return _snapshot(repository["id"], repository["revision"])


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn every exception into a ValueError, as huggingface_hub's network libraries differ."""
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}, and the download failed ({reason}). Check the name and the network, or "
            "download it on another machine and use its folder."
        ) from error


def _snapshot(repo_id: str, revision: str | None) -> Path:
    """Return the cached folder of a repository, after a download if it is incomplete.

    Parallel processes wait for each other's downloads.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download,
        repo_id,
        revision=revision,
        allow_patterns=DOWNLOADED,
        ignore_patterns="*/*",  # skip files in subfolders
    )
    # the cache may lack the repository, or hold only files that another program has downloaded
    with suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(download(local_files_only=True))
        weight_files(cached)
        image_settings(cached)
        if (cached / "config.json").is_file() and (cached / "tokenizer.json").is_file():
            return cached
    # this request has a timeout, while the download could wait forever
    HfApi().model_info(repo_id, revision=revision, timeout=NETWORK_SECONDS)
    return Path(download())


def find_split(name: str) -> list[Path] | None:
    """Return the parquet files of a split of a data set, downloaded if necessary.

    Args:
        name: "OWNER/NAME@SPLIT", or "OWNER/NAME" for the split train.

    Returns:
        The files, or None if the name is a local path: it has no @, and its first part is a local
        folder or it has a suffix such as .jsonl.

    Raises:
        ValueError: the data set or the split does not exist, or the download failed.
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
    with hub_errors(f"{name}: no such file or data set of the hub"):
        for cached, branch in product((True, False), BRANCHES):
            # the cache may lack the data set, or the hub the branch
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
            f"the split {split} does not exist or is ambiguous; splits: "
            f"{names or 'none, because there are no parquet files'}"
        )


def _parquet_files(repo_id: str, branch: str | None, split: str, cached: bool) -> list[str]:
    """List the parquet files of a branch; in the cache, only paths that contain `split`."""
    from huggingface_hub import HfApi

    if cached:
        folder = _download(repo_id, branch, f"*{split}*.parquet", cached)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    else:
        info = HfApi().dataset_info(repo_id, revision=branch, timeout=NETWORK_SECONDS)
        names = [file.rfilename for file in info.siblings or ()]
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"its file {name!r} would be written outside of the cache folder")
    return sorted(name for name in names if name.endswith(".parquet"))


def _download(repo_id: str, branch: str | None, patterns: list[str] | str, cached: bool) -> Path:
    """Download files of a data set, or only look them up if `cached`; return their folder."""
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
    """Return the split that a parquet file belongs to.

    Examples: "train" for data/train-00000-of-00002.parquet and default/train/0000.parquet, and
    "en/test" for en/test.parquet.
    """
    *folders, name = PurePosixPath(file).with_suffix("").parts
    name = re.sub(r"-\d.*", "", name)
    if name.isdigit() and folders:
        name = folders.pop()
    subset = [part for part in folders if part not in ("data", "default", name)]
    return "/".join([*subset, name])
