"""Fixtures that more than one test file uses: real data and checkpoints, where they are."""

import json
from pathlib import Path

import pytest
from hypothesis import settings

from swap_prune import data, experiment
from swap_prune.errors import InputError
from swap_prune.run_directory import RESULT_FILE, SHOWN, RunDirectory

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


@pytest.fixture
def stand_in(monkeypatch):
    """Called with a function of recipe and seed, which gives the figures of a run in no time.

    It returns the list of what is run from then on.
    """

    def install(figures):
        log = []

        def run(recipe, seed, out, progress=True):
            directory = RunDirectory(out)
            if not directory.finished:
                log.append((recipe, seed, out))
                versions = {"swap_prune": experiment.code_version()}
                result = {
                    **dict.fromkeys(SHOWN),
                    **figures(recipe, seed),
                    "seconds": 60.0,
                    "configuration": {
                        "fine_tuning": None, "versions": versions, **recipe.settings
                    },
                }  # fmt: skip
                out.mkdir(parents=True)
                (out / RESULT_FILE).write_text(json.dumps(result))
            return directory.result()

        monkeypatch.setattr(experiment, "run", run)
        monkeypatch.setattr(experiment, "load_task", lambda *task: None)
        return log

    return install
