"""A synthetic text: words spelled from syllables, drawn from a Markov chain. It needs no file and no download."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.data import Dataset, Split

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
ALPHABET = tuple(" ." + CONSONANTS + VOWELS)
WORDS = 200  # in the vocabulary
FOLLOWERS = 6  # words that may follow a word, the earlier ones more often


def markov_text(characters: int, seed: int = 0) -> str:
    """Draw a text: what follows a word depends on that word alone; sentences have 4 to 12 words.

    Args:
        characters: The length of the text.
        seed: The seed of the vocabulary, of the chain and of the text.

    Returns:
        The text.

    Example:
        >>> text = markov_text(1000)
        >>> len(text), set(text) <= set(ALPHABET)
        (1000, True)
    """
    random = torch.Generator().manual_seed(seed)

    def below(limit: int, count: int) -> list[int]:
        numbers: list[int] = torch.randint(limit, (count,), generator=random).tolist()
        return numbers

    words = []
    for syllables in below(3, WORDS):
        spelling = zip(below(len(CONSONANTS), syllables + 1), below(len(VOWELS), syllables + 1), strict=True)
        words.append("".join(CONSONANTS[consonant] + VOWELS[vowel] for consonant, vowel in spelling))
    followers = torch.randint(WORDS, (WORDS, FOLLOWERS), generator=random).tolist()
    chances = 1.0 / torch.arange(1, FOLLOWERS + 1)  # Zipf's law
    text, word = "", 0
    while len(text) < characters:
        sentence = []
        for choice in torch.multinomial(chances, 4 + below(9, 1)[0], replacement=True, generator=random).tolist():
            word = followers[word][choice]
            sentence.append(words[word])
        text += " ".join(sentence) + ". "
    return text[:characters]


def text_dataset(characters: int, context: int, seed: int = 0) -> Dataset:
    """Make a data set of all windows of a synthetic text, half a window apart; targets are the next characters.

    Args:
        characters: The length of the text.
        context: The length of a window.
        seed: The seed of the text.

    Returns:
        The data set; its test split is empty.

    Example:
        >>> dataset = text_dataset(1000, context=32)
        >>> dataset.train.inputs.shape, dataset.train.targets.shape
        (torch.Size([61, 32]), torch.Size([61, 32]))
    """
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    encoded = torch.tensor([numbers[character] for character in markov_text(characters, seed)])
    windows: Tensor = encoded.unfold(0, context + 1, context // 2)
    train = Split(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
    return Dataset("text", train, Split(train.inputs[:0], train.targets[:0]), len(ALPHABET), vocabulary=ALPHABET)
