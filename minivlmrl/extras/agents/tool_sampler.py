"""Sample completions with tool calls.

Tool results are prefilled in one forward pass, then decoding continues. Training uses the sampled ids, never
re-tokenized text.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from PIL.Image import Image
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row, ToolUse
from minivlmrl.errors import UserError, error_context
from minivlmrl.extras.agents.environment import Environment, get_environment, settings_of, tools_of
from minivlmrl.extras.agents.tool_calls import (
    Call,
    Picture,
    answer_call,
    begin,
    find_calls,
    render_answers,
    turn_opening,
)
from minivlmrl.generation.generate import Decode, TokenSampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.generation.stop_strings import NO_TEXT, token_bytes
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import dense_attention
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.attention import DecodeAttention
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import pack
from minivlmrl.rewards.columns import box_scale


class ToolEpisode:
    """Sampling state for one completion and its environment."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.tool_use = ToolUse(environment)
        self.tools = tools_of(environment)
        self.settings = settings_of(environment)
        self.closing_tag = re.compile(f"</({'|'.join(self.tools)})>".encode())
        self.text = b""  # UTF-8 text generated since the last tool result
        self.ids: list[int] = []  # completion ids, including tool results
        self.policy_mask: list[bool] = []  # True for sampled tokens, False for tool results
        self.pictures: list[tuple] = []  # images returned by tools
        self.unread: list[Prompt] = []  # tool results to prefill, at most one
        self.ended = False

    def step(self, token: int, turn_ends: bool, text_ends: bool, sampler: Sampler) -> bool:
        """Append a sampled token, and run the tool calls it completes.

        Args:
            turn_ends: whether the token is a stop token.
            text_ends: whether the token completes a stop string.
        Returns:
            whether the completion ends for a reason other than max_new_tokens
        """
        if self.ended:  # finished completions stay in the batch until `generate` removes them
            return True
        self.policy_mask.append(True)
        self.ids.append(token)
        tokens_left = sampler.sampling.max_new_tokens - len(self.policy_mask)
        new_bytes = token_bytes(sampler.processor.tokenizer, token, NO_TEXT)
        calls = self.new_calls(new_bytes, turn_ends, text_ends)
        is_finished = turn_ends or text_ends
        if calls:
            is_finished = self.answer(calls, turn_ends, tokens_left, sampler.processor)
        self.ended = is_finished or tokens_left == 0
        return is_finished

    def new_calls(self, new_bytes: bytes, turn_ends: bool, text_ends: bool) -> list[Call]:
        """Append a token's bytes, and return the tool calls it completes."""
        # also search earlier bytes, because a closing tag may span several tokens
        searched_from = max(0, len(self.text) - len(self.closing_tag.pattern))
        self.text += new_bytes
        if text_ends or not (turn_ends or self.closes_a_call(searched_from)):
            return []
        calls = find_calls(self.text.decode(errors="replace"), self.tools, turn_ends)
        return calls[: self.settings.max_tool_calls - self.tool_use.num_calls]

    def closes_a_call(self, searched_from: int) -> bool:
        """Return whether a tag such as </zoom> closes a call after byte `searched_from`."""
        closing_tags = self.closing_tag.finditer(self.text, searched_from)
        return any(b"<%s>" % tag[1] in self.text for tag in closing_tags)

    def answer(self, calls: list[Call], turn_ended: bool, tokens_left: int, processor: Processor) -> bool:
        """Run tool calls, and append their results to the completion.

        Returns:
            whether the completion ends, because the environment is done or the results do not fit
        """
        answers, pictures = self.call_tools(calls, processor)
        if self.done:
            return True
        ids = encode_answers(answers, pictures, turn_ended, processor)
        # end the completion if the result is too long, because images cannot be truncated
        if len(ids) >= tokens_left:
            self.tool_use.cut = True
            return True
        answer, shown = as_prompt(ids, pictures, processor)
        self.unread.append(answer)
        self.policy_mask += [False] * len(ids)
        self.ids += ids
        self.pictures += shown
        self.text = b""
        return False

    def call_tools(self, calls: list[Call], processor: Processor) -> tuple[list[list[dict]], list[Picture]]:
        answers = []
        pictures = []
        for name, inside in calls:
            parts, shown, succeeded = answer_call(self.tools, name, inside, processor, self.settings)
            answers.append(parts)
            pictures += shown
            self.tool_use.num_failed += not succeeded
        self.tool_use.num_calls += len(calls)
        return answers, pictures

    @property
    def done(self) -> bool:
        return bool(getattr(self.environment, "done", False))

    def finish(self, completion: Completion):
        """Add tool results and tool-use counts to a sampled completion."""
        self.insert_answers(completion)
        completion.stopped &= not self.tool_use.cut
        completion.tool_use = self.tool_use

    def insert_answers(self, completion: Completion):
        """Insert tool-result tokens into a completion, with log-probability 0."""
        policy_mask = torch.tensor(self.policy_mask)
        completion.ids = torch.tensor(self.ids)
        completion.policy_mask = policy_mask
        completion.pictures = self.pictures
        sampled_logps = completion.sampled_logps
        completion.logps = torch.zeros(len(policy_mask)).masked_scatter(policy_mask, sampled_logps)
        if completion.sampling_mask:
            counts, allowed_ids = completion.sampling_mask
            counts = policy_mask.long().masked_scatter(policy_mask, counts)
            completion.sampling_mask = counts, allowed_ids


def encode_answers(
    answers: list[list[dict]], pictures: list[Picture], turn_ended: bool, processor: Processor
) -> list[int]:
    """Tokenize tool results as a user turn if the turn has ended, else as text in the assistant turn."""
    grids = [grid for _, grid in pictures]
    opening = turn_opening(processor) if turn_ended else ()
    return list(chain(*processor.encode(render_answers(answers, opening), grids)))


def as_prompt(ids: list[int], pictures: list[Picture], processor: Processor) -> tuple[Prompt, list[tuple]]:
    """Convert tokenized tool results to a Prompt, and their images to (image, patches, grid) tuples."""
    images = processor.image_processor
    shown = [(image, *images(image)) for image, _ in pictures]
    no_patches = torch.zeros(0, images.patch_dim, dtype=images.dtype)
    patches = torch.cat([no_patches, *(patches for _, patches, _ in shown)])
    grids = torch.tensor([grid for *_, grid in shown], dtype=torch.long).view(-1, 3)
    return Prompt(torch.tensor(ids), patches, grids, torch.zeros(len(grids))), shown


def copy_on_write(image: Image) -> Image:
    """Copy an image lazily: PIL copies the pixels only if the copy is modified."""
    image.load()
    image = image._new(image.im)
    image.readonly = 1
    return image


@dataclass
class AnswerSpan:
    """Location of a tool result in the packed forward pass and in the KV cache."""

    row: int
    tokens: slice  # slice of the packed tool-result tokens
    prompt: int  # prompt index in the decoding batch
    prompt_length: int
    begin: int  # cache positions, counted after the prompt
    end: int


class AnswerAttention(DecodeAttention):
    """Attention for a forward pass over packed tool results.

    Tokens attend to their prompt and to all earlier tokens in their completion.

    Args:
        rows: decoding-batch row for each result.
        lengths: number of tokens in each result.
    """

    def __init__(self, decoding: DecodeAttention, rows: list[int], lengths: list[int]):
        self.decoding = decoding
        self.layer_states = decoding.layer_states
        self.answer_spans = []
        prompt_lengths = (decoding.prompt_bias == 0).sum(1).tolist()
        newest = decoding.newest.tolist()  # newest cache position per row
        # (batch row, packed-token slice) of every tool result
        self.spans = []
        tokens_of_rows = [0] * len(newest)
        tokens_before = 0
        for row, length in zip(rows, lengths, strict=True):
            prompt = int(decoding.prompt_index[row])
            begin = newest[row] + 1
            span = AnswerSpan(
                row=row,
                tokens=slice(tokens_before, tokens_before + length),
                prompt=prompt,
                prompt_length=prompt_lengths[prompt],
                begin=begin,
                end=begin + length,
            )
            self.answer_spans.append(span)
            self.spans.append((slice(row, row + 1), span.tokens))
            tokens_of_rows[row] = length
            tokens_before += length
        longest = max(span.end - 1 for span in self.answer_spans)
        new_tokens = to_device(torch.tensor(tokens_of_rows), decoding.device)
        decoding.advance(new_tokens, max(longest - max(newest), 0))

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # cached keys and values: (R, K, C, D), R completions, K heads, C tokens, D features
        row_k, row_v = self.decoding.row_kv[layer_index]
        # prompt keys and values: (B, K, P, D), B prompts, P tokens
        prompt_k, prompt_v = self.decoding.prompt_kv[layer_index]
        out = []
        for span in self.answer_spans:
            # queries: (1, heads, tokens, D)
            queries = q[span.tokens].transpose(0, 1)[None]
            keys = extend(row_k, prompt_k, k, span)
            values = extend(row_v, prompt_v, v, span)
            attended = dense_attention(queries, keys, values, is_causal=True)
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


def extend(row_cache: Tensor, prompts: Tensor, new: Tensor, span: AnswerSpan) -> Tensor:
    """Append a result's keys (or values) to its row in the KV cache, and return that row.

    Args:
        row_cache: (R, K, C, D), completion cache, modified in place.
        prompts: (B, K, P, D), prompt cache.
        new: (tokens, K, D), for all packed results.

    Returns:
        (1, K, prompt_length + end, D), the row up to the end of the result
    """
    row_cache[span.row, :, span.begin : span.end] = new[span.tokens].transpose(0, 1)
    # prompt without padding: (K, prompt_length, D)
    seen_prompt = prompts[span.prompt, :, : span.prompt_length]
    return torch.cat([seen_prompt, row_cache[span.row, :, : span.end]], dim=1)[None]


class ReadingDecode(Decode):
    """Decode step that also prefills new tool results."""

    def __init__(self, decode: Decode, sampler: "ToolSampler"):
        self.decode = decode
        self.sampler = sampler
        self.attention_type = decode.attention_type

    def __call__(self, model: VisionLanguageModel, ids: Tensor, attention: DecodeAttention) -> Tensor:
        logits = self.decode(model, ids, attention)
        episodes = [self.sampler.episodes[row] for row in attention.rows.tolist()]
        rows = [i for i, episode in enumerate(episodes) if episode.unread]
        if rows:
            answers = [episodes[i].unread.pop() for i in rows]
            index = to_device(torch.tensor(rows), attention.device)
            logits[index] = self.read(model, attention, rows, index, answers)
        return logits

    def read(
        self,
        model: VisionLanguageModel,
        attention: DecodeAttention,
        rows: list[int],
        index: Tensor,
        answers: list[Prompt],
    ) -> Tensor:
        """Prefill tool results; return the logits after each one, (results, vocabulary size).

        Args:
            rows: decoding-batch row for each result.
            index: tensor of the rows.
        """
        batch = pack(answers, [[] for _ in answers], model.config, attention.device)
        lengths = batch.layout.prompt_lengths
        repeats = to_device(torch.tensor(lengths), attention.device)
        start = attention.start[index] + attention.newest[index] + 1
        batch.position_ids += start.repeat_interleave(repeats)
        answer_attention = AnswerAttention(attention, rows, lengths)
        hidden = model(batch, answer_attention, batch.layout.last_index)
        # 10 x 10 image tokens take 100 cache positions, but only 10 position ids (M-RoPE)
        last_positions = [x.max() for x in batch.position_ids.split(lengths, dim=1)]
        attention.start[index] = torch.stack(last_positions) - attention.newest[index]
        row_of_token = attention.rows[index].repeat_interleave(repeats)
        self.sampler.record_tokens(row_of_token, batch.input_ids)
        return float32_matmul(hidden, model.lm_head.weight.T)


class ToolSampler(Sampler):
    """Sampler for completions with tool calls, using sampling.environment."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make_environment = find_environment(self)
        self.episodes: list[ToolEpisode] = []  # one episode per row in the batch

    def token_sampler(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> TokenSampler:
        self.episodes = begin_episodes(
            lambda environment, *_: ToolEpisode(environment), self.make_environment, self, prompts, num_generations
        )
        return super().token_sampler(prompts, num_generations, keys)

    def generate(
        self, model: VisionLanguageModel, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        groups = super().generate(model, prompts, num_generations, sample_token)
        for episode, completion in zip(self.episodes, chain(*groups), strict=True):
            episode.finish(completion)
        return groups

    def decode(self) -> Decode:
        return ReadingDecode(super().decode(), self)

    def accept_tokens(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        text_ends = self.record_tokens(rows, ids)
        return step_episodes(self.episodes, self, rows, ids, turn_ends, text_ends)


AnyEpisode = TypeVar("AnyEpisode", bound=ToolEpisode)


def find_environment(sampler: Sampler) -> Callable[[], Environment]:
    """Resolve sampling.environment to an environment constructor."""
    name = sampler.sampling.environment
    if name is None:
        raise UserError("sampling.environment is not set, but a sampler with tools needs an environment")
    make = get_environment(name)
    # ranks prefill tool results independently, so each rank needs all weights
    if not sampler.gather_weights:
        raise UserError(
            "rollout.gather_weights is false, which is not supported with sampling.environment; "
            "set it to true or remove it"
        )
    return make


def begin_episodes(
    make_episode: Callable[[Environment, Prompt, Row], AnyEpisode],
    make_environment: Callable[[], Environment],
    sampler: Sampler,
    prompts: Iterable[Prompt],
    num_generations: int,
) -> list[AnyEpisode]:
    """Create one episode per completion, each with its own environment."""
    episodes = []
    for prompt in prompts:
        row = prompt.row
        if row is None:
            raise UserError(
                "the prompt does not have a row, which the environment's reset needs; create the prompt with Row.prompt"
            )
        columns = reset_columns(prompt, row, sampler.processor)
        name = f"{row.where or f'row {row.index}'}: sampling.environment"
        with error_context(f"{name} {sampler.sampling.environment}"):
            for _ in range(num_generations):
                copies = {id(image): copy_on_write(image) for image in columns["images"]}
                environment = begin(make_environment, deepcopy(columns, copies))
                episodes.append(make_episode(environment, prompt, row))
    return episodes


def reset_columns(prompt: Prompt, row: Row, processor: Processor) -> dict:
    """Return the keyword arguments for an environment's `reset`.

    `extents` lists the (width, height) of the box coordinate system for each image.
    """
    images = list(row.images)  # list() loads lazy images
    space = row.columns.get("box_space") or processor.box_space
    patch_size = processor.image_processor.patch_size
    # leave out video grids, which have second_per_grid_ts > 0
    grids = prompt.image_grid_thw[prompt.second_per_grid_ts == 0].tolist()
    extents = []
    for image, (_, rows, columns) in zip(images, grids, strict=True):
        resized = (patch_size * columns, patch_size * rows)
        extents.append(box_scale(space, image.size, resized))
    return row.columns | {"images": images, "extents": extents, "prompt": row.messages}


def step_episodes(
    episodes: Sequence[ToolEpisode], sampler: Sampler, rows: Tensor, ids: Tensor, turn_ends: Tensor, text_ends: Tensor
) -> Tensor:
    """Append sampled tokens to the episodes at `rows` (r,); return which episodes end, (r,)."""
    sampled = (x.tolist() for x in (rows, ids, turn_ends, text_ends))
    ends = []
    for row, token, turn_end, text_end in zip(*sampled, strict=True):
        ends.append(episodes[row].step(token, turn_end, text_end, sampler))
    return to_device(torch.tensor(ends), rows.device)
