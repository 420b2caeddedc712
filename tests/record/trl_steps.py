"""Record optimizer steps of TRL's trainers (1.16, one process), which `minivlmrl parity` can check.

Copy this file beside your script:

    from trl_steps import grpo_steps

    with grpo_steps(trainer, "steps"):      # or dpo_steps, sft_steps
        trainer.train()                     # steps/0, steps/1, ...; then: minivlmrl parity steps/0

Every value is recorded outside the code that `parity` checks: log-probabilities and their gradients are recorded at a
model's forward, the loss is the result of training_step, the rewards are the results of the reward functions, and the
weights are copied before and after optimizer.step.
"""

import pickle
import re
from contextlib import ExitStack
from functools import partial, wraps
from inspect import iscoroutinefunction
from itertools import takewhile
from operator import eq
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from minivlmrl.extras.parity.stages import here_or_later
from minivlmrl.extras.parity.step import write
from minivlmrl.extras.parity.step_format import BY_ROW, FILTERS, OPTIONS_OF_A_ROLLOUT, options_of

# parameters without weight decay in transformers.Trainer
NO_DECAY = r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)"
AUTOCASTS = {"no": None, "bf16": "bfloat16"}  # accelerate's mixed_precision and our field `autocast`
# {name in TRL's micro-batches: name in a recorded step}
INPUTS = {name: name for name in [*BY_ROW, "pixel_values", "image_grid_thw", "num_images"]}
INPUTS["sampling_per_token_logps"] = "sampler_logps"
# {name in TRL's model outputs: [name in a recorded step, name of the gradient]}
OUTPUTS = {"log_probs": ["per_token_logps", "logps_gradient"], "log_sum_sq_probs": ["log_sum_sq_probs", ""]}
SMOOTHED_LOSSES = {"robust", "exo_pair", "aot", "aot_unpaired"}  # DPO losses that use label_smoothing in TRL


def sft_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Return a context manager that records the first steps of an SFTTrainer.

    If the model does not accept num_items_in_batch, TRL computes a separate mean for each micro-batch.
    """
    if trainer.args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {trainer.args.label_smoothing_factor}, but `parity` does not "
            "support label smoothing in SFT. Set label_smoothing_factor to 0."
        )
    about = {
        "kind": "sft",
        "loss": {"loss_type": trainer.args.loss_type.removeprefix("chunked_")},
        "mean_over": "step" if trainer.model_accepts_loss_kwargs else "micro_batch",
    }

    def rows(inputs: dict) -> dict:
        # The first token is not trained, because no earlier token predicts it.
        predicted = inputs["attention_mask"].cumsum(1) > 1
        tensors = {"completion_mask": ((inputs["labels"] != -100) & predicted).long()}
        if trainer.completion_only_loss:
            return tensors | prompt_mask(trainer, inputs["input_ids"])
        if not trainer.args.assistant_only_loss:
            tensors["prompt_mask"] = (~predicted).long()
        return tensors

    return Steps(trainer, folder, steps, about, rows)


def dpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Return a context manager that records the first steps of a DPOTrainer.

    In TRL's micro-batches, all chosen answers come first, then all rejected answers.
    """
    loss = options_of("dpo", vars(trainer.args))
    if SMOOTHED_LOSSES.isdisjoint(loss["loss_type"]):
        loss["label_smoothing"] = 0.0
    about = {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}
    if trainer.ref_model and not trainer.args.sync_ref_model:
        about["ref_model"] = "../{}/ref_model"  # the reference before the first step, because it never changes

    def rows(inputs: dict) -> dict:
        pairs = len(inputs["input_ids"]) // 2
        number = torch.arange(2 * pairs)
        tensors = {"pair": number % pairs, "chosen": (number < pairs).long(), "rollout_step": 0 * number}
        return tensors | prompt_mask(trainer, inputs["input_ids"])

    return Steps(trainer, folder, steps, about, rows)


def grpo_options(trainer) -> dict:
    config = dict(vars(trainer.args))
    sampling = config | (config.get("generation_kwargs") or {})
    config["epsilon_low"] = config["epsilon"]
    if config["entropy_coef"] or config["use_adaptive_entropy"] or config["top_entropy_quantile"] != 1.0:
        raise ValueError(
            "`parity` does not support losses with entropies. Set entropy_coef to 0, use_adaptive_entropy to False, "
            "and top_entropy_quantile to 1."
        )
    if config["epsilon_high"] is None:
        config["epsilon_high"] = config["epsilon"]
    return {
        "kind": "grpo",
        "loss": options_of("grpo", config),
        # folder of the policy that sampled a completion, where {} is the number of the step: ../7/model for step 7
        "old_model": "../{}/model",
        "ref_model": trainer.ref_model and "../{}/ref_model",
        "stop_token_ids": list(trainer.eos_token_ids),
        "pad_token_id": trainer._tokenizer.pad_token_id,
        "image_token_id": trainer._image_pad_token_id,
        **{name: config.get(name) for name in OPTIONS_OF_A_ROLLOUT},
        **{name: sampling.get(name) for name in FILTERS},
    }


def prompt_mask(trainer, ids: torch.Tensor) -> dict:
    """Return a mask (n, S) of the prompts, which end with the chat template's last "<|im_start|>assistant"."""
    processor = trainer.processing_class
    chat = [{"role": "user", "content": "x"}]
    if not processor.chat_template:
        return {}
    render = partial(processor.apply_chat_template, chat, tokenize=False)
    generation_prompt = render(add_generation_prompt=True).removeprefix(render(add_generation_prompt=False))
    start_ids = trainer._tokenizer.encode(generation_prompt, add_special_tokens=False)
    starts = (ids.unfold(1, len(start_ids), 1) == torch.tensor(start_ids)).all(-1)
    return {"prompt_mask": here_or_later(pad(starts, (len(start_ids) - 1, 0))).long()}


class Steps(ExitStack, TrainerCallback):
    """Context manager that records the first steps of a trainer in folder/0, folder/1, ...

    Args:
        about: content for step.json.
        rows: function that returns a micro-batch's tensors, given its inputs.
    """

    def __init__(self, trainer, folder, steps: int, about: dict, rows):
        super().__init__()
        precision = trainer.accelerator.mixed_precision
        if precision not in AUTOCASTS:
            raise ValueError(
                f"the trainer's mixed precision is {precision}, but it must be no or bf16, because "
                "`parity` does not support scaled gradients. Set bf16 to True, or fp16 to False."
            )
        self.trainer = trainer
        self.folder = Path(folder)
        self.steps = steps
        self.rows = rows
        self.parts = []  # tensors from each micro-batch so far
        self.tensors = {}  # the step's other tensors: weights, gradients and optimizer state
        self.rates = []  # learning rates so far
        self.models = {"model": trainer.model}
        if getattr(trainer, "ref_model", None):
            self.models["ref_model"] = trainer.ref_model
        self.about = {
            "image_token_id": getattr(trainer.model.config, "image_token_id", None),
            "autocast": AUTOCASTS[precision],
            **{name: name for name in self.models},
            **about,
        }
        for model in self.models.values():
            self.callback(model.register_forward_hook(self.forward, with_kwargs=True).remove)
        trainer.add_callback(self)
        self.callback(trainer.remove_callback, self)
        self.given = []  # (token ids, images) of each batch that the model has not seen yet
        if trainer.data_collator:
            self.enter_context(patch.object(trainer, "data_collator", self.collated(trainer.data_collator)))
        self.wrap("_prepare_inputs", self.begin)
        self.wrap("training_step", self.keep_loss)
        self.wrap("_clip_grad_norm", self.keep_norm)

    def keep_loss(self, loss, *_):
        self.parts[-1]["loss"] = loss.detach().view(1)
        self.copy("grad")

    def keep_norm(self, norm, *_):
        self.tensors["grad_norm"] = torch.as_tensor(norm).view(1)

    def looked(self, inner, look):
        """Wrap the function `inner` so that `look` gets its results and arguments in recorded steps."""

        @wraps(inner)
        def outer(*arguments, **options):
            result = inner(*arguments, **options)
            if self.on:
                look(result, *arguments)
            return result

        return outer

    def wrap(self, name: str, look):
        self.enter_context(patch.object(self.trainer, name, self.looked(getattr(self.trainer, name), look)))

    @property
    def on(self) -> bool:
        """True if the current step is recorded. Evaluations are not recorded."""
        return self.trainer.state.global_step < self.steps and self.trainer.model.training

    def collated(self, collate):
        """Wrap the data collator so that it also records the images in the rows of the data set."""

        def outer(examples):
            batch = collate(examples)
            has_images = "pixel_values" in batch and all("images" in example for example in examples)
            if has_images and self.trainer.state.global_step < self.steps:
                # In DPO, all chosen answers come first, then all rejected answers.
                copies = len(batch["input_ids"]) // len(examples)
                pictures = [example["images"] for example in examples] * copies
                self.given.append((batch["input_ids"].clone(), given_pictures(pictures, self.trainer)))
            return batch

        return outer

    def given_to(self, ids: torch.Tensor) -> dict:
        """Return the images of the first batch with these token ids; batches are collated before they are used."""
        for number, (known_ids, pictures) in enumerate(self.given):
            if torch.equal(known_ids, ids):
                del self.given[number]
                return pictures
        return {}

    def begin(self, inputs: dict, *_):
        """Record the tensors and images of a micro-batch from the inputs of the model."""
        part = self.rows(inputs)
        for their_name, name in INPUTS.items():
            if inputs.get(their_name) is not None:
                part.setdefault(name, torch.as_tensor(inputs[their_name]))
        rows = next(iter(part.values()))
        if self.given:
            part |= self.given_to(inputs["input_ids"])
        part["micro_batch"] = torch.full((len(rows),), len(self.parts))
        self.parts.append(part)

    def forward(self, model, arguments, options, output):
        """Record the inputs, outputs and gradients of a forward pass and, in DPO, the reference's log-probabilities."""
        logps = getattr(output, "log_probs", None)
        name = None
        if model is not self.trainer.model:
            name = "ref_model"
        elif logps is not None and not logps.requires_grad:
            name = "old_model"  # without gradients, the policy scores what it has just sampled
        if name and model.training and any(noises(model)):
            self.about["training"] = sorted({name, *self.about.get("training", ())})
        if not self.parts or logps is None:
            return
        part = self.parts[-1]
        if logps.requires_grad:
            part["input_ids"] = options["input_ids"]
            part["attention_mask"] = options["attention_mask"]
            # Gradients at masked tokens are set to 0, because these gradients do not reach the weights.
            keep_outputs(part, output, output.label_mask)
        elif "pair" in part:
            part.setdefault("ref_per_token_logps", logps.clone())

    def copy(self, *kinds: str):
        """Record copies of the parameters (kind "before" or "after"), gradients ("grad") or AdamW moments."""
        for name, p in self.trainer.model.named_parameters():
            values = {"before": p, "grad": p.grad, "clipped": p.grad, "after": p}
            values |= self.trainer.optimizer.state.get(p, {})
            for kind in kinds:
                if values.get(kind) is not None:
                    self.tensors[f"{kind}.{name}"] = values[kind].detach().clone()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])
        self.tensors |= self.row_tensors(join(self.parts), state.global_step)
        self.copy("before", "clipped", "exp_avg", "exp_avg_sq")
        self.save_models(self.folder / str(state.global_step))
        self.about |= self.settings(args, state)

    def row_tensors(self, tensors: dict, step: int) -> dict:
        return tensors

    def save_models(self, folder: Path):
        """Save the tokenizer and the models; a policy with dropout is left out, because its outputs are random."""
        if any(noises(self.trainer.model)):
            self.models.pop("model", None)
            self.about |= {"model": None, "old_model": None}
        for name, model in self.models.items():
            model.save_pretrained(folder / name)
            self.trainer._tokenizer.save_pretrained(folder / name)

    def settings(self, args, state) -> dict:
        model = self.trainer.model
        return {
            "optimizer": {
                "name": args.optim.value.partition("_")[0],
                "learning_rate": self.rates[-1],
                "betas": [args.adam_beta1, args.adam_beta2],
                "eps": args.adam_epsilon,
                "no_decay": [name for name, _ in model.named_parameters() if re.search(NO_DECAY, name.lower())],
                "weight_decay": args.weight_decay,
                "max_grad_norm": args.max_grad_norm,
                "step": state.global_step + 1,
            },
            "schedule": {
                "type": args.lr_scheduler_type.value,
                "learning_rate": args.learning_rate,
                "warmup_steps": args.get_warmup_steps(state.max_steps),
                "max_steps": state.max_steps,
                "step": state.global_step,
                "rates": self.rates[:-1],
            },
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def on_optimizer_step(self, args, state, control, **_):
        if self.on:
            self.copy("after")
            write(self.folder / str(state.global_step), self.about, self.tensors)
        self.parts = []
        self.tensors = {}


class grpo_steps(Steps):
    """Context manager that records the first steps of a GRPOTrainer, with the rewards and groups of its rollouts."""

    def __init__(self, trainer, folder, steps: int = 1):
        super().__init__(trainer, folder, steps, grpo_options(trainer), self.micro_batch)
        self.rollouts = []  # tensors from each rollout so far
        self.num_rows = 0  # completions in these rollouts
        self.conversations = []  # one per completion so far
        self.given_rewards = {}  # {reward function's index: its rewards for this rollout}
        self.wrap("_generate_and_score_completions", self.generated)
        self.wrap("_calculate_rewards", self.judged)
        self.wrap("_generate_single_turn", self.drew)
        functions = list(trainer.reward_funcs)
        for number, function in enumerate(functions):
            # The return value of a plain reward function is recorded. For reward models and async functions, the
            # rewards that the trainer stores are recorded.
            if not (isinstance(function, Module) or iscoroutinefunction(function)):
                functions[number] = self.looked(function, partial(self.given_rewards.__setitem__, number))
        self.enter_context(patch.object(trainer, "reward_funcs", functions))

    def drew(self, result, prompts: list, pictures, *_):
        """Record the token ids of each prompt that TRL gives to the sampler, and the sampled token ids."""
        if len(self.conversations) == self.num_rows:  # the first turn
            self.conversations += map(Conversation, prompts)
        conversations = self.conversations[self.num_rows :]
        pictures = pictures or [None] * len(prompts)
        row = -1
        for given_ids, shown, drawn_ids in zip(prompts, pictures, result[0], strict=True):
            counts = [x.num_known(given_ids) for x in conversations]
            row = max(range(row + 1, len(counts)), key=counts.__getitem__)
            conversations[row].pictures = shown or []
            conversations[row].add(given_ids, drawn_ids, self.trainer._tokenizer)

    def generated(self, result: dict, examples: list):
        keys = [pickle.dumps(example) for example in examples]  # each prompt's text and images
        # Two groups may have the same prompt, so a new group begins after every num_generations of its completions.
        groups = [(key, keys[:i].count(key) // self.trainer.num_generations) for i, key in enumerate(keys)]
        begin = self.num_rows
        self.num_rows += len(keys)
        rows = torch.arange(begin, self.num_rows)
        rollout = {
            "group": torch.tensor([begin + groups.index(group) for group in groups]),
            "rollout": rows * 0 + begin,
            "rollout_advantages": result["advantages"].clone(),
            "rewards": self.rewards,
        }
        self.rollouts.append(rollout)
        counted_mask = result["completion_mask"] * result.get("tool_mask", 1)
        # Each completion gets a row number, because TRL shuffles the completions of a rollout.
        result["row"] = rows
        result["rollout_step"] = rows * 0 + self.trainer.state.global_step
        result["rollout_tokens"] = rows * 0 + counted_mask.sum()

    def judged(self, result, *_):
        """Record the rewards (N, K) of N completions by K reward functions, with NaN for None."""
        self.rewards = result.clone().double()
        for number, rewards in self.given_rewards.items():
            self.rewards.numpy()[:, number] = rewards

    def row_tensors(self, tensors: dict, step: int) -> dict:
        """Add the rewards, groups and advantages of the rollouts whose completions are in the step."""
        rollouts = join(self.rollouts)
        begin = rollouts["rollout"][tensors["row"]].min()  # first completion in the earliest rollout that is used
        tensors["row"] -= begin
        if (tensors["rollout_step"] < step).any():
            # Without old log-probabilities, TRL's loss uses the current log-probabilities as the old ones.
            tensors.setdefault("old_per_token_logps", tensors["per_token_logps"])
        # The last step of an epoch may have fewer micro-batches, so the recorded micro-batches are counted.
        self.about["steps_per_rollout"] = self.trainer.args.steps_per_generation / len(self.parts)
        if self.conversations:
            tensors |= conversation_tensors(self.conversations[begin:], self.trainer)
        return tensors | {name: x[begin:] for name, x in rollouts.items()}

    def micro_batch(self, inputs: dict) -> dict:
        """Return the masks of a micro-batch."""
        completion_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        prompt_mask = pad(inputs["prompt_mask"], (0, completion_mask.shape[1]))
        return {"completion_mask": completion_mask, "prompt_mask": prompt_mask}


def keep_outputs(part: dict, output, mask=1):
    """Record log-probabilities (n, T) and their gradients, which become 0 where `mask` is 0."""
    for output_name, (name, slope_name) in OUTPUTS.items():
        x = output.get(output_name)
        if x is not None:
            part[name] = x.detach().clone()
        if x is not None and x.requires_grad:
            part[slope_name] = torch.zeros_like(part[name])
            x.register_hook(lambda gradient, name=slope_name: part.update({name: gradient * mask}))


def noises(model):
    """Yield the settings that make a forward pass random, such as each dropout probability of a model."""
    for module in model.modules():
        for name, value in vars(module).items():
            # transformers' modules call a dropout probability p or dropout, and NEFTune's noise neftune_noise_alpha.
            if re.search("^p$|drop|noise", name) and type(value) in (int, float):
                yield value


class Conversation:
    """The token ids of one conversation with tool calls, as the sampler got and produced them."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self.tokens = []  # (id, flag) for each token after the prompt; flag is 1 if it was sampled
        self.forms = [prompt]  # all ids so far, and the ids from encoding their text again

    def num_known(self, given_ids: list[int]) -> int:
        """Count the tokens at the start of `given_ids` that equal the conversation so far."""
        return max(sum(takewhile(bool, map(eq, form, given_ids))) for form in self.forms)

    def add(self, given_ids: list[int], drawn_ids: list[int], tokenizer):
        new_ids = given_ids[self.num_known(given_ids) :]
        self.tokens += [(x, 0) for x in new_ids] + [(x, 1) for x in drawn_ids]
        later_ids = given_ids[len(self.prompt) :] + drawn_ids
        encoded_again = tokenizer.encode(tokenizer.decode(later_ids), add_special_tokens=False)
        self.forms = [self.prompt + later_ids, self.prompt + encoded_again]


def conversation_tensors(conversations: list[Conversation], trainer) -> dict:
    longest = trainer.max_completion_length  # longer completions are truncated
    rows = [torch.tensor(x.tokens[:longest]).view(-1, 2) for x in conversations]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)
    tensors = {"sampler_ids": tokens[..., 0], "sampler_mask": tokens[..., 1]}
    if trainer.tools:
        tensors |= given_pictures([x.pictures for x in conversations], trainer)
    return tensors


def given_pictures(pictures: list[list], trainer) -> dict:
    """Return the images that each row was given, as the trainer's processor makes tensors of them."""
    tensors = {"sampler_num_images": torch.tensor([len(images) for images in pictures])}
    flat = [image for images in pictures for image in images]
    if flat:
        fields = trainer.processing_class.image_processor(images=flat, return_tensors="pt")
        tensors |= {f"sampler_{name}": x for name, x in fields.items()}
    return tensors


def join(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate micro-batches along rows, and pad 2-D tensors on the left."""
    tensors = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if values[0].dim() == 2:
            tensors[name] = pad_sequence([row for x in values for row in x], batch_first=True, padding_side="left")
        else:
            tensors[name] = torch.cat(values)
    return tensors
