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
from minivlmrl.losses.parity import distance
from minivlmrl.losses.grpo_variants import kept_tokens, mean_entropy, off_policy_mask
from minivlmrl.losses.preference import DPO_LOSSES, Divergence, answer_logps, check_dpo_options, dpo_loss

# The model that recomputes the dumped log-probabilities and gradients, and its inputs.
from minivlmrl.data.rows import Prompt
from minivlmrl.data.tokenizer import load_tokenizer
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import hub_name
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.rope import get_rope_index

# audit/mutation_study.py trains the default recipe with a bug.
from minivlmrl.commands.train import train_recipe

# Strict readers and atomic writers for JSON and safetensors, with errors that name the file.
from minivlmrl.config.parsing import Reader
from minivlmrl.errors import error_context, check_field
from minivlmrl.json_files import read_json
from minivlmrl.config.types import Count, Dtype, Finite
from minivlmrl.files import save_tensors
from minivlmrl.json_files import write_json
