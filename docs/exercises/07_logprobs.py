TASK = """
Score completions: return `logps` (M,), the log-probability in nats of each token of batch.completion_ids, and
`entropies` (M,), the entropies of the distributions that predicted these tokens. completion_states returns the hidden
state that predicted each token, and model.lm_head turns the states into logits (M, vocab_size). The policy is
softmax(logits / temperature).
"""

HINT = """
Apply log_softmax over the vocabulary; gather then takes one column of each row. The entropy is minus the sum of p log
p over all tokens of the vocabulary, and it needs the same log-probabilities.
"""

WRONG = {
    "the temperature is missing; tokens were sampled from softmax(logits / temperature)": (" / temperature", ""),
    "you multiply by the temperature; it divides the logits": (" / temperature", " * temperature"),
    "you divide the log-probabilities by the temperature; divide the logits, before the softmax": (
        "/ temperature  # (M, vocab_size)\nlog_probs = logits.log_softmax(-1)",
        "\nlog_probs = logits.log_softmax(-1) / temperature",
    ),
    "you shift the tokens, but each state already predicts its own token": [
        (", batch.completion_ids[:, None])", ", batch.completion_ids[1:, None])"),
        ("/ temperature", "/ temperature\nlogits, batch.completion_ids = logits[:-1], batch.completion_ids[1:]"),
    ],
    "your values are probabilities; the logarithm is missing": ("logits.log_softmax(-1)", "logits.softmax(-1)"),
    "the softmax runs over the tokens of the batch; use the last axis, the vocabulary": (
        "log_softmax(-1)",
        "log_softmax(0)",
    ),
    "the entropy ignores the temperature; compute it from logits / temperature, too": (
        "-(log_probs.exp() * log_probs).sum(-1)",
        "-((logits * temperature).softmax(-1) * (logits * temperature).log_softmax(-1)).sum(-1)",
    ),
    "the entropy is a sum over the vocabulary, not a mean": ("* log_probs).sum(-1)", "* log_probs).mean(-1)"),
    "the entropy has the wrong sign; p log p is never positive": (
        "-(log_probs.exp() * log_probs).sum(-1)",
        "(log_probs.exp() * log_probs).sum(-1)",
    ),
    "your entropy is in bits; use the natural logarithm, so that it is in nats": (
        "-(log_probs.exp() * log_probs).sum(-1)",
        "-(log_probs.exp() * log_probs).sum(-1) / torch.tensor(2.0).log()",
    ),
    "your log-probabilities have the wrong sign; a log-probability is never positive": (
        "logps = log_probs",
        "logps = -log_probs",
    ),
    "your entropy is minus the log-probability of the sampled token; the entropy is of the whole distribution": (
        "-(log_probs.exp() * log_probs).sum(-1)",
        "-logps",
    ),
    "your entropy has only the term of the sampled token; sum over the whole vocabulary": (
        "-(log_probs.exp() * log_probs).sum(-1)",
        "-(logps.exp() * logps)",
    ),
    "you score each state by the token before the one it predicts": (
        "batch.completion_ids[:, None]",
        "batch.completion_ids.roll(1)[:, None]",
    ),
}


def tries(plain_per_token_logps):
    from types import SimpleNamespace

    import torch

    states = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 0.5], [1.5, 1.5, -2.0], [0.3, -0.2, 0.1]])

    class Model:
        lm_head = staticmethod(lambda hidden: hidden)

        def __call__(self, batch, select):
            return states[select]

    layout = SimpleNamespace(predict_index=torch.tensor([1, 2, 3]))
    for temperature in (1.0, 0.7):
        batch = SimpleNamespace(layout=layout, completion_ids=torch.tensor([1, 0, 2]))
        logps, entropies = plain_per_token_logps(Model(), batch, temperature)
        yield f"temperature {temperature}", {"logps": logps, "entropies": entropies}
