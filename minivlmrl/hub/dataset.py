"""A data set of the hub by its id: the parquet files of a split, its own or those the hub made."""

import re
from contextlib import suppress
from functools import partial
from itertools import product
from os.path import isdir
from pathlib import Path, PurePosixPath

from minivlmrl.hub.folder import NETWORK_SECONDS, REPOSITORY, hub_errors

# its own files, or the hub's conversion of a public data set; cut at 5 GB that is "partial-train"
BRANCHES = None, "refs/convert/parquet"


def find_split(name: str) -> list[Path] | None:
    """Find or download "OWNER/NAME@SPLIT", train without @ (ValueError: there is none).

    None: without @ the name is a path, whose first part is a folder here or which has a suffix.
    """
    found = REPOSITORY.fullmatch(name)
    path = Path(name)
    is_path = isdir(path.parent) or re.fullmatch(r"\.[a-z]+", path.suffix)
    if not found or (is_path and not found["revision"]):
        return None
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    repo_id = found["id"]
    split = found["revision"] or "train"
    there = set()  # splits
    with hub_errors(f"{name}: no such file, nor a data set of the hub"):
        for cached, branch in product((True, False), BRANCHES):
            which = {"repo_type": "dataset", "revision": branch, "local_files_only": cached}
            get = partial(snapshot_download, repo_id, **which)
            with suppress(LocalEntryNotFoundError, RevisionNotFoundError):
                if cached:  # raises where one of these is not
                    folder = Path(get(allow_patterns=f"*{split}*.parquet"))
                    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
                else:
                    info = HfApi().dataset_info(repo_id, revision=branch, timeout=NETWORK_SECONDS)
                    names = [file.rfilename for file in info.siblings]
                splits = {x: split_of(x) for x in sorted(names) if x.endswith(".parquet")}
                there |= {f"{repo_id}@{one}" for one in splits.values()}
                files = [x for x, of in splits.items() if f"/{of}".endswith(f"/{split}")]
                if len({*map(splits.get, files)}) == 1:
                    return [Path(get(allow_patterns=files)) / file for file in files]
        names = ", ".join(sorted(there)) or "none, and no parquet files"
        raise ValueError(f"there is no one split {split}, of {names}")


def split_of(file: str) -> str:
    """Name a file's split: data/train-00000-of-00002.parquet is of train, as default/train/0000.parquet
    is, and en/test.parquet of en/test."""
    *folders, name = PurePosixPath(file).with_suffix("").parts
    name = re.sub(r"-\d.*", "", name)
    if name.isdigit() and folders:
        name = folders.pop()
    return "/".join([part for part in folders if part not in ("data", "default", name)] + [name])
