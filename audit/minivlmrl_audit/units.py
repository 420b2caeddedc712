"""Parts of a step to which a mistake may be limited, and wrong orders in which rows or tokens may be used.

Each table maps a description to a function that perturbations.py calls with values by the names of its parameters.
"""

import torch
from torch.nn.functional import pad

from minivlmrl_audit.formulas import first, last

# Sets of tokens of a completion with tool calls. drawn marks sampled tokens, and forced the tokens of tool responses;
# turn and answer number the turns and the tool responses.
REGIONS = {
    "the prompt": lambda prompt: prompt,
    "the text of the prompt": lambda prompt, image: prompt & ~image,
    "the image tokens": lambda image: image,
    "the sampled tokens": lambda drawn: drawn,
    "tool responses": lambda forced: forced,
    "everything after the prompt": lambda drawn, forced: drawn | forced,
    "the first turn": lambda drawn, turn: drawn & (turn == 1),
    "the last turn": lambda drawn, turn: drawn & (turn == turn.amax(1, keepdim=True)),
    "the last turn of truncated completions": lambda drawn, turn, stop: (
        (last_turn := drawn & (turn == turn.amax(1, keepdim=True)))
        & ~(last_turn & stop).any(1, keepdim=True)
    ),
    "the second turn": lambda drawn, turn: drawn & (turn == 2),
    "all turns except the first": lambda drawn, turn: drawn & (turn > 1),
    "all turns except the last": lambda drawn, turn: drawn & (turn < turn.amax(1, keepdim=True)),
    "the first tool response": lambda forced, answer: forced & (answer == 1),
    "the last tool response": lambda forced, answer: (
        forced & (answer == answer.amax(1, keepdim=True))
    ),
    "the second tool response": lambda forced, answer: forced & (answer == 2),
    "all tool responses except the first": lambda forced, answer: forced & (answer > 1),
    "all tool responses except the last": lambda forced, answer: (
        forced & (answer < answer.amax(1, keepdim=True))
    ),
    "everything after the first tool response": lambda drawn, forced, turn, answer: (
        (drawn | forced) & (turn + answer > 2)
    ),
    "the end tokens of turns": lambda drawn, stop: drawn & stop,
    "all stop tokens": lambda stop, drawn, forced: (drawn | forced) & stop,
    "the end tokens before tool responses": lambda stop, turn, drawn: (
        last(drawn) & stop & (turn < turn.amax(1, keepdim=True))
    ),
    "the first tokens of turns": lambda drawn: first(drawn),
    "the last tokens of turns": lambda drawn: last(drawn),
    "the first tokens of tool responses": lambda forced: first(forced),
    "the last tokens of tool responses": lambda forced: last(forced),
    "the first 2 tokens of turns": lambda drawn: first(drawn, 2),
    "the last 2 tokens of turns": lambda drawn: last(drawn, 2),
    "the first 2 tokens of tool responses": lambda forced: first(forced, 2),
    "the last 2 tokens of tool responses": lambda forced: last(forced, 2),
    "the tokens that open a turn": lambda forced, stop: (
        forced
        & (
            (stops := (forced & stop).flip(1).cumsum(1))
            == (stops * last(forced).flip(1)).cummax(1).values
        ).flip(1)
    ),
    "the image tokens of tool responses": lambda forced, image: forced & image,
    "the text of tool responses": lambda forced, image: forced & ~image,
    "everything after the first image of a tool response": lambda drawn, forced, image: (
        (drawn | forced)
        & ((answered := forced & image).cumsum(1) > 0)
        & ~(answered & (first(answered).cumsum(1) == 1))
    ),
}

# sets of tokens of a completion without tool calls
ENDS = {
    "the prompt": lambda prompt: prompt,
    "the text of the prompt": lambda prompt, image: prompt & ~image,
    "the image tokens": lambda image: image,
    "the first tokens": lambda drawn: first(drawn),
    "the last counted tokens": lambda drawn, counted: last(drawn & counted),
    "the first 2 tokens": lambda drawn: first(drawn, 2),
    "the last 2 counted tokens": lambda drawn, counted: last(drawn & counted, 2),
    "the first 3 tokens": lambda drawn: first(drawn, 3),
    "the last 3 counted tokens": lambda drawn, counted: last(drawn & counted, 3),
}

# sets of rows: (tensor (n,) that the function needs, function)
ROW_SETS = {
    "truncated completions": ("ended", lambda ended: ~ended),
    "completions that were not truncated": ("ended", lambda ended: ended),
    "groups with equal rewards": ("others", lambda others: others == 0),
    "chosen answers": ("chosen", lambda chosen: chosen == 1),
    "rejected answers": ("chosen", lambda chosen: chosen == 0),
    "rows with positive advantages": ("advantages", lambda advantages: advantages > 0),
    "rows with negative advantages": ("advantages", lambda advantages: advantages < 0),
    "the first micro-batch": ("micro_batch", lambda micro_batch: micro_batch == micro_batch.min()),
    "the last micro-batch": ("micro_batch", lambda micro_batch: micro_batch == micro_batch.max()),
    "rows that are padded": ("row_lengths", lambda row_lengths: row_lengths < row_lengths.max()),
    "rows that are not padded": (
        "row_lengths",
        lambda row_lengths: row_lengths == row_lengths.max(),
    ),
    "first completions of groups": ("place", lambda place: place == 0),
    "last completions of groups": ("place", lambda place: place == place.max()),
    "all completions of groups except the first": ("place", lambda place: place > 0),
    "the second half of each group": ("place", lambda place: 2 * place > place.max()),
    "the first half of each group": ("place", lambda place: 2 * place < place.max()),
    "all micro-batches except the first": (
        "micro_batch",
        lambda micro_batch: micro_batch > micro_batch.min(),
    ),
    "all micro-batches except the last": (
        "micro_batch",
        lambda micro_batch: micro_batch < micro_batch.max(),
    ),
    "the last row of each micro-batch": (
        "micro_batch",
        lambda micro_batch: torch.cat([micro_batch[1:] != micro_batch[:-1], torch.tensor([True])]),
    ),
    "the first row of each micro-batch": (
        "micro_batch",
        lambda micro_batch: torch.cat([torch.tensor([True]), micro_batch[1:] != micro_batch[:-1]]),
    ),
    "the longest completions": ("lengths", lambda lengths: lengths == lengths.max()),
    "all completions except the longest": ("lengths", lambda lengths: lengths < lengths.max()),
    "rows with an advantage of 0": ("advantages", lambda advantages: advantages == 0),
}

# parts of a model: regular expressions for the names of their parameters
PARTS = {
    "the vision tower": r"(^|\.)visual\.",
    "the vision tower without its merger": r"(^|\.)visual\.(?!merger)",
    "the merger": r"merger",
    "the decoder": r"(^|\.)model\.(?!visual)",
    "the layers of the decoder": r"(^|\.)layers\.",
    "the embeddings": r"embed_tokens",
    "the head": r"lm_head",
    "the norms": r"norm.*weight|ln_q",
    "the biases": r"bias$",
    "the parameters without weight decay": r"bias|layernorm|rmsnorm|\.norm\.|_norm",
    "the parameters with weight decay": r"^(?!.*(bias|layernorm|rmsnorm|\.norm\.|_norm))",
}

# sets of images of a row: number is 0, 1, ... up to num_pictures - 1; the first num_given images are in the prompt
PICTURES = {
    "all images": lambda number: number >= 0,
    "the images of tool responses": lambda number, num_given: number >= num_given,
    "the images of the prompt": lambda number, num_given: number < num_given,
    "the first image": lambda number: number == 0,
    "the last image": lambda number, num_pictures: number == num_pictures - 1,
    "all images except the first": lambda number: number > 0,
    "all images except the last": lambda number, num_pictures: number < num_pictures - 1,
}

# wrong orders of the indices x of a block of rows {}, such as a group: the index that each row uses instead
ROWS = {
    "the next row in {}": lambda x: x.roll(-1),
    "the previous row in {}": lambda x: x.roll(1),
    "the first row in {}": lambda x: x[:1].expand_as(x),
    "the row at the mirrored position in {}": lambda x: x.flip(0),
    "the other row of each pair in {}": lambda x: x[
        (torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)
    ],
    "the row half of the rows later in {}": lambda x: x.roll(-(len(x) // 2)),
}

# wrong orders of a shuffled rollout: order is the position of each completion, row the completion of each row
SHUFFLES = {
    "the completion that had its place before the shuffle": lambda order: order,
    "the completion that a second shuffle puts in its place": lambda row: row,
    "the completion that the inverse shuffle puts in its place": lambda order: order[order],
}

# wrong orders of blocks of equal size: x (blocks, rows) holds the indices
BLOCKS = {
    "the next {}": lambda x: x.roll(-1, 0),
    "the previous {}": lambda x: x.roll(1, 0),
    "the first {}": lambda x: x[:1].expand_as(x),
    "the row that repeat gives instead of repeat_interleave, by {}": lambda x: x.T,
    "the row that repeat_interleave gives instead of repeat, by {}": lambda x: (
        x.flatten().view(x.T.shape).T
    ),
}

# wrong orders of the flat indices x of a row's tokens; -1 stands for the value 0; attended is False for padding
TOKENS = {
    "the next token in {}": lambda x: x.roll(-1),
    "the previous token in {}": lambda x: x.roll(1),
    "the next token in {} and 0 for the last": lambda x: pad(x[1:], (0, 1), value=-1)[: len(x)],
    "the previous token in {} and 0 for the first": lambda x: pad(x, (1, 0), value=-1)[: len(x)],
    "the first token in {}": lambda x: x[:1].expand_as(x),
    "the token at the mirrored position in {}": lambda x: x.flip(0),
    "the token as many places earlier as there is padding in {}": lambda x, attended: x.roll(
        (~attended[x]).sum()
    ),
    "the token as many places later as there is padding in {}": lambda x, attended: x.roll(
        -(~attended[x]).sum()
    ),
    "the other token of each pair in {}": lambda x: x[
        (torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)
    ],
}
