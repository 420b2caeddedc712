"""A data set of the hub by its id: the parquet files of a split, its own or those the hub made."""

import re
from contextlib import suppress
from itertools import product
from os.path import isdir
from pathlib import Path, PurePosixPath

from minivlmrl.files import NETWORK_SECONDS, REPOSITORY, hub_errors

# its own files, or the hub's conversion of a public data set; cut at 5 GB that is "partial-train"
BRANCHES = None, "refs/convert/parquet"


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
