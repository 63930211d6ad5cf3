"""What word embeddings know, while they are trained: the record "words"."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mukron.data import Dataset, analogies, analogy_accuracy, similarity, word_pairs
from mukron.train.errors import RunError


class Words:
    """How well distances between words agree with people's, and how many analogies come out right."""

    def __init__(self, model: nn.Module, dataset: Dataset, folder: str | Path | None) -> None:
        words = len(dataset.vocabulary)
        if not words:
            raise RunError(f'record "words": {dataset.name} has no words; it is for wikitext2')
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == words]
        if not tables:
            raise RunError(f'record "words": the network has no Embedding of the {words} words')
        self.embedding, self.vocabulary = tables[0], dataset.vocabulary
        self.pairs, self.questions = word_pairs(folder), analogies(folder)

    def read(self) -> dict[str, float]:
        vectors = self.embedding.weight.detach().float().cpu()
        spearman, pairs = similarity(vectors, self.vocabulary, self.pairs)
        accuracy, questions = analogy_accuracy(vectors, self.vocabulary, self.questions)
        return {
            "words/similarity": spearman,
            "words/pairs": pairs,
            "words/analogy_accuracy": accuracy,
            "words/questions": questions,
        }
