"""The data sets by name: where each is downloaded from, and the checksums of its files.

The sources of the checksums:

- MNIST, Fashion-MNIST: the four files of each; TensorFlow Datasets lists the same.
- CIFAR: the archives' from TensorFlow Datasets (url_checksums/cifar10.txt, cifar100.txt); the unpacked files' from
  copies whose sha1 is what Gluon's CIFAR10 and CIFAR100 expect.
- WikiText-2: the archive's from Hugging Face Datasets (datasets/wikitext/dataset_infos.json) and CorpusLoaders.jl,
  which agree; the unpacked files' from copies whose sha1 is what GluonNLP expects. Its first address no longer exists;
  the author's server has it.
- Tiny Shakespeare: the one file of karpathy/char-rnn. The text that comes with the package is its beginning, the
  first half of Coriolanus.
- WordSim-353 and the analogies: as gensim 4.4.0 ships them.
"""

from __future__ import annotations

from dataclasses import replace

from mukron.data.errors import DataError
from mukron.data.imagenet import read_imagenet
from mukron.data.images import read_cifar10, read_cifar100, read_digits, read_mnist
from mukron.data.store import Download, File, Source
from mukron.data.text import read_wikitext
from mukron.data.tokens import BYTES, read_shipped_text, read_text_file, read_wikitext_bytes
from mukron.readers import nearest

PICKLE = "is there, but it is Python pickle, which could run any code, and is not read"


def _idx(name: str, sha256: str) -> File:
    return File(name, sha256, aliases=(name.replace("-idx", ".idx"),))


def _downloads(mirrors: tuple[str, ...], *files: tuple[str, str, int]) -> tuple[Download, ...]:
    return tuple(
        Download(name, sha256, size, tuple(f"{url}/{name}" for url in mirrors)) for name, sha256, size in files
    )


MNIST = Source(
    "mnist",
    "images 28x28",
    train=60_000,
    test=10_000,
    classes=10,
    read=read_mnist,
    folders=("MNIST/raw", "MNIST", "mnist"),
    files=(
        _idx("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        _idx("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        _idx("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        _idx("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    downloads=_downloads(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            9_912_422,
        ),
        ("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
        ("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
        ("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ),
)

FASHION_MNIST = Source(
    "fashion-mnist",
    "images 28x28",
    train=60_000,
    test=10_000,
    classes=10,
    read=read_mnist,
    folders=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist"),
    files=(
        _idx("train-images-idx3-ubyte", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        _idx("train-labels-idx1-ubyte", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        _idx("t10k-images-idx3-ubyte", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        _idx("t10k-labels-idx1-ubyte", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    downloads=_downloads(
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        (
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        ("train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
        ("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
        ("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ),
)

CIFAR10 = Source(
    "cifar10",
    "images 3x32x32",
    train=50_000,
    test=10_000,
    classes=10,
    read=read_cifar10,
    folders=("cifar-10-batches-bin",),
    files=(
        File("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    downloads=_downloads(
        ("https://www.cs.toronto.edu/~kriz",),
        (
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
    refused={"cifar-10-batches-py": PICKLE, "cifar-10-python.tar.gz": PICKLE},
)

CIFAR100 = Source(
    "cifar100",
    "images 3x32x32",
    train=50_000,
    test=10_000,
    classes=100,
    read=read_cifar100,
    folders=("cifar-100-binary",),
    files=(
        File("train.bin", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        File("test.bin", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    downloads=_downloads(
        ("https://www.cs.toronto.edu/~kriz",),
        (
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168_513_733,
        ),
    ),
    refused={"cifar-100-python": PICKLE, "cifar-100-python.tar.gz": PICKLE},
)

WIKITEXT2 = Source(
    "wikitext2",
    "word contexts",
    train=1_366_558,  # these three numbers are those of min_count=128 and window=4
    test=158_423,
    classes=1_689,
    read=read_wikitext,
    folders=("wikitext-2", "text/wikitext-2"),
    files=(
        File(
            "wiki.train.tokens",
            "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            aliases=("train.txt",),
        ),
        File(
            "wiki.test.tokens",
            "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            aliases=("test.txt",),
        ),
    ),
    downloads=_downloads(
        ("https://wikitext.smerity.com",),
        ("wikitext-2-v1.zip", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c", 4_475_746),
    ),
)

WIKITEXT2_BYTES = replace(
    WIKITEXT2,
    name="wikitext2-bytes",
    kind="text, 64 bytes",
    train=168_705,  # this and those of the other texts are windows of length=64
    test=19_632,
    classes=BYTES,
    read=read_wikitext_bytes,
)

SHAKESPEARE = Source(
    "shakespeare",
    "text, 64 bytes",
    train=15_685,
    test=1_742,
    classes=BYTES,
    read=read_text_file,
    folders=("shakespeare", ".", "text"),
    files=(
        File(
            "tinyshakespeare.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            aliases=("input.txt",),
        ),
    ),
    downloads=(
        Download(
            "tinyshakespeare.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            1_115_394,
            ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
        ),
    ),
)

WORDSIM353 = Source(
    "wordsim353",
    "word pairs",
    train=0,
    test=353,
    classes=0,
    read=None,
    folders=(".", "text"),
    files=(File("wordsim353.tsv", "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d"),),
    downloads=_downloads(
        (
            "https://raw.githubusercontent.com/piskvorky/gensim/4.4.0/gensim/test/test_data",
            "https://raw.githubusercontent.com/piskvorky/gensim/develop/gensim/test/test_data",
        ),
        ("wordsim353.tsv", "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d", 7_186),
    ),
)

ANALOGIES = Source(
    "analogies",
    "word analogies",
    train=0,
    test=19_544,
    classes=0,
    read=None,
    folders=(".", "text"),
    files=(File("questions-words.txt", "8c29b3332afc46f3fb8be04cb5297bf96f39aa7131272dff57869b4485b22a36"),),
    downloads=_downloads(
        (
            "https://raw.githubusercontent.com/piskvorky/gensim/4.4.0/gensim/test/test_data",
            "https://raw.githubusercontent.com/tmikolov/word2vec/master",
        ),
        ("questions-words.txt", "8c29b3332afc46f3fb8be04cb5297bf96f39aa7131272dff57869b4485b22a36", 603_955),
    ),
)

DATASETS: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", "images 8x8", train=1_500, test=297, classes=10, read=read_digits),
        MNIST,
        FASHION_MNIST,
        CIFAR10,
        CIFAR100,
        Source(
            "imagenet",
            "images, any size",
            train=1_281_167,
            test=50_000,
            classes=1000,
            read=read_imagenet,
            folders=("imagenet", "ImageNet", "."),
            files=(File("train", sha256=None), File("val", sha256=None)),
            draws=True,
        ),
        Source("coriolanus", "text, 64 bytes", train=927, test=103, classes=BYTES, read=read_shipped_text),
        SHAKESPEARE,
        WIKITEXT2,
        WIKITEXT2_BYTES,
        WORDSIM353,
        ANALOGIES,
    )
}


OTHER_NAMES = {"tinyshakespeare": "shakespeare", "tiny-shakespeare": "shakespeare"}  # what others call data sets


def get_source(name: str) -> Source:
    """Return the source of a data set.

    Args:
        name: A key of ``DATASETS``, or one of ``OTHER_NAMES``.

    Returns:
        The source.

    Raises:
        DataError: There is no data set of this name.

    Example:
        >>> from mukron.data import get_source
        >>> source = get_source("mnist")
        >>> source.train, source.classes
        (60000, 10)
    """
    name = usual_name(name)
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}{nearest(name, DATASETS)}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def usual_name(name: str) -> str:
    """Return the name under which ``DATASETS`` has a data set that others call by another name.

    Args:
        name: A name.

    Returns:
        The usual name; the same name if there is no other.

    Example:
        >>> usual_name("tinyshakespeare"), usual_name("mnist")
        ('shakespeare', 'mnist')
    """
    return name if name in DATASETS else OTHER_NAMES.get(name, name)


def is_known(name: str) -> bool:
    """Return whether there is a data set of this name.

    Args:
        name: A name.

    Example:
        >>> is_known("tinyshakespeare"), is_known("corpus.txt")
        (True, False)
    """
    return usual_name(name) in DATASETS
