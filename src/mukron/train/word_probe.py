"""The probe of word embeddings, recorded as "words"."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mukron.data import Dataset, analogies, analogy_accuracy, similarity, word_pairs
from mukron.train.errors import RunError


class WordProbe:
    """Measures how well distances between words agree with human ratings, and how many analogies are solved.

    Args:
        model: The network; its first Embedding of the vocabulary's size is read.
        dataset: The data set, with its vocabulary.
        folder: Where data sets are stored; None for the default.

    Raises:
        RunError: If the data set has no vocabulary or the network no such embedding.
    """

    def __init__(self, model: nn.Module, dataset: Dataset, folder: str | Path | None) -> None:
        size = len(dataset.vocabulary)
        if not size:
            raise RunError(f'record "words": {dataset.name} has no words; it is for wikitext2')
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == size]
        if not tables:
            raise RunError(f'record "words": the network has no Embedding of the {size} words')
        self.embedding, self.vocabulary = tables[0], dataset.vocabulary
        self.pairs, self.questions = word_pairs(folder), analogies(folder)

    def read(self) -> dict[str, float]:
        """Returns the rank correlation, the analogy accuracy, and how many pairs and questions they are over."""
        vectors = self.embedding.weight.detach().float().cpu()
        spearman, pairs = similarity(vectors, self.vocabulary, self.pairs)
        accuracy, questions = analogy_accuracy(vectors, self.vocabulary, self.questions)
        return {
            "words/similarity": spearman,
            "words/pairs": pairs,
            "words/analogy_accuracy": accuracy,
            "words/questions": questions,
        }
