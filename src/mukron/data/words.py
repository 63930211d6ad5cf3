"""Text: WikiText-2 as samples for a bag of words, and two lists by which embeddings are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mukron.data.dataset import Dataset, Split
from mukron.data.errors import DataError
from mukron.data.store import Found

Pair = tuple[str, str, float]
Question = tuple[str, str, str, str]


def read_wikitext(found: Found, min_count: int = 128, window: int = 4) -> Dataset:
    """Words that appear more than ``min_count`` times; each is to be told from ``window`` words on either side.

    Text is lower-cased: the beginning of a sentence makes no other word, and the evaluation lists mix cases. Rarer
    words and the corpus's own <unk> are dropped before the windows are cut, as word2vec does, so a window may reach
    over them. It does not reach beyond a paragraph, and is always full.
    """
    if min_count < 0 or window < 1:
        raise DataError(f"min_count={min_count}, window={window}: expected min_count >= 0 and window >= 1")
    train, test = (_paragraphs(found.content(name)) for name in ("wiki.train.tokens", "wiki.test.tokens"))
    counts = Counter(word for paragraph in train for word in paragraph)
    del counts["<unk>"]
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = tuple(word for word, count in ranked if count > min_count)
    if not vocabulary:
        raise DataError(f"no word appears more than min_count={min_count} times")
    numbers = {word: number for number, word in enumerate(vocabulary)}
    train_split, test_split = (_windows(paragraphs, numbers, window) for paragraphs in (train, test))
    return Dataset(found.source.name, train_split, test_split, len(vocabulary), vocabulary)


def parse_pairs(data: bytes, path: Path) -> list[Pair]:
    """Lines of two words and a score between tabs; lines that begin with # are comments."""
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
    """Lines of four words; lines that begin with a colon name a section."""
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
    """Spearman's rank correlation of cosines with people's scores, and over how many pairs.

    A pair counts if both words are known, whatever their case. NaN with fewer than two pairs, or if all
    scores are equal.
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
    """How often d is the word nearest to b - a + c, in "a is to b as c is to d", and over how many questions.

    A question counts if its four words are known, whatever their case. Nearness is the cosine; a, b and c are no
    answers. NaN with no question.
    """
    numbers = _lookup(vocabulary)
    known = [
        [numbers[word.lower()] for word in question]
        for question in questions
        if all(word.lower() in numbers for word in question)
    ]
    if not known:
        return float("nan"), 0
    unit, right = _unit(embedding), 0
    for start in range(0, len(known), batch):
        some = torch.tensor(known[start : start + batch], device=embedding.device)
        a, b, c, d = some.unbind(1)
        nearness = (unit[b] - unit[a] + unit[c]) @ unit.T  # the length of the left side changes no order
        nearness.scatter_(1, some[:, :3], -torch.inf)
        right += int((nearness.argmax(1) == d).sum())
    return right / len(known), len(known)


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
    """Numbers by word in lower case; of words that differ in case the first, which is the most frequent."""
    numbers: dict[str, int] = {}
    for number, word in enumerate(vocabulary):
        numbers.setdefault(word.lower(), number)
    return numbers


def _unit(embedding: Tensor) -> Tensor:
    at_least_single = torch.promote_types(embedding.dtype, torch.float32)
    return torch.nn.functional.normalize(embedding.detach().to(at_least_single), dim=1)


def _ranks(values: Tensor) -> Tensor:
    """From 1; equal values share the mean of their ranks."""
    place: Tensor
    counts: Tensor
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1).double() / 2)[place]
