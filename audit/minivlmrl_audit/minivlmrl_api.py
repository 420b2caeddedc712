"""Everything that the audit uses of minivlmrl, the package whose definitions it trusts.

No other module of the audit imports minivlmrl: who changes it reads here what the audit needs.
audit/tests/bugs.py alone goes past this list, because it replaces functions inside of modules.
"""

# Formulas that a trainer's loss is compared with: advantages, GRPO's family, DPO's, and PPO's GAE.
from minivlmrl.losses.advantages import nanstd
from minivlmrl.losses.grpo import (
    AVERAGES,
    TERMS,
    Counts,
    GRPOLossOptions,
    TermInputs,
    correct_kl,
    importance_ratio,
    kl_term,
)
from minivlmrl.losses.grpo_variants import kept_tokens, mean_entropy, off_policy_mask
from minivlmrl.losses.ppo import gae
from minivlmrl.losses.preference import DPOLossOptions, answer_logps, dpo_loss

# The model that computes log-probabilities and gradients of a dumped step again, and its inputs.
from minivlmrl.data.rows import Prompt
from minivlmrl.data.tokenizer import load_tokenizer
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import hub_name
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.rope import get_rope_index

# Training: `verify` trains a run again, audit/museum.py the default recipe with a bug.
from minivlmrl.commands.train import train_recipe
from minivlmrl.diagnostics.replay import run_config, train_again
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.process import is_first

# The files that a run writes: their names, and how the files of states are read.
from minivlmrl.run.checkpoint_files import find_pieces, read_rows
from minivlmrl.run.checkpoints import COMPLETE, state_folders
from minivlmrl.run.metrics import METRICS, TIMINGS
from minivlmrl.run.rollout_log import COMPLETIONS, Logged
from minivlmrl.run.trainer_state import RUN

# JSON, YAML and safetensors, read strictly and written atomically; errors that name the file.
from minivlmrl.config.parsing import json_text, naming, parse_json, parse_yaml, read_json, require
from minivlmrl.files import digest, read_lines, save_tensors, write_json
