"""Data sets by name, as whole tensors.

Downloads are verified by checksums, augmentations run on the device of the batch, and word embeddings can be evaluated.
"""

from __future__ import annotations

from mukron.data.api import analogies, fetch, load, option_names, problems, where, word_pairs
from mukron.data.augment import AUGMENTATIONS, augmentation
from mukron.data.catalogue import DATASETS, get_source
from mukron.data.dataset import Dataset, Split, as_dataset, centred_one_hot
from mukron.data.errors import DataError
from mukron.data.store import Download, File, Source, StoredDataset, data_folder
from mukron.data.text import analogy_accuracy, similarity

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "DataError",
    "Dataset",
    "Download",
    "File",
    "Source",
    "Split",
    "StoredDataset",
    "analogies",
    "analogy_accuracy",
    "as_dataset",
    "augmentation",
    "centred_one_hot",
    "data_folder",
    "fetch",
    "get_source",
    "load",
    "option_names",
    "problems",
    "similarity",
    "where",
    "word_pairs",
]
