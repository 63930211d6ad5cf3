"""Text: WikiText-2 as samples for a bag of words, and two lists for the evaluation of word embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mukron.data.dataset import Dataset, Split
from mukron.data.errors import DataError
from mukron.data.store import StoredDataset

Pair = tuple[str, str, float]
Question = tuple[str, str, str, str]


def read_wikitext(stored: StoredDataset, min_count: int = 128, window: int = 4) -> Dataset:
    """Read WikiText-2: predict a word from ``window`` words on each side.

    The vocabulary is the words that appear more than ``min_count`` times. Text is converted to lower case, since a word
    at the beginning of a sentence is no other word, and the evaluation lists mix cases. Rarer words and the corpus's
    <unk> are dropped before the windows are cut, as in word2vec, so a window may extend over them. A window lies within
    one paragraph and always has all its words.
    """
    if min_count < 0 or window < 1:
        raise DataError(f"min_count={min_count}, window={window}: expected min_count >= 0 and window >= 1")
    train, test = (_paragraphs(stored.content(name)) for name in ("wiki.train.tokens", "wiki.test.tokens"))
    counts = Counter(word for paragraph in train for word in paragraph)
    del counts["<unk>"]
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = tuple(word for word, count in ranked if count > min_count)
    if not vocabulary:
        raise DataError(f"no word appears more than min_count={min_count} times")
    numbers = {word: number for number, word in enumerate(vocabulary)}
    train_split, test_split = (_windows(paragraphs, numbers, window) for paragraphs in (train, test))
    return Dataset(stored.source.name, train_split, test_split, len(vocabulary), vocabulary)


def parse_pairs(data: bytes, path: Path) -> list[Pair]:
    """Parse lines of two words and a score, separated by tabs; lines that begin with # are comments."""
    pairs = []
    for number, line in _lines(data):
        if line.startswith("#"):
            continue
        try:
            first, second, score = line.split("\t")
            pairs.append((first, second, float(score)))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: expected two words and a number between tabs: {line!r}") from error
    return pairs


def parse_analogies(data: bytes, path: Path) -> list[Question]:
    """Parse lines of four words; lines that begin with a colon are names of sections."""
    questions = []
    for number, line in _lines(data):
        if line.startswith(":"):
            continue
        words = line.split()
        if len(words) != 4:
            raise DataError(f"{path}, line {number}: expected four words: {line!r}")
        questions.append((words[0], words[1], words[2], words[3]))
    return questions


def similarity(embedding: Tensor, vocabulary: Sequence[str], pairs: Sequence[Pair]) -> tuple[float, int]:
    """Compute Spearman's rank correlation between the cosines of word pairs and people's scores.

    A pair is used if both its words are in the vocabulary, in upper or lower case.

    Args:
        embedding: The vectors of the words [words, dimension].
        vocabulary: The words, in the order of the vectors.
        pairs: Tuples of two words and a score, as ``word_pairs`` returns them.

    Returns:
        The correlation, and the number of pairs that were used. The correlation is NaN with fewer than two pairs, or if
        all scores are equal.

    Example:
        >>> import torch
        >>> from mukron.data import similarity
        >>> embedding = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> pairs = [("cat", "dog", 9.0), ("cat", "car", 1.0), ("dog", "car", 2.0)]
        >>> correlation, used = similarity(embedding, ["cat", "dog", "car"], pairs)
        >>> round(correlation, 6), used
        (1.0, 3)
    """
    numbers = _lookup(vocabulary)
    known = [
        (numbers[first.lower()], numbers[second.lower()], score)
        for first, second, score in pairs
        if first.lower() in numbers and second.lower() in numbers
    ]
    if len(known) < 2:
        return float("nan"), len(known)
    unit = _unit(embedding)
    firsts, seconds, scores = zip(*known, strict=True)
    cosines = (unit[list(firsts)] * unit[list(seconds)]).sum(1).cpu()
    ranks = torch.stack([_ranks(cosines), _ranks(torch.tensor(scores))])
    return float(torch.corrcoef(ranks)[0, 1]), len(known)


def analogy_accuracy(
    embedding: Tensor, vocabulary: Sequence[str], questions: Sequence[Question], batch: int = 1024
) -> tuple[float, int]:
    """Compute how often d is the word nearest to b - a + c, in "a is to b as c is to d".

    A question is used if its four words are in the vocabulary, in upper or lower case. The nearest word is the one with
    the largest cosine; a, b and c are excluded.

    Args:
        embedding: The vectors of the words [words, dimension].
        vocabulary: The words, in the order of the vectors.
        questions: Tuples of four words, as ``analogies`` returns them.
        batch: The number of questions that are evaluated at a time.

    Returns:
        The accuracy, and the number of questions that were used. The accuracy is NaN without questions.

    Example:
        >>> import torch
        >>> from mukron.data import analogy_accuracy
        >>> embedding = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [0.0, 1.0, -1.0]])
        >>> analogy_accuracy(embedding, ["man", "woman", "king", "queen"], [("man", "woman", "king", "queen")])
        (1.0, 1)
    """
    numbers = _lookup(vocabulary)
    known = [
        [numbers[word.lower()] for word in question]
        for question in questions
        if all(word.lower() in numbers for word in question)
    ]
    if not known:
        return float("nan"), 0
    unit, correct = _unit(embedding), 0
    for start in range(0, len(known), batch):
        chunk = torch.tensor(known[start : start + batch], device=embedding.device)
        a, b, c, d = chunk.unbind(1)
        nearness = (unit[b] - unit[a] + unit[c]) @ unit.T  # the norm of the left side does not change the order
        nearness.scatter_(1, chunk[:, :3], -torch.inf)
        correct += int((nearness.argmax(1) == d).sum())
    return correct / len(known), len(known)


def _paragraphs(data: bytes) -> list[list[str]]:
    return [line.split() for line in data.decode("utf-8").lower().split("\n")]


def _windows(paragraphs: list[list[str]], numbers: Mapping[str, int], window: int) -> Split:
    kept = [[numbers[word] for word in paragraph if word in numbers] for paragraph in paragraphs]
    words = torch.tensor([word for paragraph in kept for word in paragraph], dtype=torch.int64)
    paragraph_of = torch.arange(len(kept)).repeat_interleave(torch.tensor([len(paragraph) for paragraph in kept]))
    width = 2 * window + 1
    if len(words) < width:
        return Split(torch.empty(0, 2 * window, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    windows = words.unfold(0, width, 1)[paragraph_of[: 1 - width] == paragraph_of[width - 1 :]]
    neighbours = [place for place in range(width) if place != window]
    return Split(windows[:, neighbours], windows[:, window].contiguous())


def _lines(data: bytes) -> list[tuple[int, str]]:
    lines = enumerate(data.decode("utf-8").splitlines(), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def _lookup(vocabulary: Sequence[str]) -> dict[str, int]:
    """Return numbers by word in lower case; of words that differ only in case, that of the first, most frequent one."""
    numbers: dict[str, int] = {}
    for number, word in enumerate(vocabulary):
        numbers.setdefault(word.lower(), number)
    return numbers


def _unit(embedding: Tensor) -> Tensor:
    at_least_single = torch.promote_types(embedding.dtype, torch.float32)
    return torch.nn.functional.normalize(embedding.detach().to(at_least_single), dim=1)


def _ranks(values: Tensor) -> Tensor:
    """Return ranks from 1 on; equal values have the mean of their ranks."""
    place: Tensor
    counts: Tensor
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1).double() / 2)[place]
