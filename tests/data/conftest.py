"""A server on this machine, and data sets small enough to make by hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mukron.data import DATASETS, Download, File, Source


@dataclass
class Server:
    """Serves ``files`` by name.

    Of one in ``cut`` it sends half and hangs up; in ``stuck``, half and then nothing; in ``endless``, more and more.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    endless: set[str] = field(default_factory=set)
    sent: int = 0  # bytes of what is endless
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def offer(self, name: str, content: bytes) -> Download:
        """Serve a file, and say so as the catalogue does."""
        self.files[name] = content
        return Download(name, sha256(content), len(content), (f"{self.address}/{name}",))


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            serving.asked.append(name)
            content = serving.files.get(name)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            if name in serving.endless:
                self.end_headers()
                with suppress(OSError):
                    while serving.sent < 100_000_000:
                        serving.sent += self.wfile.write(bytes(1 << 16))
                return
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            whole = name not in serving.cut | serving.stuck
            self.wfile.write(content if whole else content[: len(content) // 2])
            if name in serving.stuck:
                self.wfile.flush()
                serving.released.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    serving.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield serving
    serving.released.set()
    http.shutdown()
    thread.join()
    http.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def idx(values: bytes, *shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}i", *shape) + values


CONTENTS = {
    "mnist": {
        "train-images-idx3-ubyte": idx(bytes(range(0, 240, 10)), 4, 2, 3),
        "train-labels-idx1-ubyte": idx(bytes([1, 0, 2, 1]), 4),
        "t10k-images-idx3-ubyte": idx(bytes(range(12)), 2, 2, 3),
        "t10k-labels-idx1-ubyte": idx(bytes([2, 0]), 2),
    },
    "cifar100": {
        "train.bin": bytes([19, 7]) + bytes(3072) + bytes([0, 99]) + bytes([255]) * 3072,
        "test.bin": bytes([3, 42]) + bytes([9]) * 3072,
    },
    "wikitext2": {"wiki.train.tokens": b" \n a b a b \n", "wiki.test.tokens": b" b a b \n"},
}


@pytest.fixture
def contents() -> dict[str, dict[str, bytes]]:
    """The files of the small data sets."""
    return CONTENTS


def with_downloads(name: str, *downloads: Download) -> Source:
    """A data set of the catalogue with the small files in place of its own."""
    source = DATASETS[name]
    files = tuple(replace(file, sha256=sha256(CONTENTS[name][file.name])) for file in source.files)
    return replace(source, files=files, downloads=downloads)


@pytest.fixture
def mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> Source:
    """MNIST of four images, on the server as four .gz files."""
    downloads = [server.offer(f"{name}.gz", gzip.compress(content)) for name, content in CONTENTS["mnist"].items()]
    source = with_downloads("mnist", *downloads)
    monkeypatch.setitem(DATASETS, "mnist", source)
    return source


def tar_gz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def cifar100(server: Server, monkeypatch: pytest.MonkeyPatch) -> Source:
    """CIFAR-100 of three images, on the server as an archive that holds more than is wanted, and an attack."""
    members = {f"cifar-100-binary/{name}": content for name, content in CONTENTS["cifar100"].items()}
    more = {
        "../outside.txt": b"no",
        "/tmp/mukron-outside.txt": b"no",
        "cifar-100-binary/names.txt": b"apple",
    }
    source = with_downloads("cifar100", server.offer("cifar-100-binary.tar.gz", tar_gz({**more, **members})))
    monkeypatch.setitem(DATASETS, "cifar100", source)
    return source


@pytest.fixture
def wikitext2(server: Server, monkeypatch: pytest.MonkeyPatch) -> Source:
    """WikiText-2 of seven words, on the server as a .zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {**CONTENTS["wikitext2"], "../outside.txt": b"no", "wiki.valid.tokens": b"a"}.items():
            archive.writestr(f"wikitext-2/{name}", content)
    source = with_downloads("wikitext2", server.offer("wikitext-2-v1.zip", buffer.getvalue()))
    monkeypatch.setitem(DATASETS, "wikitext2", source)
    return source


@pytest.fixture
def pairs_list(server: Server, monkeypatch: pytest.MonkeyPatch) -> Source:
    """WordSim-353 of two pairs, on the server as it is."""
    content = b"# words\nTiger\tcat\t7.35\ntiger\ttiger\t10.00\n"
    source = replace(
        DATASETS["wordsim353"],
        files=(File("wordsim353.tsv", sha256(content)),),
        downloads=(server.offer("wordsim353.tsv", content),),
    )
    monkeypatch.setitem(DATASETS, "wordsim353", source)
    return source
