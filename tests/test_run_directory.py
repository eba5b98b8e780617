"""The run directory: whole files, checksums, one process at a time, and resuming after kill -9."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from swap_prune import InputError, data, models, prune
from swap_prune.run_directory import RunDirectory, Step

SETTINGS = {
    "sparsity": 0.9,
    "method": "ewr",
    "stages": 4,
    "samples": 40,
    "samples_per_row": 4,
    "held_out": 60,
    "seed": 3,
    "fine_tuning": {"epochs_per_stage": 1, "epochs_after": 3, "batch_size": 256},
}


def run(directory=None, **changes):
    return prune(
        models.pretrained("digits"),
        data.load("digits").train,
        directory=directory,
        **{**SETTINGS, **changes},
    )


@pytest.fixture(scope="module")
def uninterrupted():
    return run()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that reached its end, to be copied."""
    directory = tmp_path_factory.mktemp("finished")
    run(directory)
    return directory


def assert_same(result, expected):
    for name, value in expected.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name]), name
    drop = {"seconds"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in result.history] == [
        {k: v for k, v in line.items() if k not in drop} for line in expected.history
    ]


def step(number=1):
    return Step(number, {"w": torch.arange(4.0)}, {}, {}, {}, {"history": [], "loss": 0.25})


def test_a_directory_does_not_change_the_result(uninterrupted, finished):
    assert_same(run(finished), uninterrupted)
    assert len(list((finished / "stages").glob("????.json"))) == 4 + 3


@pytest.mark.parametrize("last", [0, 2, 4, 5, 6])
def test_continues_from_any_step_to_the_same_result(uninterrupted, tmp_path, monkeypatch, last):
    save = RunDirectory.save_step

    def save_until(directory, step):
        if step.number > last:
            raise KeyboardInterrupt
        save(directory, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_step", save_until)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert_same(run(tmp_path), uninterrupted)


def test_only_the_last_steps_keep_what_a_continued_run_needs(finished):
    names = {path.name for path in (finished / "stages").iterdir()}
    assert {f"{n:04d}.safetensors" for n in range(1, 8)} <= names
    assert {name for name in names if ".optimizer." in name or ".method." in name} == {
        "0006.optimizer.safetensors",
        "0007.optimizer.safetensors",
    }


def test_kill_9_at_any_moment(uninterrupted, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_run_directory import run\n"
        f"run({str(tmp_path)!r})"
    )
    for steps in (2, 5):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
        while process.poll() is None and not (tmp_path / f"stages/{steps:04d}.json").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert (tmp_path / f"stages/{steps:04d}.json").exists()
    assert_same(run(tmp_path), uninterrupted)
    assert not list(tmp_path.rglob(".writing-*"))


def test_another_configuration_is_refused_and_the_run_stays(tmp_path):
    run(tmp_path, fine_tuning=None, stages=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"another configuration: sparsity is 0.9 there and 0.8"):
        run(tmp_path, fine_tuning=None, stages=2, sparsity=0.8)
    with pytest.raises(InputError, match=r"another configuration: method is '\w+' there and 'lr' "):
        run(tmp_path, fine_tuning=None, stages=2, method="lr")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_what_an_older_version_saved_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("swap_prune.run.FORMAT", 1)
        run(tmp_path, fine_tuning=None, stages=2)
    with pytest.raises(InputError, match=r"another configuration: format is 1 there and \d+ here"):
        run(tmp_path, fine_tuning=None, stages=2)


def test_another_model_is_refused(tmp_path):
    run(tmp_path, fine_tuning=None, stages=2)
    other = models.build("digits")
    with pytest.raises(InputError, match="another configuration: model_sha256"):
        prune(
            other,
            data.load("digits").train,
            directory=tmp_path,
            **{**SETTINGS, "fine_tuning": None, "stages": 2},
        )


@pytest.mark.parametrize("damage", ["truncate", "flip", "json", "delete"])
def test_damaged_stage_files_are_named(tmp_path, damage):
    directory = RunDirectory(tmp_path)
    directory.save_step(step(1))
    directory.save_step(step(2))
    tensors, text = tmp_path / "stages/0002.safetensors", tmp_path / "stages/0002.json"
    if damage == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif damage == "flip":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif damage == "json":
        text.write_text(text.read_text().replace("0.25", "0.26"))
    else:
        tensors.unlink()
    with pytest.raises(InputError, match=r"0002\.\w+' is damaged .* delete 0002.* step before"):
        directory.last_step()
    for path in (tmp_path / "stages").glob("0002.*"):
        path.unlink()
    assert directory.last_step().number == 1


def test_a_second_process_is_refused(tmp_path):
    code = (
        "import sys, time; from swap_prune.run_directory import RunDirectory\n"
        f"with RunDirectory({str(tmp_path)!r}).lock():\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    try:
        with pytest.raises(InputError, match="in use by another process"):
            run(tmp_path)
    finally:
        process.kill()
        process.wait()
    with RunDirectory(tmp_path).lock():  # the system lets go of it
        pass


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.save_step(step(1))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"can.t be written to: .*No space left"):
            directory.save_step(step(2))
    assert directory.last_step().number == 1
    assert sorted(p.name for p in (tmp_path / "stages").iterdir()) == [
        "0001.json",
        "0001.safetensors",
    ]


def test_steps_are_plain_weights_and_json(tmp_path):
    run(tmp_path, fine_tuning=None, stages=2)
    model = models.build("digits")
    models.load_weights(model, tmp_path / "stages/0001.safetensors")
    saved = json.loads((tmp_path / "stages/0002.json").read_text())
    assert [line["stage"] for line in saved["values"]["history"]] == [1, 2]


def test_other_data_or_another_loss_is_refused(tmp_path):
    inputs, labels = data.load("digits").train[:]
    few = {**SETTINGS, "fine_tuning": None, "stages": 2}
    model = models.pretrained("digits")
    prune(model, (inputs, labels), directory=tmp_path, **few)
    with pytest.raises(InputError, match="targets_sha256"):
        prune(model, (inputs, labels.flip(0)), directory=tmp_path, **few)
    with pytest.raises(InputError, match="inputs_sha256"):
        prune(model, (3 * inputs, labels), directory=tmp_path, **few)
    late = labels.clone()
    late[len(late) // 2 :] = 0
    with pytest.raises(InputError, match="targets_sha256"):
        prune(model, (inputs, late), directory=tmp_path, **few)
    with pytest.raises(InputError, match="loss is 'cross_entropy' there and 'mine' here"):
        prune(model, (inputs, labels), loss=mine, directory=tmp_path, **few)


def test_another_loss_of_the_same_name_is_refused(tmp_path):
    inputs, labels = data.load("digits").train[:]
    few = {**SETTINGS, "fine_tuning": None, "stages": 2, "method": "magnitude"}
    model = models.pretrained("digits")
    task = {"directory": tmp_path, **few}
    prune(model, (inputs, labels), loss=lambda o, t: mine(o, t), **task)
    prune(model, (inputs, labels), loss=lambda o, t: mine(o, t), **task)
    with pytest.raises(InputError, match="value_of_loss is"):
        prune(model, (inputs, labels), loss=lambda o, t: 2 * mine(o, t), **task)


class Jittered(Dataset):
    """Inputs that torch's seed does not fix."""

    def __init__(self):
        self.inputs, self.labels = data.load("digits").train[:]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index] + 1e-3 * random.random(), int(self.labels[index])


def test_random_inputs_do_not_keep_a_run_from_being_continued(tmp_path):
    few = {**SETTINGS, "fine_tuning": None, "stages": 2, "method": "magnitude"}
    for _ in range(2):
        prune(models.pretrained("digits"), Jittered(), directory=tmp_path, **few)
    assert json.loads((tmp_path / "configuration.json").read_text())["inputs_sha256"] is None


def test_a_model_that_was_there_before_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_text("the user's")
    with pytest.raises(InputError, match=r"already has a run \(model.safetensors\)"):
        run(tmp_path, fine_tuning=None, stages=2)
    assert (tmp_path / "model.safetensors").read_text() == "the user's"
    assert not (tmp_path / "configuration.json").exists()


def mine(output, labels):
    return nn.functional.cross_entropy(output, labels)


@pytest.mark.parametrize("name", ["configuration.json", "stages/0002.json"])
def test_json_of_another_shape_is_damage(finished, tmp_path, name):
    directory = shutil.copytree(finished, tmp_path / "copy")
    for path in (directory / "stages").iterdir():
        if int(path.name[:4]) > 2:
            path.unlink()
    (directory / name).write_text("[]")
    with pytest.raises(InputError, match="is damaged"):
        run(directory)


def test_a_network_given_channels_last_resumes_to_the_same_result(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    calibration = (torch.randn(200, 3, 8, 8), torch.randint(3, (200,)))
    settings = {
        "sparsity": 0.7, "method": "lr", "stages": 3, "samples": 30, "samples_per_row": 2,
        "fine_tuning": {"epochs_per_stage": 1, "epochs_after": 1, "batch_size": 50},
    }  # fmt: skip
    expected = prune(network, calibration, directory=tmp_path / "whole", **settings)
    for last in (1, 2):
        directory = shutil.copytree(tmp_path / "whole", tmp_path / f"after-{last}")
        for path in (directory / "stages").iterdir():
            if int(path.name[:4]) > last:
                path.unlink()
        assert_same(prune(network, calibration, directory=directory, **settings), expected)


def test_training_that_cannot_work_is_known_before_pruning(tmp_path):
    narrow = (torch.randn(10, 5), torch.zeros(10, dtype=torch.long))
    with pytest.raises(InputError, match="training_data can't be used: the model can't be called"):
        run(tmp_path / "out", training_data=narrow)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="training_data has no effect without fine_tuning"):
        run(fine_tuning=None, training_data=(torch.randn(2, 2), torch.zeros(2)))
    with pytest.raises(InputError, match="training_data holds no sample"):
        run(training_data=(torch.randn(0, 64), torch.zeros(0)))
    with pytest.raises(InputError, match="directory is of type int"):
        run(3)


class _Jittered(Dataset):
    """Digits with a random transform, as augmented data has."""

    def __init__(self):
        self.digits = data.load("digits").train

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, label = self.digits[index]
        return image + 0.1 * torch.randn(image.shape), label


@pytest.mark.parametrize("last", [2, 4, 5])
def test_random_transforms_are_the_same_in_a_resumed_run(tmp_path, monkeypatch, last):
    def jittered(directory=None):
        model = models.pretrained("digits")
        return prune(model, _Jittered(), directory=directory, training_data=_Jittered(), **SETTINGS)

    expected, save = jittered(), RunDirectory.save_step

    def interrupted(self, step):
        save(self, step)
        if step.number == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "save_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jittered(tmp_path)
    monkeypatch.setattr(RunDirectory, "save_step", save)
    assert_same(jittered(tmp_path), expected)


def test_data_that_can_not_be_used_leave_no_run_behind(tmp_path):
    """So that the same call on mended data is not another configuration."""
    x, y = torch.randn(200, 64), torch.randint(10, (200,))
    model = nn.Linear(64, 10)
    given = {"sparsity": 0.5, "stages": 2, "samples": 150, "samples_per_row": 1, "held_out": 50}
    for number in range(200):
        wrong = y.clone()
        wrong[number] = 10
        # Held-out samples are looked at before the run begins, the others after that.
        with pytest.raises(InputError, match=f"label 10 of sample {number} is out of range"):
            prune(model, (x, wrong), **given, directory=tmp_path / "run")
        if (tmp_path / "run").exists():
            break
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    prune(model, (x, y), **given, directory=tmp_path / "run")


def test_files_may_be_read_as_the_user_has_set_it(tmp_path):
    before = os.umask(0o022)
    try:
        RunDirectory(tmp_path).write_result({})
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o644


def files_below(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "failure", [InputError("bad data"), RuntimeError("bad model"), KeyboardInterrupt()]
)
def test_a_run_is_replaced_by_one_that_has_saved_a_step(finished, tmp_path, monkeypatch, failure):
    """Not by one that fails before, be it after another that was killed."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "stages" / "notes.txt").write_text("the user's own")
    before = files_below(tmp_path)

    def fails(error):
        def stage(*_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("swap_prune.run.Run._checked_stage", stage)
            with pytest.raises(type(error)):
                run(RunDirectory(tmp_path, overwrite=True), sparsity=0.8)

    fails(failure)
    fails(InputError("bad data"))
    assert files_below(tmp_path) == before
    run(RunDirectory(tmp_path, overwrite=True), sparsity=0.8, stages=2, fine_tuning=None)
    after = files_below(tmp_path)
    assert not [path for path in after if path.parts[0] == ".replaced" or "0003" in path.name]
    assert after[Path("stages/notes.txt")] == b"the user's own"
    assert after[Path("model.safetensors")] != before[Path("model.safetensors")]


class Centred(nn.Module):
    """A running mean that the state dict leaves out, and a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.inner = models.pretrained("digits")
        self.register_buffer("mean", torch.zeros(1, 8, 8), persistent=False)

    def forward(self, images):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * images.mean(0).detach()
        return self.inner(images - self.mean)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


def test_what_the_state_dict_leaves_out_is_kept_too(tmp_path, monkeypatch):
    expected = prune(Centred(), data.load("digits").train, **SETTINGS)
    assert expected.model.mean.abs().max() > 0
    save_step = RunDirectory.save_step

    def stop_after(directory, step):
        save_step(directory, step)
        if step.number in (2, 5):
            raise KeyboardInterrupt

    for interrupted in (True, True, False):
        with monkeypatch.context() as patch:
            if interrupted:
                patch.setattr(RunDirectory, "save_step", stop_after)
            try:
                result = prune(Centred(), data.load("digits").train, directory=tmp_path, **SETTINGS)
            except KeyboardInterrupt:
                assert interrupted
    assert torch.equal(result.model.mean, expected.model.mean)
    for name, value in expected.model.named_parameters():
        assert torch.equal(value, result.model.get_parameter(name)), name
    models.load_weights(Centred(), tmp_path / "model.safetensors")
    given = Centred()
    prune(given, data.load("digits").train, in_place=True, **SETTINGS)
    assert torch.equal(given.mean, expected.model.mean)


def test_other_training_data_are_refused(tmp_path):
    inputs, labels = data.load("digits").train[:]
    run(tmp_path, training_data=(inputs, labels))
    with pytest.raises(InputError, match="training_targets_sha256"):
        run(tmp_path, training_data=(inputs, labels.flip(0)))


def test_what_a_run_did_not_write_stays(tmp_path):
    """Files named much like those of a run, when it fails in its first stage."""
    own = {"recipe.yaml", "stages/1-photo.png", "stages/2024.csv", "stages/2024.notes.safetensors"}
    (tmp_path / "stages").mkdir()
    for name in own:
        (tmp_path / name).write_text("the user's own")
    x, settings = torch.randn(40, 6), {"sparsity": 0.5, "samples": 38, "held_out": 2}
    x[5] = torch.nan
    with pytest.raises(InputError):
        prune(nn.Linear(6, 3), (x, torch.zeros(40).long()), directory=tmp_path, **settings)
    assert {str(path) for path in files_below(tmp_path)} == own | {".lock"}


def test_a_recipe_that_was_there_stays_as_it_is_written(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# mine")
    directory = RunDirectory(tmp_path, recipe="method: ewr")
    directory.configure({})
    directory.clear()
    assert (tmp_path / "recipe.yaml").read_text() == "# mine"
    (tmp_path / "recipe.yaml").unlink()
    directory.configure({})
    assert (tmp_path / "recipe.yaml").read_text() == "method: ewr"
    directory.clear()
    assert not (tmp_path / "recipe.yaml").exists()


def test_other_training_inputs_and_other_test_data_are_refused(tmp_path):
    inputs, labels = data.load("digits").train[:]
    given = {"training_data": (inputs, labels), "test_data": (inputs[:50], labels[:50])}
    run(tmp_path, **given)
    run(tmp_path, **given)
    with pytest.raises(InputError, match="training_inputs_sha256"):
        run(tmp_path, **given | {"training_data": (2 * inputs, labels)})
    with pytest.raises(InputError, match="test_inputs_sha256"):
        run(tmp_path, **given | {"test_data": (inputs[50:100], labels[:50])})


def test_steps_without_a_configuration_are_not_continued(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for name in ("configuration.json", "model.safetensors"):
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match=r"already has a run \(stages\); give another directory"):
        run(tmp_path, sparsity=0.5)
    result = run(RunDirectory(tmp_path, overwrite=True), sparsity=0.5)
    assert result.sparsity == pytest.approx(0.5, abs=1e-3)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; give a directory"):
        run(tmp_path / "file")
