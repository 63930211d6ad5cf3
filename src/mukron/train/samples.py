"""A sample of what a language model writes."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.data import Dataset
from mukron.train.build import Built
from mukron.train.outputs import class_dim
from mukron.train.randomness import own_random_numbers

WRITTEN = 200  # tokens
TEMPERATURE = 0.8


def written_sample(built: Built, dataset: Dataset, length: int = WRITTEN, temperature: float = TEMPERATURE) -> str:
    """Return what the network writes after the first window of the test text, or of the training text without one.

    Every token is drawn from the network's probabilities, given the window before it.

    Args:
        built: The network.
        dataset: Language data.
        length: The number of tokens to write.
        temperature: What logits are divided by: below 1, likelier tokens are preferred.

    Returns:
        The text; the tokens' numbers if they are no bytes. Empty if the network has no logits for every position.

    Example:
        >>> from mukron.train import RunConfig, build, dataset_of
        >>> config = RunConfig(model="gpt", width=64, method="adamw", model_options={"depth": 1})
        >>> data = dataset_of(config)
        >>> len(written_sample(build(config, data), data, length=10)) <= 10
        True
    """
    split = dataset.test if len(dataset.test) else dataset.train
    window = split.inputs[:1].clone()
    written: list[int] = []
    training = built.model.training
    built.model.eval()
    try:
        with own_random_numbers(window.device), built.untouched(), torch.no_grad():
            draws = torch.Generator().manual_seed(0)
            for _ in range(length):
                output = built.outputs(dataset.prepare(window, built.config.weights_dtype))
                if not isinstance(output, Tensor) or output.ndim != 3:
                    return ""
                if (dim := class_dim(built.config, dataset, output.shape)) is None:
                    return ""
                logits = output.movedim(dim, -1)[0, -1].double().cpu() / temperature
                token = int(torch.multinomial(logits.softmax(0), 1, generator=draws))
                written.append(token)
                window = torch.cat([window[:, 1:], window.new_full((1, 1), min(token, dataset.classes - 1))], dim=1)
    finally:
        built.model.train(training)
    if dataset.tokens == "bytes":
        return bytes(min(token, 255) for token in written).decode("utf-8", errors="replace")
    return " ".join(map(str, written))
