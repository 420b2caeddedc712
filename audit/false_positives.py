"""Count false alarms: audit bug-free TRL steps with random settings.

    python audit/false_positives.py FOLDER [STEPS [SEED]]

STEPS is 200 by default. FOLDER/healthy.jsonl logs every training run's settings and alarms.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import time
import traceback
from pathlib import Path

sys.path.extend(str(Path(__file__).parent / name) for name in ("..", ".", "tests"))
import trl_fixtures

from minivlmrl_audit.audit import audit
from minivlmrl_audit.dump import read

STEPS = 2  # training steps per setting
COMMON = {
    "learning_rate": [1e-2, 1e-3, 1e-5], "lr_scheduler_type": ["linear", "cosine", "constant", "constant_with_warmup"],
    "warmup_steps": [0, 1], "weight_decay": [0.0, 0.1], "max_grad_norm": [0.0, 0.01, 1.0], "adam_beta1": [0.9, 0.8],
    "adam_beta2": [0.999, 0.95], "adam_epsilon": [1e-8, 1e-4],
}  # fmt: skip
REFERENCE = {"sync_ref_model": [False, True], "ref_model_sync_steps": [1], "ref_model_mixup_alpha": [0.5]}
FIELDS = {
    "grpo": COMMON | REFERENCE | {
        "beta": [0.0, 0.1], "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"],
        "importance_sampling_level": ["token", "sequence"], "gradient_accumulation_steps": [1, 2, 3, 4],
        "steps_per_generation": [1, 2, 3, 4], "num_iterations": [1, 2], "num_generations": [2, 4],
        "scale_rewards": ["group", "batch", "none"],
        "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
        "reward_weights": [[1.0, 1.0], [0.3, 2.0]], "temperature": [1.0, 0.7], "epsilon": [0.2, 0.02],
        "epsilon_high": [0.2, 0.5], "delta": [None, 1.5], "use_bias_correction_kl": [False, True],
        "mask_truncated_completions": [False, True], "top_entropy_quantile": [1.0, 0.5], "entropy_coef": [0.0, 0.01],
        "off_policy_mask_threshold": [None, 0.01], "max_completion_length": [3, 10],
    },
    "dpo": COMMON | REFERENCE | {
        "loss_type": [["sigmoid"], ["hinge"], ["ipo"], ["robust"], ["apo_zero"], ["sigmoid", "bco_pair", "sft"]],
        "beta": [0.1, 0.5], "label_smoothing": [0.1], "ld_alpha": [None, 0.5],
        "gradient_accumulation_steps": [1, 2, 3], "use_weighting": [False, True],
        "per_device_train_batch_size": [2, 4], "f_divergence_type": ["reverse_kl", "js_divergence"],
    },
    "sft": COMMON | {
        "loss_type": ["nll", "dft"], "completion_only_loss": [True, False], "gradient_accumulation_steps": [1, 2, 3],
        "neftune_noise_alpha": [None, 5.0], "per_device_train_batch_size": [2, 4],
    },
}  # fmt: skip
FIELDS["turns"] = FIELDS["grpo"] | {
    "seed": range(9), "calls": [0.3, 0.8], "ends": [0.3, 0.8], "tools": [("tell",), ("tell", "nothing")],
    "max_completion_length": [130, 240],
}  # fmt: skip


def sample_options(rng: random.Random) -> tuple[str, dict]:
    """Sample a trainer ("grpo", "turns", "dpo" or "sft") and options for it."""
    kind = rng.choice(["grpo", "grpo", "turns", "dpo", "sft"])
    options = {name: rng.choice(values) for name, values in FIELDS[kind].items()}
    if kind in ("grpo", "turns") and not options["beta"]:
        options["sync_ref_model"] = False
    return kind, options | {"rows": 12}


def main(work: Path, steps: int = 200, seed: int = 0) -> int:
    """Audit at least `steps` training steps.

    Returns how many steps gave a false alarm or an error in the audit.
    """
    work.mkdir(parents=True, exist_ok=True)
    model = trl_fixtures.write_model(work)
    rng = random.Random(seed)
    audited = alarms = rejected = 0
    started = time.process_time()
    with (work / "healthy.jsonl").open("w") as log:
        while audited < steps:
            kind, options = sample_options(rng)
            line = {"kind": kind, "options": options, "wrong": []}
            shutil.rmtree(work / "steps", ignore_errors=True)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    trl_fixtures.train(kind, model, work / "steps", STEPS, **options)
                for step in range(STEPS):
                    findings = audit(read(work / "steps" / str(step)))
                    line["wrong"].append([finding.stage for finding in findings if not finding.ok])
            except Exception as error:  # raised by TRL, which rejects the settings, or by the audit
                line["error"] = f"{type(error).__name__}: {error}"
                last_frames = traceback.extract_tb(error.__traceback__)[-2:]
                is_audit = any("minivlmrl_audit" in frame.filename for frame in last_frames)
                alarms += is_audit
                rejected += not is_audit
            audited += len(line["wrong"])
            alarms += sum(map(bool, line["wrong"]))
            print(json.dumps(line), file=log, flush=True)
            if line.get("error") or any(line["wrong"]):
                print(line, flush=True)
    seconds = time.process_time() - started
    print(f"{audited} steps, {alarms} alarms or errors, {rejected} settings rejected by TRL, {seconds:.0f} CPU seconds")
    return alarms


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    sys.exit(bool(main(Path(folder), *map(int, numbers))))
