"""Sample completions in which the model calls tools.

A forward pass appends tool results to the completion and its KV cache, then decoding continues. Training uses the
sampled token ids, never re-tokenized text.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, chain
from typing import Any

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
    """A completion while it is sampled: its token ids so far, and its tool environment."""

    def __init__(self, environment: Environment, prompt: Prompt, key: str, processor: Processor):
        self.environment = environment
        self.prompt = prompt
        self.row: Any = prompt.row
        self.key = key  # seed for sampling this completion
        self.processor = processor
        self.tool_use = ToolUse(environment)
        self.tools = tools_of(environment)
        self.settings = settings_of(environment)
        self.closing_tag = re.compile(f"</({'|'.join(self.tools)})>".encode())
        self.text = b""  # UTF-8 text generated since the last tool result
        self.ids: list[int] = []  # completion ids, including tool results
        self.policy_mask: list[bool] = []  # True for sampled tokens, False for tool results
        self.pictures: list[tuple] = []  # images returned by tools
        self.unread: list[Prompt] = []  # tool results not yet in the KV cache (at most one)
        self.ended = False

    def step(self, token: int, turn_ends: bool, text_ends: bool, max_new_tokens: int) -> bool:
        """Append a sampled token, and run the tool calls that it completes.

        Args:
            turn_ends: whether the token is a stop token, such as <|im_end|>.
            text_ends: whether the token completes a stop string.
        Returns:
            whether the completion ends for a reason other than max_new_tokens
        """
        if self.ended:  # `generate` later removes finished completions from the batch
            return True
        self.policy_mask.append(True)
        self.ids.append(token)
        tokens_left = max_new_tokens - len(self.policy_mask)
        # a closing tag may span several tokens, so also search where the earlier text ends
        searched_from = max(0, len(self.text) - len(self.closing_tag.pattern))
        self.text += token_bytes(self.processor.tokenizer, token, NO_TEXT)
        is_finished = turn_ends or text_ends
        if not text_ends and (turn_ends or self.closes_a_call(searched_from)):
            calls = find_calls(self.text.decode(errors="replace"), self.tools, turn_ends)
            calls = calls[: self.settings.max_tool_calls - self.tool_use.num_calls]
            if calls:
                is_finished = self.answer(calls, turn_ends, tokens_left)
        self.ended = is_finished or tokens_left == 0
        return is_finished

    def closes_a_call(self, searched_from: int) -> bool:
        """Return whether the text has a closing tag such as </zoom> from byte `searched_from` on."""
        return self.closing_tag.search(self.text, searched_from) is not None

    def answer(self, calls: list[Call], turn_ended: bool, tokens_left: int) -> bool:
        """Run tool calls, and append their results to the completion.

        Returns:
            whether the completion ends, because the environment is done or the results do not fit
        """
        _, answer, pictures = self.call_tools(calls, turn_ended)
        ids = answer.input_ids.tolist()
        # oversized tool results end the completion, because images cannot be truncated
        self.tool_use.cut = not self.done and len(ids) >= tokens_left
        if self.done or self.tool_use.cut:
            return True
        self.unread.append(answer)
        self.policy_mask += [False] * len(ids)
        self.ids += ids
        self.pictures += pictures
        self.text = b""
        return False

    def call_tools(self, calls: list[Call], turn_ended: bool) -> tuple[list[list[dict]], Prompt, list[Picture]]:
        """Run tool calls, and return the results in three forms: message parts, a Prompt to prefill, and images.

        Tool results become a user turn if the assistant turn has ended, else a part of the assistant turn.
        """
        answers = []
        pictures = []
        for name, inside in calls:
            parts, shown, succeeded = answer_call(self.tools, name, inside, self.processor, self.settings)
            answers.append(parts)
            pictures += shown
            self.tool_use.num_failed += not succeeded
        self.tool_use.num_calls += len(calls)
        grids = [grid for *_, grid in pictures]
        opening = turn_opening(self.processor) if turn_ended else ()
        pieces = render_answers(answers, opening)
        ids = chain(*self.processor.encode(pieces, grids))
        images = self.processor.image_processor
        no_patches = torch.zeros(0, images.patch_dim, dtype=images.dtype)
        patches = torch.cat([no_patches, *(patches for _, patches, _ in pictures)])
        grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
        prompt = Prompt(torch.tensor([*ids]), patches, grid, torch.zeros(len(grids)))
        return answers, prompt, pictures

    @property
    def done(self) -> bool:
        """Whether the environment has ended the completion."""
        return bool(getattr(self.environment, "done", False))

    def finish(self, completion: Completion):
        """Insert the tool results into the sampled completion, with log-probability 0, and add tool-use counts."""
        completion.stopped &= not self.tool_use.cut
        completion.tool_use = self.tool_use
        policy_mask = torch.tensor(self.policy_mask)
        completion.ids = torch.tensor(self.ids)
        completion.policy_mask = policy_mask
        completion.pictures = self.pictures
        completion.logps = torch.zeros(len(policy_mask)).masked_scatter(policy_mask, completion.sampled_logps)
        if completion.sampling_mask:
            counts, allowed_ids = completion.sampling_mask
            counts = policy_mask.long().masked_scatter(policy_mask, counts)
            completion.sampling_mask = counts, allowed_ids


def copy_on_write(image: Image) -> Image:
    """Copy a PIL image lazily: the pixels are copied only when the copy is changed."""
    image.load()
    image = image._new(image.im)
    image.readonly = 1
    return image


class AnswerAttention(DecodeAttention):
    """Attention to prefill new tool results for several completions in one forward pass.

    Tokens attend to their prompt and to all earlier tokens in their completion.

    Args:
        rows: decoding batch row per tool result.
        lengths: tokens per tool result.
    """

    def __init__(self, decoding: DecodeAttention, rows: list[int], lengths: list[int]):
        self.decoding = decoding
        self.layer_states = decoding.layer_states
        self.spans = []  # per tool result: (batch row, packed token slice)
        self.places = []  # per tool result: (prompt index, prompt length, KV cache slice)
        prompt_lengths = (decoding.prompt_bias == 0).sum(1).tolist()
        newest = decoding.newest.cpu()  # last used KV cache position per row
        for row, length, end in zip(rows, lengths, accumulate(lengths), strict=True):
            prompt = int(decoding.prompt_index[row])
            begin = int(newest[row]) + 1
            packed = slice(end - length, end)
            cached = slice(begin, begin + length)
            self.spans.append((slice(row, row + 1), packed))
            self.places.append((prompt, prompt_lengths[prompt], cached))
        new_tokens = torch.zeros_like(newest)
        new_tokens[rows] = torch.tensor(lengths)
        growth = int((newest + new_tokens).max() - newest.max())
        decoding.advance(to_device(new_tokens, decoding.device), growth)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # cached keys and values: (R, K, C, D), R completions, K heads, C tokens, D features
        row_kv = self.decoding.row_kv[layer_index]
        # prompt keys and values: (B, K, P, D), B prompts, P tokens
        prompt_kv = self.decoding.prompt_kv[layer_index]
        out = []
        for (row, tokens), (prompt, prompt_length, cached) in zip(self.spans, self.places, strict=True):
            keys_and_values = []
            for row_cache, prompts, new in zip(row_kv, prompt_kv, (k, v), strict=True):
                row_cache[row, :, cached] = new[tokens].transpose(0, 1)
                # keys (or values): the prompt without padding, then the completion up to this tool result
                of_prompt = prompts[prompt, None, :, :prompt_length]
                of_completion = row_cache[row, :, : cached.stop]
                keys_and_values.append(torch.cat([of_prompt, of_completion], dim=2))
            # queries: (1, heads, tokens, D)
            queries = q[tokens].transpose(0, 1)[None]
            attended = dense_attention(queries, *keys_and_values, is_causal=True)
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


class ReadingDecode(Decode):
    """Decode one token per completion, and prefill new tool results."""

    def __init__(self, decode: Decode, sampler: "ToolSampler"):
        self.decode = decode
        self.sampler = sampler
        self.attention_type = decode.attention_type

    def __call__(self, model: VisionLanguageModel, ids: Tensor, attention: DecodeAttention) -> Tensor:
        logits = self.decode(model, ids, attention)
        episodes = [self.sampler.episodes[row] for row in attention.rows.tolist()]
        rows = [i for i, episode in enumerate(episodes) if episode.unread]
        if not rows:
            return logits
        answers = [episodes[i].unread.pop() for i in rows]
        index = to_device(torch.tensor(rows), attention.device)
        batch = pack(answers, [[] for _ in answers], model.config, attention.device)
        lengths = batch.layout.prompt_lengths
        repeats = to_device(torch.tensor(lengths), attention.device)
        start = attention.start[index] + attention.newest[index] + 1
        batch.position_ids += start.repeat_interleave(repeats)
        hidden = model(batch, AnswerAttention(attention, rows, lengths), batch.layout.last_index)
        # M-RoPE: an image of 10 x 10 tokens takes 100 KV cache positions, but advances position ids by only 10
        last_positions = [x.max() for x in batch.position_ids.split(lengths, dim=1)]
        attention.start[index] = torch.stack(last_positions) - attention.newest[index]
        self.sampler.record_tokens(attention.rows[index].repeat_interleave(repeats), batch.input_ids)
        logits[index] = float32_matmul(hidden, model.lm_head.weight.T)
        return logits


class ToolSampler(Sampler):
    episode_type: type[ToolEpisode] = ToolEpisode

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make_environment = get_environment(str(self.sampling.environment))
        # ranks process tool results at different times, so each rank needs all weights
        if not self.gather_weights:
            raise UserError("rollout.gather_weights is false, which is not supported with sampling.environment")
        self.episodes: list[Any] = []  # one episode per row in the batch

    def token_sampler(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> TokenSampler:
        """Create and reset one environment per completion."""
        self.episodes = []
        for prompt, key in zip(prompts, keys, strict=True):
            row = prompt.row
            if row is None:
                raise UserError("the prompt has no row, which an environment needs; create the prompt with Row.prompt")
            columns = reset_columns(prompt, row, self.processor)
            with error_context(f"{row.name}: sampling.environment {self.sampling.environment}"):
                for number in range(num_generations):
                    copies = {id(image): copy_on_write(image) for image in columns["images"]}
                    environment = begin(self.make_environment, deepcopy(columns, copies))
                    episode = self.episode_type(environment, prompt, f"{key}/{number}", self.processor)
                    self.episodes.append(episode)
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
        """Append sampled tokens to their completions; return which completions end, bool (r,)."""
        limit = self.sampling.max_new_tokens
        text_ends = self.record_tokens(rows, ids)
        sampled = (x.tolist() for x in (rows, ids, turn_ends, text_ends))
        ends = []
        for row, *token in zip(*sampled, strict=True):
            ends.append(self.episodes[row].step(*token, limit))
        return to_device(torch.tensor(ends), rows.device)


def reset_columns(prompt: Prompt, row: Row, processor: Processor) -> dict:
    """Return the keyword arguments for an environment's `reset`: dataset row, prompt and images.

    The argument `extents` lists image sizes (width, height) in the units of box coordinates.
    """
    images = list(row.images)  # decode image files once, not on every access
    space = row.columns.get("box_space") or processor.box_space
    patch_size = processor.image_processor.patch_size
    # exclude videos, which have second_per_grid_ts > 0
    grids = prompt.image_grid_thw[prompt.second_per_grid_ts == 0].tolist()
    extents = []
    for image, (_, rows, columns) in zip(images, grids, strict=True):
        resized = (patch_size * columns, patch_size * rows)
        extents.append(box_scale(space, image.size, resized))
    return row.columns | {"images": images, "extents": extents, "prompt": row.messages}
