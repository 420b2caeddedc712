"""All options of a recipe, as dataclasses: one dataclass for each section of the recipe.

A recipe is a YAML file with the fields of the dataclass RunConfig. On the command line, `--grpo.beta=0.04` sets one
option, and `python train.py --help grpo` prints the options of a section with their comments. A training stage that you
write yourself declares its options in its own file.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from minivlmrl.config.types import (
    LAYERS,
    BoxSpace,
    Code,
    Count,
    Dtype,
    FilePath,
    Finite,
    Frozen,
    MinPixels,
    Part,
    RecipePath,
    RewardName,
    Weights,
)

Whole = Annotated[int, "[1, 1e15)"]
CorrectionBound = Annotated[float, "[0, inf)"] | None  # None disables the bound

# ------------------------------------------------------------------------------ model and adapters


@dataclass
class ModelOptions:
    """The model to train: a folder with weights (`path`), or random weights (`config`)."""

    path: FilePath | None = None  # Hugging Face folder or repository id
    config: RecipePath | None = None  # path of a config.json, to train a model from random weights
    dtype: Dtype = "float32"  # dtype of parameters, gradients and AdamW moments
    # dtype of the forward and backward pass, such as bfloat16; None uses the `dtype` option
    compute_dtype: Dtype | None = None
    # dtype of the saved weights. None keeps the dtype of the files in `path`; random weights are saved in `dtype`
    save_dtype: Dtype | None = None
    # parts of the model that are not trained: vision (the vision tower), merger (which projects the tower's output),
    # language, embeddings, or layers such as layers.0-11 and visual.blocks.7. The reference model shares
    # all frozen weights with the trained model
    freeze: list[Frozen] = field(default_factory=list)
    # store only the input of each transformer block, and recompute the block's activations in the backward pass
    activation_checkpointing: bool = False

    def __post_init__(self):
        for text in self.freeze:
            if text not in get_args(Part) and not LAYERS.fullmatch(text):
                raise ValueError(
                    f"freeze contains {text!r}, but each item must be {', '.join(get_args(Part))}, or a range of "
                    "layers such as layers.0-11 or visual.blocks.0-7"
                )


@dataclass
class LoRAOptions:
    """LoRA adapters. While adapters are trained, the weights of the base model are frozen."""

    # folder of trained PEFT adapters to train further; r, alpha and target must be the same as in the first training
    path: FilePath | None = None
    r: Annotated[int, ">= 0"] = 0  # rank of the matrices; 0 trains without adapters
    alpha: Annotated[float, "(0, inf)"] = 32.0  # an adapter's output is scaled by alpha / r
    # dropout probability for the inputs of LoRA's matrix A during training
    dropout: Annotated[float, "[0, 1)"] = 0.0
    # layers that get adapters: language (the decoder), vision, merger, a part that only this model family has (see
    # docs/memory.md), or a regular expression that matches layer names
    target: list[str] = field(default_factory=lambda: ["language"])
    # nf4 stores frozen weights in 4 bits (QLoRA): those of the decoder's linear layers, and of all other layers that
    # have adapters
    quantize: Literal["nf4"] | None = None

    def __post_init__(self):
        if self.path and not self.r:
            raise ValueError(
                f"path is {self.path}, but r is 0, so the model would be trained without the adapters of this folder; "
                "set r to the rank of the adapters, or path to null"
            )


@dataclass
class ReferenceOptions:
    """The reference model for the KL penalty and DPO's loss; it is not trained."""

    # folder or Hub repository id of the reference model; None copies the policy when the stage starts
    path: FilePath | None = None
    # move the reference toward the policy during a stage (TR-DPO); see extras/moving_reference.py
    sync_ref_model: bool = False
    # weight of the policy in the moved reference; 1 replaces the reference with a copy of the policy
    ref_model_mixup_alpha: Annotated[float, "(0, 1]"] = 0.6
    ref_model_sync_steps: Annotated[int, ">= 1"] = 512  # optimizer steps between two moves of the reference


# -------------------------------------------------------------------------------------------- data


@dataclass
class ImageOptions:
    """Options for the size of images, with the same names as in qwen-vl-utils."""

    # smallest and largest area of an image or of a video frame, in pixels
    min_pixels: MinPixels | None = None
    max_pixels: Whole | None = None
    resized_height: Whole | None = None  # fixed height in pixels, instead of the file's height
    resized_width: Whole | None = None

    def __post_init__(self):
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width must be given together; set both or neither")


@dataclass
class VideoOptions(ImageOptions):
    """Options for the size and selection of video frames; see data/video.py."""

    total_pixels: Whole | None = None  # upper bound on the total area of all frames
    fps: Annotated[float, "(0, 1e15)"] | None = None  # sampled frames per second
    nframes: Whole | None = None  # number of sampled frames, instead of fps
    # bounds on the number of frames if the option fps is set
    min_frames: Whole | None = None
    max_frames: Whole | None = None
    # start and end, in seconds, of the part of the video from which frames are sampled
    video_start: Annotated[float, "[0, 1e15)"] | None = None
    video_end: Annotated[float, "[0, 1e15)"] | None = None


@dataclass
class RowOptions:
    """Options for reading a file's rows."""

    # folder that relative image paths start from; None uses the folder of the data file
    image_root: FilePath | None = None
    # your own function for a different file format, as file.py:name. Your function converts a row of the file (a
    # dictionary) to the columns that docs/data.md describes
    format: Code | None = None
    # new names for columns: {label: solution} reads the `label` column as the `solution` column
    columns: dict[str, str] = field(default_factory=dict)
    # text of the last user turn; {problem} is replaced by the row's question. If rows have no question, the text must
    # not contain {problem}
    prompt_template: str = "{problem}"
    system_prompt: str | None = None  # None uses the chat template's default
    # library that resizes images. The fast image processors of transformers use torch. None follows the processor
    # settings in the model folder
    resize_backend: Literal["pil", "torch"] | None = None
    # size of images whose rows do not give one, such as {resized_height: 384, resized_width: 384}; see ImageOptions
    image: dict = field(default_factory=dict)
    # options for videos, such as {fps: 1}; see VideoOptions. Options in a row have priority
    video: dict = field(default_factory=dict)


@dataclass
class FileOptions:
    """One of the files in data.train."""

    file: FilePath  # see data/row_files.py
    # how many times each row of the file occurs in an epoch; 0.5 uses every second row
    weight: Annotated[float, "(0, 1000]"] = 1.0
    sampling: str = "all"  # rows to use: all, first:N, end:N or random:N; N may be a percentage such as 10%
    # folder that relative image paths start from; None uses data.image_root
    image_root: FilePath | None = None
    # names of the rewards that score the rows of this file; an empty list means all rewards in the recipe
    rewards: list[RewardName] = field(default_factory=list)
    prompt_template: str | None = None  # text of the last user turn; None uses data.prompt_template


@dataclass
class DataOptions(RowOptions):
    """Where training and evaluation rows come from: a built-in `task`, or data files; see docs/data.md."""

    # the built-in task "shapes", or your own task as "file.py:TASK"; arguments may follow in parentheses
    task: Code | None = None
    # file of training rows; docs/data.md describes the columns
    train_file: FilePath | None = None
    train: list[FileOptions] = field(default_factory=list)  # several training files, instead of train_file
    files: dict[str, FilePath] = field(default_factory=dict)  # training rows for individual stages: {sft: rows.jsonl}
    # file of held-out rows; docs/data.md describes the columns
    eval_file: FilePath | None = None
    # leave out training rows whose prompt has more tokens than max_prompt_tokens; None keeps all rows. In a stage that
    # trains on given answers, such as SFT, the limit applies to the prompt together with the row's longest answer
    max_prompt_tokens: Annotated[int, ">= 1"] | None = None
    eval_rows: Annotated[int, ">= 0"] = 256  # maximum number of rows to evaluate; 0 for none
    # also evaluate with gray images and with the images of other rows, to measure how much answers depend on the image
    eval_without_images: bool = False
    # smallest area of an image, in pixels; None follows the processor settings in the model folder
    min_pixels: MinPixels | None = None
    # largest area of an image, in pixels; None follows the processor settings
    max_pixels: Count | None = None
    # threads that prepare the next prompts during an optimizer step; 0 prepares prompts between steps
    image_workers: Annotated[int, "[0, 64]"] = 2
    skip_unreadable: bool = False  # skip training rows whose image cannot be read, and count them
    # variables for the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict = field(default_factory=dict)
    # units of box coordinates in answers: pixels of the original or of the resized image, thousandths of the image
    # size, or fractions from 0 to 1 (unit); None follows the convention of the model family
    box_space: BoxSpace | None = None
    # part of a completion that counts as the answer: the text in <answer> tags, the whole text, or its last line
    answer_format: Literal["tags", "whole", "last_line"] = "tags"
    # rewards for evaluations; the first reward is reported in the most detail. None uses the training rewards
    eval_rewards: list[RewardName] | None = None

    def __post_init__(self):
        if "{problem}" not in self.prompt_template and self.task:
            raise ValueError(
                f"prompt_template is {self.prompt_template!r}, but it must be "
                "a text that contains {problem}, which is replaced by the question of the task"
            )
        if self.task and self.eval_file:
            raise ValueError(
                f"eval_file is {self.eval_file}, but evaluations would use the rows of the task {self.task}; set "
                "task to null and train_file to a file of rows, or set eval_file to null"
            )
        if self.eval_rewards == []:
            raise ValueError("eval_rewards is [], but it must name at least one reward")
        if "reward_model" in (self.eval_rewards or ()):
            raise ValueError(
                "eval_rewards contains reward_model, which can only score training rows; remove "
                "reward_model from the list"
            )


# ---------------------------------------------------------------------------- sampling and rollouts


# options that remove unlikely tokens before sampling, with the value at which each option keeps all tokens
NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class SamplingOptions:
    """Options for sampling completions, and for the tokens and texts that end a completion."""

    temperature: Annotated[float, "[0, inf)"] = 1.0  # divides the logits; 0 selects the most likely token
    max_new_tokens: Annotated[int, "[1, 1048576]"] = 256  # longest completion, in tokens
    # ids of tokens that end a completion; None means <|im_end|>, <|endoftext|>, and the end tokens in the model
    # folder's generation_config.json
    stop_token_ids: list[Annotated[int, ">= 0"]] | None = None
    # sample only from the k most likely tokens, and from tokens that are as likely as the k-th; 0 keeps all tokens
    top_k: Annotated[int, ">= 0"] = 0
    # sample only from the most likely tokens whose probabilities add up to top_p (nucleus sampling)
    top_p: Annotated[float, "(0, 1]"] = 1.0
    min_p: Annotated[float, "[0, 1]"] = 0.0  # drop tokens with less than min_p times the largest probability
    # penalty for tokens that occur in the prompt or earlier in the completion: positive logits are divided by the
    # penalty, and negative logits are multiplied by it
    repetition_penalty: Annotated[float, "(0, inf)"] = 1.0
    # texts that end a completion (stop strings). The completion keeps the stop string, and the rest of the token in
    # which the stop string ends
    stop_strings: list[str] = field(default_factory=list)
    # maximum number of tokens in a sampling batch, counting its prompts and max_new_tokens for each completion. None
    # samples all prompts in one batch
    max_batch_tokens: Annotated[int, ">= 1"] | None = None
    # environment with tools that the model may call in its completions, as file.py:NAME; see docs/agents.md
    environment: Code | None = None
    # number of past turns whose images stay in the prompt of the next turn (see docs/agents.md); None keeps all images
    history: Annotated[int, ">= 1"] | None = None
    cuda_graph: Literal["auto", "never"] = "auto"  # auto runs decode steps as a CUDA graph on a GPU
    # engine that computes the logits of rollouts: the trained model itself (native), vLLM (docs/use.md), or a
    # class in your own file
    engine: Literal["native", "vllm"] | Code = "native"
    # arguments for the class vllm.LLM, such as dtype and max_model_len
    vllm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.environment and self.engine != "native":
            raise ValueError(
                f"engine is {self.engine!r}, but it must be native with an environment, because "
                "only the native engine can call tools"
            )
        if not all(self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings!r}, but it must not contain an empty text")

    @property
    def truncates(self) -> bool:
        """True if top_k, top_p or min_p removes tokens; training then uses the softmax over the tokens that remain."""
        return self.temperature > 0 and any(getattr(self, name) != off for name, off in NO_TRUNCATION.items())

    @property
    def filtered(self) -> bool:
        """True if top_k, top_p, min_p or the repetition penalty changes the probabilities before sampling."""
        return self.truncates or self.repetition_penalty != 1


@dataclass
class RolloutOptions:
    """Options for sampling during training: a check of log-probabilities, and the gathering of sharded weights."""

    # largest allowed difference, in nats, between a token's log-probabilities in sampling and in training. In bfloat16,
    # individual tokens are not checked; instead, the root mean square of all differences must be at most a tenth of the
    # limit
    max_logp_mismatch: Annotated[float, "(0, inf]; .inf disables the check"] = 1.0
    # gather all sharded weights before sampling; False gathers each layer's weights in each forward pass
    gather_weights: bool = True


# ------------------------------------------------------------------------------ optimizer and ranks


@dataclass
class OptimizerOptions:
    """Optimizer options for all training stages; the learning rate and adam_beta2 are set in each stage."""

    # AdamW, AdamW with 8-bit moments, or your own optimizer as file.py:name. Your optimizer is called with (parameters,
    # learning rate, betas=, weight_decay=), and its state must consist of tensors only
    name: Literal["adamw", "adamw_8bit"] | Code = "adamw"
    weight_decay: Annotated[float, "[0, inf)"] = 0.0  # applied to all weights
    max_grad_norm: Annotated[float, "(0, inf]; .inf does not clip"] = 1.0  # gradients with a larger norm are clipped


@dataclass
class ShardingOptions:
    """Options for sharding weights, gradients and optimizer state over the ranks with FSDP2."""

    enabled: bool = False  # False keeps a full copy of the model on each rank
    # number of full copies of the model across all ranks; with one copy per node, no weights are sent between nodes
    replicas: Annotated[int, ">= 1"] = 1
    cpu_offload: bool = False  # keep shards, gradients and optimizer state in CPU memory
    # gather weights and reduce gradients once per optimizer step, instead of once per micro-batch. This is faster, but
    # each GPU needs memory for all weights, and for all gradients in float32
    once_per_step: bool = False


# ------------------------------------------------------------------------------------------ stages


@dataclass
class TrainingOptions:
    """Options that every training stage has, such as the number of steps, the batch size and the learning rate."""

    max_steps: Annotated[int, ">= 0"] = 100  # optimizer steps
    prompts_per_step: Annotated[int, ">= 1"] = 32  # prompts per optimizer step, over all ranks
    micro_batch_size: Annotated[int, ">= 1"] = 32  # prompts per forward and backward pass
    learning_rate: Annotated[float, "(0, inf)"] = 1e-6  # learning rate after the warmup
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # schedule after warmup
    min_lr_ratio: Annotated[float, "[0, 1]"] = 0.0  # final rate as a fraction of learning_rate
    warmup_steps: Annotated[int, ">= 0"] = 0  # steps over which the learning rate rises linearly
    adam_beta2: Annotated[float, "[0, 1)"] = 0.99  # decay rate of AdamW's second moments

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps in one pass over the prompts of a rollout."""
        return 1

    @property
    def passes_per_rollout(self) -> int:
        """Optimizer steps that train on each row of a rollout."""
        return 1


@dataclass
class SFTOptions(TrainingOptions):
    """Options for supervised fine-tuning."""

    loss_type: Literal["nll", "dft"] = "nll"  # negative log-likelihood or DFT; see sft_loss


@dataclass
class DPOOptions(TrainingOptions):
    """Options for DPO and other losses on preference pairs."""

    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])  # names of losses in losses/preference.py
    loss_weights: list[Finite] | None = None  # weights of the losses; None gives each 1; MPO uses [0.8, 0.2, 1.0]
    beta: Annotated[float, "(0, inf)"] = 0.1  # scales the log ratios; larger values keep the policy near the reference
    # assumed fraction of pairs with swapped answers, for the losses sigmoid, exo_pair, robust, aot and aot_unpaired
    label_smoothing: Finite = 0.0
    # divergence that keeps the policy near the reference model
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: Finite = 0.5  # alpha in the alpha divergence
    ld_alpha: Annotated[float, "[0, 1]"] | None = None  # LD-DPO: weight for tokens beyond the shorter answer's length
    use_weighting: bool = False  # WPO: weight each pair by its probability under the policy
    reference_free: bool = False  # use 0 for all reference log-probabilities, so that no reference model is needed
    # compute the reference's log-probabilities for all rows before the first step, so that no second model stays in
    # memory; see extras/reference_logps.py
    precompute_ref_log_probs: bool = False


@dataclass
class RewardModelOptions(TrainingOptions):
    """Options for training a reward model on preference pairs."""

    # weight of the loss term (chosen score + rejected score)^2, which keeps the mean score near 0
    center_rewards_coefficient: Finite | None = None
    # model folder for the `reward_model` reward; None uses the model from the recipe's stage reward_model
    path: FilePath | None = None


@dataclass
class GRPOOptions(TrainingOptions):
    """Options for GRPO and its variants, such as GSPO, DAPO and RLOO."""

    num_generations: Annotated[int, ">= 2"] = 8  # G, the number of completions per prompt (the group size)
    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps per pass over a rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    # maximum number of tokens in a forward and backward pass; completions of the same prompt share the prompt's tokens,
    # but may be split over several passes. None sets no limit
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None
    # dynamic sampling: a group whose rewards are all equal is replaced by a group from another prompt. A step samples
    # at most max_num_gen_batches batches of prompts; 1 disables dynamic sampling
    max_num_gen_batches: Annotated[int, ">= 1"] = 1

    # function that computes advantages from rewards: a name in losses/advantages.py, or your own function as
    # file.py:name. None selects rloo for loss_type=rloo, gdpo for multi_objective_aggregation=normalize_then_sum, and
    # grpo otherwise
    advantages: Literal["grpo", "gdpo", "rloo"] | Code | None = None
    # group or batch: divide advantages by the standard deviation of the rewards in the group or batch. none: do not
    # divide
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # with several rewards, normalize their weighted sum, or normalize each reward before summing (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    # DAPO's penalty for long completions grows over the last N tokens before max_new_tokens; 0 disables the penalty
    soft_punish_cache: Annotated[int, ">= 0"] = 0
    # exclude from the loss all completions that were cut off at max_new_tokens (DAPO's overlong filtering)
    mask_truncated_completions: bool = False

    # policy loss: a name that grpo_loss accepts, or your own function with the same arguments as grpo_loss, as
    # file.py:name
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo", "cispo", "sapo", "vespo"] | Code = "dapo"
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"  # sequence: GSPO
    # the ratio of the new to the old policy is clipped to [1 - epsilon_low, 1 + epsilon_high]
    epsilon_low: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2
    epsilon_high: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2  # upper clip range; see epsilon_low
    beta: Annotated[float, "[0, inf)"] = 0.0  # weight of the KL penalty; 0 needs no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # KL estimator; see kl_term
    # multiply the KL penalty by pi / pi_old, which makes the gradient of the penalty unbiased
    use_bias_correction_kl: bool = True
    # train only on the completion tokens with the highest entropy: 0.2 trains on a fifth of all tokens
    top_entropy_quantile: Annotated[float, "(0, 1]"] = 1.0
    entropy_coef: Finite = 0.0  # weight of the entropy bonus
    # how importance sampling corrects for log-probabilities that differ between sampling and training
    rollout_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    # lower and upper bounds for the importance ratio that grpo.rollout_correction computes
    rollout_correction_bounds: tuple[CorrectionBound, CorrectionBound] = (None, 3.0)

    def __post_init__(self):
        if not 0 <= self.epsilon_low <= self.epsilon_high:  # the test also rejects NaN
            raise ValueError(
                f"epsilon_low is {self.epsilon_low}, but it must be between 0 and epsilon_high, "
                f"which is {self.epsilon_high}"
            )

    @property
    def steps_per_rollout(self) -> int:
        return self.steps_per_generation

    @property
    def passes_per_rollout(self) -> int:
        return self.num_iterations

    @property
    def advantages_name(self) -> str:
        """The name of the advantage function; if grpo.advantages is None, the name follows from other options."""
        if self.advantages is not None:
            return self.advantages
        if self.loss_type == "rloo":
            return "rloo"
        return "gdpo" if self.multi_objective_aggregation == "normalize_then_sum" else "grpo"


@dataclass
class PPOOptions(TrainingOptions):
    """Options for PPO with a critic."""

    num_generations: Annotated[int, ">= 1"] = 1  # completions per prompt
    num_mini_batches: Annotated[int, ">= 1"] = 1  # optimizer steps per pass over a rollout
    num_ppo_epochs: Annotated[int, ">= 1"] = 4  # passes over each rollout
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None  # see grpo.max_tokens_per_micro_batch
    # the ratio of the new to the old policy is clipped to 1 +- cliprange, and the change in the critic's value is
    # clipped to +- cliprange
    cliprange: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2
    vf_coef: Annotated[float, "[0, inf)"] = 0.1  # weight of the critic's loss
    critic: Literal["shared", "separate"] = "shared"  # shared: value head on the policy; separate: a model of its own
    # model folder of a critic or reward model that initializes a separate critic; None copies the policy
    critic_path: FilePath | None = None
    kl_coef: Annotated[float, "[0, inf)"] = 0.05  # weight of the KL penalty; 0 needs no reference model
    kl_estimator: Literal["k1", "k3"] = "k1"  # KL estimator; see token_rewards
    # penalty that is subtracted from the score of a completion without an end token; None disables the penalty
    missing_eos_penalty: Finite | None = None
    gamma: Annotated[float, "[0, 1]"] = 1.0  # discount factor of GAE
    lam: Annotated[float, "[0, 1]"] = 0.95  # lambda of GAE

    @property
    def steps_per_rollout(self) -> int:
        return self.num_mini_batches

    @property
    def passes_per_rollout(self) -> int:
        return self.num_ppo_epochs


# ------------------------------------------------------------------------------------------ the run


@dataclass
class RunConfig:
    """All options of a training run."""

    seed: int = 0  # seed for weights, data order and sampling
    output_dir: str = "runs/default"  # folder for all files of the run
    # names of the training stages, in order. Give your own stage as file.py:Class; the class attribute `stage` names
    # the section with its options
    stages: list[Code] = field(default_factory=lambda: [Code("grpo")])
    # epochs after which a stage ends; more passes over a rollout add steps, but do not use more rows
    max_epochs: Annotated[float, "(0, 1e6]"] | None = None
    # CPU threads per rank; None uses the environment variable OMP_NUM_THREADS, or an equal share of the cores
    num_threads: Annotated[int, "[1, 4096]"] | None = None
    # minutes between saved training states, from which a run can resume; each stage also saves its last state
    checkpoint_minutes: Annotated[float, "[0, inf)"] = 10.0
    # also save a training state every N steps; if checkpoint_steps and checkpoint_minutes are both 0, only a signal
    # such as SIGTERM saves a state
    checkpoint_steps: Annotated[int, ">= 0"] = 0
    # "auto" resumes from the newest training state in output_dir, if there is one. A path names the training state to
    # resume from. "never" deletes the training states in output_dir and starts over
    resume: str | None = None
    eval_steps: Annotated[int, ">= 0"] = 0  # also evaluate every N steps; 0 evaluates only between stages
    # also write the weights to the folder checkpoint/ every N steps; 0 writes the weights only after a stage
    save_steps: Annotated[int, ">= 0"] = 0
    # what save_steps and best_metric write: all weights with the adapter merged, or only the adapter, which is far
    # smaller. At its end, a run always writes merged weights
    save: Literal["merged", "adapter"] = "merged"
    log_completions: Annotated[int, ">= 0"] = 10  # steps between entries in completions.jsonl; 0 logs no completions
    # log only the first N prompts of rank 0 in each entry of completions.jsonl; None logs all prompts of all ranks
    num_logged_prompts: Annotated[int, ">= 1"] | None = 4
    # minutes between updates of report.html; 0 writes the report only when the run ends
    report_minutes: Annotated[float, "[0, inf)"] = 1.0
    # evaluation metric, such as eval/accuracy_greedy; the weights with the best value are saved in the folder best/
    best_metric: str | None = None
    # trackers that receive the metrics, or your own function as file.py:name. Your function is called with (config,
    # steps, closing), and returns a function log(values, steps)
    report_to: list[Literal["tensorboard", "wandb"] | Code] = field(default_factory=list)
    # refuse to start if the `memory` command estimates that the run needs more memory than the GPUs have
    check_memory: bool = True
    # seconds that a rank waits for other ranks in an optimizer step; sampling, rewards and saving may take longer on
    # one rank
    timeout: Annotated[float, "(0, 1e9)"] = 600.0
    # hours that a rank waits for a rank that hangs, for example while computing a reward or reading an image; then the
    # run ends
    max_wait_hours: Annotated[float, "(0, 720]"] = 24.0
    # time limit in seconds for one call of a reward function; a call scores all completions in a batch
    max_reward_seconds: Annotated[float, "(0, 1e9)"] = 1800.0
    model: ModelOptions = field(default_factory=ModelOptions)
    adapter: LoRAOptions = field(default_factory=LoRAOptions)
    data: DataOptions = field(default_factory=DataOptions)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    # GRPO and PPO maximize the weighted sum of these rewards: {reward name: weight}, such as {accuracy: 1.0}
    rewards: Weights = field(default_factory=lambda: {RewardName("format"): 0.5, RewardName("accuracy"): 1.0})
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    sft: SFTOptions = field(default_factory=SFTOptions)
    dpo: DPOOptions = field(default_factory=DPOOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    grpo: GRPOOptions = field(default_factory=GRPOOptions)
    ppo: PPOOptions = field(default_factory=PPOOptions)

    def __post_init__(self):
        # fields that are not options of a recipe, because load_config sets them
        self.recipe = ""  # recipe path
        # sections of the recipe whose stages do not run, because --stages on the command line leaves them out
        self.unused_sections: list[str] = []
        self.names_of_files: dict[str, str] = {}  # "file.py:Class" of `stages` -> Class.stage
        for path in [Path(self.output_dir), *Path(self.output_dir).parents]:
            if path.is_file():
                raise ValueError(f"output_dir is {self.output_dir}, but {path} is a file; choose a folder")
        if self.rewards and not any(self.rewards.values()):
            raise ValueError(
                f"rewards are {self.rewards}; at least one weight must not be 0, because otherwise nothing is learned"
            )

    if not TYPE_CHECKING:  # because pyright must report unknown fields

        def __getattr__(self, name: str):
            raise AttributeError(
                f"the recipe has no section {name!r}. A trainer's `options` are those of its stage (before: `config`), "
                "and its `config` is the whole recipe (before: `run`)"
            )

    @property
    def stage_names(self) -> list[str]:
        """The stages' names, which are also the names of their option sections: `again` for my_stage.py:Again."""
        return [self.names_of_files.get(stage, stage) for stage in self.stages]

    @property
    def eval_rewards(self) -> list[RewardName]:
        """The rewards used in evaluations: data.eval_rewards or, by default, the training rewards.

        Training rewards are listed by weight, the largest first, but format rewards always come last. Evaluations leave
        out the `reward_model` reward, because only a trainer computes the scores of a reward model. If `reward_model`
        is the only training reward, evaluations use the rewards accuracy and format.
        """
        if self.data.eval_rewards is not None:
            return self.data.eval_rewards
        names = [name for name in self.rewards if name != "reward_model"]
        names.sort(key=lambda name: (name.endswith("format"), -self.rewards[name]))
        return names or [RewardName("accuracy"), RewardName("format")]

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP2 wraps the model, to shard its weights or to compute its layers in model.compute_dtype."""
        return self.sharding.enabled or self.model.compute_dtype is not None
