"""Texts as samples, and judging embeddings."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr

from mukron.data import DataError, analogies, analogy_accuracy, load, similarity, word_pairs
from mukron.data.text import parse_analogies, parse_pairs

TRAIN = """
 = The Cat =

 The cat sat on the <unk> mat , the cat .
 A dog sat on
 the mat <unk> .
"""


@pytest.fixture
def corpus(tmp_path, wikitext2, contents, monkeypatch):
    """A corpus of our own; its checksums are those of the fixture's downloads, so they are lifted."""
    from dataclasses import replace

    from mukron.data import DATASETS

    files = tuple(replace(file, sha256=None) for file in wikitext2.files)
    monkeypatch.setitem(DATASETS, "wikitext2", replace(wikitext2, files=files))
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2/wiki.train.tokens").write_text(TRAIN)
    (tmp_path / "wikitext-2/wiki.test.tokens").write_text(" the the unseen dog Cat Sat the \n")
    return tmp_path


def sentences(data, split) -> list[str]:
    """Each sample as its words in order, the target in brackets."""
    window = split.inputs.shape[1] // 2
    words = []
    for context, target in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
        around = [data.vocabulary[number] for number in context]
        words.append(" ".join([*around[:window], f"[{data.vocabulary[target]}]", *around[window:]]))
    return words


def test_windows(corpus):
    """Words seen more than once: the (5), cat (3), and = . mat on sat (2); <unk> is no word."""
    data = load("wikitext2", corpus, min_count=1, window=2)
    assert data.vocabulary == ("the", "cat", ".", "=", "mat", "on", "sat")  # by frequency, then by letter
    assert data.classes == 7
    assert data.input_shape == (4,)
    assert sentences(data, data.train) == [
        "the cat [sat] on the",
        "cat sat [on] the mat",
        "sat on [the] mat the",  # over <unk> and the rare comma
        "on the [mat] the cat",
        "the mat [the] cat .",
    ]  # and none over the end of a paragraph
    assert sentences(data, data.test) == ["the the [cat] sat the"]
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.int64


def test_more_than_min_count(corpus):
    assert load("wikitext2", corpus, min_count=2, window=1).vocabulary == ("the", "cat")
    assert len(load("wikitext2", corpus, min_count=2, window=40).train) == 0
    with pytest.raises(DataError, match="no word appears more than min_count=5"):
        load("wikitext2", corpus, min_count=5)
    with pytest.raises(DataError, match="window=0: expected"):
        load("wikitext2", corpus, window=0)


def test_lists(tmp_path):
    path = tmp_path / "list"
    assert parse_pairs(b"# a comment\nlove\tsex\t6.77\n\nFBI\tx y\t10\n", path) == [
        ("love", "sex", 6.77),
        ("FBI", "x y", 10.0),
    ]
    with pytest.raises(DataError, match="list, line 2: expected two words and a number"):
        parse_pairs(b"a\tb\t1\na\tb\n", path)
    assert parse_analogies(b": capitals\nAthens Greece Oslo Norway\n", path) == [("Athens", "Greece", "Oslo", "Norway")]
    with pytest.raises(DataError, match="list, line 1: expected four words"):
        parse_analogies(b"Athens Greece Oslo\n", path)


def test_lists_are_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"wordsim353: no wordsim353.tsv under .*fetch wordsim353"):
        word_pairs(tmp_path, download=False)
    with pytest.raises(DataError, match=r"analogies: no questions-words.txt under .*fetch analogies"):
        analogies(tmp_path, download=False)


WORDS = [f"word{number}" for number in range(60)]


@pytest.mark.parametrize("ties", [False, True])
def test_similarity_is_spearmans(ties):
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(60, 5, generator=generator)
    if ties:
        embedding = embedding.sign()  # few different cosines
    chosen = torch.randint(60, (200, 2), generator=generator).tolist()
    scores = torch.rand(200, generator=generator).mul(10).round().tolist()
    pairs = [(WORDS[a].upper(), WORDS[b], score) for (a, b), score in zip(chosen, scores, strict=True)]
    cosines = [float(torch.cosine_similarity(embedding[a].double(), embedding[b].double(), 0)) for a, b in chosen]
    expected = spearmanr([round(cosine, 6) for cosine in cosines], scores).statistic
    unknown = [("word1", "nowhere", 3.0), ("nobody", "word2", 4.0)]
    result, used = similarity(embedding.round(decimals=6), WORDS, [*unknown, *pairs])
    assert used == 200
    assert result == pytest.approx(expected, abs=2e-4)


def test_a_perfect_order_is_one():
    embedding = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.5], [1.0, 2.0]])
    pairs = [("a", "b", 9.0), ("a", "c", 5.0), ("a", "d", 1.0)]
    assert similarity(embedding, "abcd", pairs) == (pytest.approx(1.0), 3)
    assert similarity(embedding.bfloat16(), "abcd", pairs) == (pytest.approx(1.0), 3)
    assert similarity(embedding, "abcd", [(a, b, -score) for a, b, score in pairs]) == (pytest.approx(-1.0), 3)


def test_similarity_without_pairs_is_no_number():
    embedding = torch.eye(3)
    for pairs in ([], [("a", "b", 1.0)], [("x", "y", 1.0)] * 5, [("a", "b", 1.0), ("b", "c", 1.0)]):
        result, used = similarity(embedding, "abc", pairs)
        assert math.isnan(result)
        assert used == sum(pair[0] != "x" for pair in pairs)


def test_analogies_on_a_made_embedding():
    """Countries and capitals on two lines: the capital lies one unit beyond its country."""
    generator = torch.Generator().manual_seed(0)
    countries = torch.randn(20, 30, generator=generator)
    capital_of = 2 * torch.randn(30, generator=generator)
    embedding = torch.cat([countries, countries + capital_of])
    vocabulary = [f"country{n}" for n in range(20)] + [f"capital{n}" for n in range(20)]
    questions = [
        (f"Country{a}", f"Capital{a}", f"Country{b}", f"Capital{b}") for a in range(20) for b in range(20) if a != b
    ]
    unknown = [("Country1", "Capital1", "Country2", "Atlantis")]
    accuracy, used = analogy_accuracy(embedding, vocabulary, questions + unknown, batch=7)
    assert used == 380
    assert accuracy > 0.95
    assert analogy_accuracy(embedding, vocabulary, questions, batch=1000) == (accuracy, 380)
    wrong = [(a, b, c, "country0") for a, b, c, _ in questions if "0" not in c]
    assert analogy_accuracy(embedding, vocabulary, wrong)[0] < 0.05


def test_the_words_of_a_question_are_no_answers():
    """b - a + c lies nearest to c itself; without it, to d."""
    embedding = torch.tensor([[1.0, 0.0, 0.0], [0.99, 0.1, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.3], [0.0, 0.0, 1.0]])
    assert analogy_accuracy(embedding, "abcde", [("a", "b", "c", "d")]) == (1.0, 1)
    assert analogy_accuracy(embedding, "abcde", [("a", "b", "c", "c")]) == (0.0, 1)
    result, used = analogy_accuracy(embedding, "abcde", [("x", "b", "c", "d")])
    assert math.isnan(result)
    assert used == 0


def test_of_words_that_differ_in_case_the_first_counts():
    embedding = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.2, 1.0]])
    pairs = [("THE", "near", 9.0), ("the", "far", 1.0)]
    assert similarity(embedding, ["the", "The", "near", "far"], pairs)[0] == pytest.approx(1.0)
    assert similarity(embedding, ["far", "near", "The", "the"], pairs) == (pytest.approx(-1.0), 2)
