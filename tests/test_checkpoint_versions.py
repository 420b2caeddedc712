"""What older versions of transformers made of the checkpoints that we save: a record, and that it still holds."""

import json

import pytest
from record_checkpoints import BATCHES, RECORDED, VERSIONS, digests, write

RECORDS = {v: json.loads((RECORDED / f"checkpoints_transformers_{v}.json").read_text()) for v in VERSIONS}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write(root)
    return digests(root)


@pytest.mark.parametrize("version", VERSIONS)
def test_older_versions_load_what_we_save_with_equal_logits_ids_and_pixels(version, written):
    """If files differ, run tests/record/record_checkpoints.py: older versions have not seen what is written today."""
    record = RECORDS[version]
    assert record["transformers"] == version and len(written) == 8 and written == record["files"]
    assert record["folders"].keys() == written.keys()
    for name, found in record["folders"].items():
        assert found["strange_keys"] == 0 and found["ids_equal"] and found["pixels_equal"], name
        assert found["eos_token"] == "<|im_end|>" and len(found["stop_ids"]) == 2, name
        assert found["logits"].keys() == BATCHES.keys() and max(found["logits"].values()) <= 1e-5, name
