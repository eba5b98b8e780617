"""Fixtures that more than one test file uses: real data and checkpoints, where they are."""

from pathlib import Path

import pytest
from hypothesis import settings

from swap_prune import data
from swap_prune.errors import InputError

# A test run is reproducible too: what it finds once, it finds again.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder beside the repository with checkpoints and images that aren't ours to commit."""
    path = Path(__file__).parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="session")
def mnist() -> data.Splits:
    """MNIST from the cache."""
    return _load_or_skip("mnist")


@pytest.fixture(scope="session")
def cifar10() -> data.Splits:
    """CIFAR-10 from the cache."""
    return _load_or_skip("cifar10")


def _load_or_skip(name: str) -> data.Splits:
    try:
        return data.load(name)
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def weights(tmp_path):
    """A directory with files named as the weights of three networks."""
    directory = tmp_path / "weights"
    directory.mkdir()
    for name in ("mlpnet_mnist.safetensors", "resnet20.safetensors", "resnet50.safetensors"):
        (directory / name).touch()
    return directory
