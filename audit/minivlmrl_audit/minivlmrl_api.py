"""All names that the audit imports from minivlmrl, whose definitions it trusts.

No other module in the audit imports minivlmrl, so this list shows which changes in minivlmrl affect the audit. Only
audit/tests/bugs.py imports more, because it replaces functions in modules.
"""

# Definitions that a trainer's loss is compared with: advantages, GRPO and its variants, and DPO.
from minivlmrl.losses.advantages import nanstd
from minivlmrl.losses.grpo import (
    AVERAGES,
    TERMS,
    LossNormalizer,
    TermInputs,
    check_bounds,
    correct_kl,
    importance_ratio,
    kl_term,
)
from minivlmrl.losses.grpo_variants import kept_tokens, mean_entropy, off_policy_mask
from minivlmrl.losses.preference import DPO_LOSSES, Divergence, answer_logps, check_dpo_options, dpo_loss

# The model that recomputes the dumped log-probabilities and gradients, and its inputs.
from minivlmrl.data.rows import Prompt
from minivlmrl.data.tokenizer import load_tokenizer
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import hub_name
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.rope import get_rope_index

# Training: verify.py repeats a run, and audit/mutation_study.py trains the default recipe with a bug.
from minivlmrl.commands.train import train_recipe
from minivlmrl.extras.replay import run_config, train_again
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.process import is_first

# A run's files: their names, and functions that read saved states.
from minivlmrl.run.checkpoint_files import find_pieces, read_rows
from minivlmrl.run.checkpoints import COMPLETE, state_folders
from minivlmrl.run.metrics import METRICS, TIMINGS
from minivlmrl.run.results import BEST
from minivlmrl.run.rollout_log import COMPLETIONS, LogLine
from minivlmrl.run.trainer_state import RUN
from minivlmrl.trainers.reward_model import FOLDER as REWARD_MODEL

# Strict readers and atomic writers for JSON, YAML and safetensors, with errors that name the file.
from minivlmrl.config.parsing import Reader, parse_yaml
from minivlmrl.errors import error_context, check_field
from minivlmrl.json_files import json_text, parse_json, read_json
from minivlmrl.config.types import Count, Dtype, Finite
from minivlmrl.files import digest, save_tensors
from minivlmrl.json_files import read_lines, write_json
