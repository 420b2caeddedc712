TASK = """
Prompts and completions lie end to end in one sequence. Each token has a group and a row; the row is 0 in a prompt,
and otherwise the number of the completion. Return the (N, N) mask that is True where token i (row of the mask)
attends to token j (column). A prompt token attends to its prompt up to itself. A completion token attends to its
whole prompt, and to its own completion up to itself.
"""

HINT = """
Three conditions must hold together: i and j are in the same group; j is in the prompt or in the same completion as i;
j is not later than i. `x == x[:, None]` compares all pairs, with i along the rows and j along the columns.
"""

WRONG = {
    "your completions attend to earlier completions of the group; compare the rows, too": (
        "(row == 0) | (row == row[:, None])",
        "torch.ones_like(index, dtype=torch.bool)[None]",
    ),
    "your mask is only causal, so a token attends to all earlier groups and completions": (
        "(group == group[:, None]) & prompt_or_row & (index",
        "(index",
    ),
    "your completions do not attend to their prompt": ("(row == 0) | (row == row[:, None])", "row == row[:, None]"),
    'a token must attend to itself, too; use "not later" instead of "earlier"': ("index <= index", "index < index"),
    "your mask is transposed, so tokens attend to later tokens": ("index <= index", "index >= index"),
    "tokens attend to other groups; compare the groups, too": (
        "(group == group[:, None]) & prompt_or_row",
        "prompt_or_row",
    ),
    "your prompt tokens attend to later prompt tokens; the prompt is causal, too": (
        "(index <= index[:, None])",
        "((index <= index[:, None]) | (row == 0) & (row[:, None] == 0))",
    ),
    "your completions attend only to the prompt; they must also attend to their own tokens": (
        "(row == 0) | (row == row[:, None])",
        "row == 0",
    ),
}


def tries(visible):
    from minivlmrl.model.attention import GroupLayout

    for prompts, completions in (([2], [[3, 2]]), ([2, 3], [[3, 2], [2, 2]]), ([3], [[]])):
        asked = f"prompts of {prompts} tokens with completions of {completions}"
        yield asked, visible(GroupLayout(prompts, completions)).long()
