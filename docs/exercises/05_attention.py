TASK = """
Prompts and completions lie end to end in one run. For each token you have its group and its row: 0 in a prompt, else
the number of its completion. Return the (N, N) mask: which token j (column) does token i (row) see? A prompt token sees
its prompt up to itself; a completion token its whole prompt and its own completion up to itself.
"""

HINT = """
Three conditions hold together: the same group; j is in the prompt or in the same completion; j is not later than i.
`x == x[:, None]` compares each with each: rows are i, columns are j.
"""

WRONG = {
    "completions see the completions before them: the mask is only causal and by group": (
        "(row == 0) | (row == row[:, None])",
        "torch.ones_like(index, dtype=torch.bool)[None]",
    ),
    "the mask is only causal: groups and completions see all that comes before them": (
        "(group == group[:, None]) & prompt_or_row & (index",
        "(index",
    ),
    "a completion does not see its prompt": ("(row == 0) | (row == row[:, None])", "row == row[:, None]"),
    "a token sees itself too: not later, instead of earlier": ("index <= index", "index < index"),
    "it is turned around: tokens see what comes later": ("index <= index", "index >= index"),
    "groups see one another: compare groups too": ("(group == group[:, None]) & prompt_or_row", "prompt_or_row"),
    "a prompt is causal too: its tokens do not see later ones": (
        "(index <= index[:, None])",
        "((index <= index[:, None]) | (row == 0) & (row[:, None] == 0))",
    ),
    "a completion sees only the prompt, and not itself": ("(row == 0) | (row == row[:, None])", "row == 0"),
}


def tries(visible):
    from minivlmrl.model.attention import GroupLayout

    for prompts, completions in (([2], [[3, 2]]), ([2, 3], [[3, 2], [2, 2]]), ([3], [[]])):
        asked = f"prompts of {prompts} tokens with completions of {completions}"
        yield asked, visible(GroupLayout(prompts, completions)).long()
