import copy
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from swap_prune import DivergedError, InputError, prune
from swap_prune.calibration import Samples
from swap_prune.evaluation import cross_entropy
from swap_prune.training import (
    PRESETS,
    FineTuning,
    Period,
    check,
    crop_flip,
    resolve,
    soft_label_distance,
)

SETTINGS = FineTuning(batch_size=16, learning_rate=0.05)


class ConvNet(nn.Module):
    """Convolutions, BatchNorm and dropout on images (samples, 3, 8, 8)."""

    def __init__(self, views: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8 * 16, 3)
        self.views = views

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(images))))
        flat = hidden.view(len(hidden), -1) if self.views else hidden.flatten(1)
        return self.last(self.dropout(torch.relu(flat)))


def images(n: int = 65) -> Samples:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    return Samples(TensorDataset(x, x.mean((2, 3)).argmax(1)))


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )


def convnet(views: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(views)


def pruned(model: nn.Module, density: float = 0.5) -> dict[str, Tensor]:
    """Prune every weight matrix of `model` at random; the masks."""
    masks = {
        name: torch.rand(weight.shape) < density
        for name, weight in model.named_parameters()
        if weight.ndim > 1
    }
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    return masks


def period(model: nn.Module, masks: dict[str, Tensor], **changes) -> Period:
    given = {
        "teacher": None,
        "loss": cross_entropy,
        "samples": images(),
        "settings": SETTINGS,
        "epochs": 3,
        "seed": 1,
        "period": 2,
    } | changes
    given.setdefault("indices", torch.arange(len(given["samples"])))
    return Period(model, masks, **given)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("build", [convnet, perceptron])
def test_an_interruption_between_epochs_changes_no_bit(build, optimizer, precision):
    wanted = replace(
        SETTINGS,
        optimizer=optimizer,
        augmentation="crop-flip",
        distillation=0.3,
        precision=precision,
    )
    straight, teacher = build(), build()
    masks = pruned(straight)
    stopped = copy.deepcopy(straight)

    whole = period(straight, masks, settings=wanted, teacher=teacher)
    losses = [whole.run_epoch(epoch) for epoch in range(3)]

    first = period(stopped, masks, settings=wanted, teacher=teacher)
    first.run_epoch(0)
    tensors, values = first.state()
    saved = save(tensors), save(stopped.state_dict()), json.dumps(values)
    resumed = build()
    resumed.load_state_dict(load(saved[1]))
    torch.rand(7)  # the caller's random numbers have no part in it
    second = period(resumed, masks, settings=wanted, teacher=teacher)
    second.restore(load(saved[0]), json.loads(saved[2]))
    assert [second.run_epoch(epoch) for epoch in (1, 2)] == losses[1:]
    assert_equal(resumed, straight)
    for key, tensor in whole.state()[0].items():
        assert torch.equal(second.state()[0][key], tensor)


def test_bfloat16_is_for_the_passes_of_both_models_and_for_nothing_else():
    model, teacher = convnet(), convnet()
    masks = pruned(model)
    exact = copy.deepcopy(model)
    seen, judged = [], []
    for watched in (model, teacher):
        first = next(module for module in watched.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        judged.append(output.dtype)
        return cross_entropy(output, targets)

    rounded = replace(SETTINGS, distillation=0.3, precision="bfloat16")
    training = period(model, masks, settings=rounded, teacher=teacher, loss=loss)
    seen.clear()  # of finding out which memory format is fastest
    value = training.run_epoch(0)
    assert set(seen) == {torch.bfloat16}
    full = period(exact, masks, settings=replace(rounded, precision="float32"), teacher=teacher)
    assert value == pytest.approx(full.run_epoch(0), rel=0.01)
    assert set(judged) == {torch.float32}
    assert all(tensor.dtype == torch.float32 for tensor in training.state()[0].values())
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        difference = (weight - exact.get_parameter(name)).norm() / weight.norm()
        assert difference < 0.05, name
        if name in masks:
            assert not weight[~masks[name]].any()


@settings(max_examples=10, deadline=None)
@given(
    optimizer=st.sampled_from(["sgd", "adam"]),
    learning_rate_schedule=st.sampled_from(["cosine", "constant"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    density=st.sampled_from([0.3, 1.0]),
    mode=st.booleans(),
)
def test_pruned_weights_stay_zero_and_the_model_plain(
    optimizer, learning_rate_schedule, weight_decay, density, mode
):
    model = convnet().train(mode)
    model.norm.train(not mode)
    masks, before = pruned(model, density), values_of(model)
    wanted = replace(
        SETTINGS,
        optimizer=optimizer,
        learning_rate_schedule=learning_rate_schedule,
        weight_decay=weight_decay,
    )
    training = period(model, masks, settings=wanted)
    state = torch.get_rng_state()
    for epoch in range(2):
        training.run_epoch(epoch)
        assert list(model.state_dict()) == list(before)
        for name, mask in masks.items():
            weight = model.get_parameter(name)
            assert weight.is_contiguous()
            assert weight.grad is None
            assert not weight[~mask].any()
            assert (weight[mask] != before[name][mask]).float().mean() > 0.8
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.norm.training) == (mode, not mode)
    for name in ("norm.running_mean", "norm.running_var", "norm.weight", "last.bias"):
        assert not torch.equal(model.state_dict()[name], before[name])


def test_epochs_lower_the_loss_and_another_seed_or_period_orders_them_otherwise():
    start = perceptron()
    masks = pruned(start)
    results = []
    for changes in ({}, {}, {"seed": 5}, {"period": 5}):
        model = copy.deepcopy(start)
        training = period(model, masks, **changes)
        losses = [training.run_epoch(epoch) for epoch in range(3)]
        assert losses[2] < 0.8 * losses[0]
        results.append(model[1].weight.detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


def test_frozen_parameters_stay_as_they_are():
    model = convnet()
    masks = pruned(model)
    frozen = {"first.weight", "norm.bias", "last.bias"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    before = values_of(model)
    period(model, masks).run_epoch(0)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in frozen)
        assert torch.equal(parameter, before[name]) == (name in frozen)


def test_a_model_that_views_its_features_trains_like_one_that_flattens_them():
    flattening, viewing = convnet(), convnet(views=True)
    masks = pruned(flattening)
    viewing.load_state_dict(flattening.state_dict())
    trainings = period(flattening, masks), period(viewing, masks)
    assert trainings[0].memory_format == torch.channels_last
    assert trainings[1].memory_format == torch.contiguous_format
    for training in trainings:
        training.run_epoch(0)
    for key, value in flattening.state_dict().items():
        torch.testing.assert_close(viewing.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def test_every_sample_is_seen_once_and_none_alone():
    model = perceptron()
    sizes: list[int] = []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    seen: list[int] = []
    period(model, {}).run_epoch(0, seen.append)  # 65 samples in batches of 16
    assert sizes == seen == [16, 16, 16, 17]


def test_only_the_samples_at_indices_are_trained_on():
    torch.manual_seed(0)
    model, read = perceptron(), []
    samples = images()
    training = period(model, {}, samples=samples, indices=torch.arange(10, 50))
    whole = samples.read
    samples.read = lambda indices: read.extend(indices.tolist()) or whole(indices)
    training.run_epoch(0)
    assert sorted(read) == list(range(10, 50))


def test_inputs_may_be_dicts():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(a + b)[:, 0]

    torch.manual_seed(0)
    a, b = torch.randn(2, 40, 4)
    data = Samples(({"a": a, "b": b}, (a + b).sum(1)))
    training = period(Sum(), {}, samples=data, loss=nn.functional.mse_loss)
    losses = [training.run_epoch(epoch) for epoch in range(2)]
    assert losses[1] < losses[0]


def test_cosine_falls_from_the_learning_rate_and_starts_anew_with_a_period():
    cosine = period(perceptron(), {})
    rates = [cosine._learning_rate(step) for step in range(cosine.total_steps)]
    assert rates[0] == 0.05
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.01 * 0.05 * 3
    assert rates[6] == pytest.approx(0.025)
    constant = period(
        perceptron(), {}, settings=replace(SETTINGS, learning_rate_schedule="constant")
    )
    assert {constant._learning_rate(step) for step in range(12)} == {0.05}


@settings(max_examples=20, deadline=None)
@given(temperature=st.floats(0.5, 20), seed=st.integers(0, 100))
def test_distillation_gradient(temperature, seed):
    torch.manual_seed(seed)
    student = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(4, 5, dtype=torch.float64)
    distance = soft_label_distance(student, teacher, temperature)
    p, q = (logits.div(temperature).softmax(1) for logits in (teacher, student))
    torch.testing.assert_close(distance, temperature**2 * (p * (p / q).log()).sum(1).mean())
    (gradient,) = torch.autograd.grad(distance, student)
    torch.testing.assert_close(gradient, (temperature * (q - p) / 4).detach())


def test_distillation_alone_brings_the_student_to_the_teacher():
    teacher = perceptron(3).train()
    before = values_of(teacher)
    student = copy.deepcopy(teacher)
    masks = pruned(student, 0.9)
    wanted = replace(SETTINGS, distillation=1.0)
    training = period(student, masks, teacher=teacher, settings=wanted, epochs=20)
    losses = [training.run_epoch(epoch) for epoch in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert teacher.training
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(teacher.state_dict()[key], value) for key, value in before.items())


def test_soft_labels_of_crops_are_those_of_an_image_and_its_mirror():
    teacher = convnet()
    inputs, _ = images(6).read(torch.arange(6))
    for augmentation, mirrored in (("none", False), ("crop-flip", True)):
        wanted = replace(SETTINGS, distillation=0.5, augmentation=augmentation)
        student = copy.deepcopy(teacher)
        training = period(student, pruned(student), teacher=teacher, settings=wanted)
        soft = training._soft_labels(inputs)
        other = training._soft_labels(inputs.flip(3))
        assert torch.allclose(soft, other, atol=1e-6) is mirrored
        with torch.no_grad():
            plain = [teacher.eval()(x) for x in (inputs, inputs.flip(3))]
        torch.testing.assert_close(soft, sum(plain) / 2 if mirrored else plain[0])


def test_sharpness_takes_the_gradient_uphill_and_statistics_where_the_model_is():
    model = perceptron()
    masks = pruned(model)
    reference = copy.deepcopy(model).train()
    wanted = replace(
        SETTINGS, batch_size=65, sharpness=0.3, momentum=0.0, weight_decay=0.0,
        learning_rate_schedule="constant",
    )  # fmt: skip
    training = period(model, masks, settings=wanted, epochs=3)
    training.run_epoch(2)  # the last of three steps, one an epoch

    # The order of a single batch does not matter but for rounding.
    inputs, targets = images().read(torch.arange(65))
    parameters = dict(reference.named_parameters())

    def gradients() -> list[Tensor]:
        value = cross_entropy(reference(inputs), targets)
        found = torch.autograd.grad(value, list(parameters.values()))
        return [g * masks.get(n, 1) for n, g in zip(parameters, found, strict=True)]

    first = gradients()
    statistics = [buffer.clone() for buffer in reference.buffers()]
    norm = torch.sqrt(sum(g.square().sum() for g in first))
    before = [parameter.detach().clone() for parameter in parameters.values()]
    with torch.no_grad():
        for parameter, g in zip(parameters.values(), first, strict=True):
            parameter += 0.3 * g / norm
    for name, start, g in zip(parameters, before, gradients(), strict=True):
        torch.testing.assert_close(model.get_parameter(name).data, start - 0.05 * g)
    for buffer, expected in zip(model.buffers(), statistics, strict=True):
        torch.testing.assert_close(buffer, expected)


def test_sharpness_counts_in_the_last_third():
    model, calls = perceptron(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    wanted = replace(SETTINGS, batch_size=22, sharpness=0.1)  # three steps an epoch
    training = period(model, pruned(model), settings=wanted, epochs=3)
    passes = []
    for epoch in range(3):
        calls.clear()
        training.run_epoch(epoch)
        passes.append(len(calls))
    assert passes == [3, 3, 6]


def test_a_rehearsal_takes_the_sharp_step_too():
    model, calls = perceptron(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    for sharpness, passes in ((0.0, 1), (0.1, 2)):
        calls.clear()
        wanted = replace(SETTINGS, sharpness=sharpness)
        period(model, pruned(model), settings=wanted).rehearse()
        assert len(calls) == passes


def test_sharpness_takes_sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(self.table(images[:, 0, 0, 0].long().clamp(0, 4)))

    wanted = replace(SETTINGS, momentum=0.0, weight_decay=0.0, sharpness=0.1)
    period(Sparse(), {}, settings=wanted, epochs=1).run_epoch(0)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 5),
    channels=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 100),
)
def test_crop_flip_shifts_and_flips(n, channels, height, width, seed):
    given_images = torch.randn(n, channels, height, width)
    torch.manual_seed(seed)
    changed = crop_flip(given_images)
    torch.manual_seed(seed)
    assert torch.equal(crop_flip(given_images), changed)
    assert changed.shape == given_images.shape
    darkest = given_images.amin((0, 2, 3))
    for image, result in zip(given_images, changed, strict=True):
        padded = torch.stack(
            [
                nn.functional.pad(channel, (4, 4, 4, 4), value=dark.item())
                for channel, dark in zip(image, darkest, strict=True)
            ]
        )
        crops = padded.unfold(1, height, 1).unfold(2, width, 1).permute(1, 2, 0, 3, 4)
        crops = crops.reshape(-1, channels, height, width)
        # Flipped first or shifted first: the same set of images, for shifts either way.
        candidates = torch.cat([crops, crops.flip(3)])
        assert (candidates == result).all(dim=(1, 2, 3)).any()


def test_crop_flip_does_both_by_chance():
    torch.manual_seed(0)
    image = torch.arange(1.0, 65).view(1, 1, 8, 8).expand(300, 1, 8, 8)
    changed = crop_flip(image)
    rising = (changed.diff(dim=3) == 1).any(dim=(1, 2, 3)).float().mean()
    assert 0.4 < rising < 0.6
    assert len({tuple(item.flatten().tolist()) for item in changed}) > 100


def test_authors_presets():
    mlpnet, resnet = PRESETS["authors-mlpnet"], PRESETS["authors-resnet20"]
    for preset, momentum, decay in ((mlpnet, 0.5, 0.0), (resnet, 0.9, 1e-4)):
        assert (preset.learning_rate, preset.batch_size, preset.learning_rate_schedule) == (
            0.001,
            64,
            "constant",
        )
        assert (preset.epochs_per_stage, preset.epochs_after) == (1, 0)
        assert (preset.optimizer, preset.momentum, preset.weight_decay) == ("sgd", momentum, decay)
    assert (mlpnet.augmentation, resnet.augmentation) == ("none", "crop-flip")
    for preset in PRESETS.values():
        check(preset)


def test_settings_are_named_listed_or_built():
    assert resolve(None) is None
    assert resolve("default") == FineTuning() == resolve({})
    assert resolve({"preset": "authors-mlpnet", "momentum": 0}).learning_rate == 0.001
    assert resolve(asdict(SETTINGS)) == SETTINGS == resolve(SETTINGS)


@pytest.mark.parametrize(
    ("given_settings", "sentence"),
    [
        ("authors", r"preset 'authors' doesn't exist; accepted are default, authors-mlpnet"),
        ({"preset": ["default"]}, r"preset \['default'\] doesn't exist"),
        ({"epochs": 3}, r"field 'epochs' doesn't exist; accepted are preset, epochs_per_stage"),
        (3, r"fine_tuning is of type int"),
        ({"optimizer": "lbfgs"}, r"optimizer='lbfgs' is unknown; accepted are sgd, adam"),
        (
            {"learning_rate_schedule": None},
            r"learning_rate_schedule=None is unknown; accepted are cosine, constant",
        ),
        ({"augmentation": ["none"]}, r"augmentation=\['none'\] is unknown"),
        ({"precision": "float16"}, r"precision='float16' is unknown; accepted are float32, bfl"),
        ({"epochs_after": True}, r"epochs_after=True must be a whole number of at least 0"),
        ({"epochs_per_stage": -1}, r"epochs_per_stage=-1 must be"),
        ({"batch_size": 0}, r"batch_size=0 must be a whole number of at least 1"),
        ({"batch_size": 2.0}, r"batch_size=2.0 must be"),
        ({"learning_rate": 0}, r"learning_rate=0 must be a positive number"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan must be"),
        ({"learning_rate": "0.1"}, r"learning_rate='0.1' must be"),
        ({"momentum": 1.0}, r"momentum=1.0 must be a number in \[0, 1\)"),
        ({"weight_decay": float("inf")}, r"weight_decay=inf must be"),
        ({"distillation": 1.5}, r"distillation=1.5 must be a number in \[0, 1\]"),
        ({"distillation": True}, r"distillation=True must be"),
        ({"temperature": 0.0}, r"temperature=0.0 must be a positive number"),
        ({"sharpness": -0.1}, r"sharpness=-0.1 must be a number of at least 0"),
    ],
)
def test_settings_that_no_training_can_use(given_settings, sentence):
    with pytest.raises(InputError, match=sentence):
        resolve(given_settings)


def test_divergence_is_told_and_leaves_a_plain_model():
    model = perceptron()
    masks, keys = pruned(model), list(model.state_dict())
    wild = replace(SETTINGS, learning_rate=1e30)
    with pytest.raises(InputError, match=r"diverged in epoch 1: the loss is .*than 1e\+30 is need"):
        period(model, masks, settings=wild).run_epoch(0)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": replace(SETTINGS, distillation=0.5)}, r"distillation=0.5 needs a dense"),
        (
            {"samples": images(1)},
            r"trained on a batch of 1 samples of calibration: ValueError: Exp",
        ),
        (
            {"samples": Samples((torch.randn(4, 192), torch.tensor([0, 1, 2, 3])))},
            r"label 3 of sample 3 is out of range: the model's 3 outputs take labels 0 to 2",
        ),
        (
            {
                "samples": Samples((torch.randn(4, 192), torch.zeros(4))),
                "settings": replace(SETTINGS, augmentation="crop-flip"),
            },
            r"takes images .*; the inputs are \(4, 192\)",
        ),
    ],
)
def test_training_that_can_not_be(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        period(perceptron(), {}, **changes).run_epoch(0)


def test_distillation_needs_logits():
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, None]

    data = Samples((torch.randn(8, 4), torch.randn(8, 1, 3)))
    training = period(
        Sequences(),
        {},
        samples=data,
        teacher=Sequences(),
        loss=nn.functional.mse_loss,
        settings=replace(SETTINGS, distillation=0.5),
    )
    with pytest.raises(InputError, match=r"takes outputs \(samples, classes\) .* \(8, 1, 3\)"):
        training.run_epoch(0)


def test_nothing_to_train_and_states_of_other_trainings():
    with pytest.raises(InputError, match="nothing to train"):
        period(perceptron().requires_grad_(False), {})
    training = period(perceptron(), {})
    training.run_epoch(0)
    tensors, values = training.state()
    with pytest.raises(InputError, match="of period 2, not 3"):
        period(perceptron(), {}, period=3).restore(tensors, values)
    adam = replace(SETTINGS, optimizer="adam")
    with pytest.raises(InputError, match="of optimizer 'sgd', not 'adam'"):
        period(perceptron(), {}, settings=adam).restore(tensors, values)
    with pytest.raises(InputError, match=r"has 1.weight.momentum_buffer, which doesn't fit"):
        period(convnet(), {}).restore(tensors, values)


def test_training_that_ends_in_infinite_weights_is_divergence():
    inputs, labels = torch.randn(32, 4), torch.randint(3, (32,))
    given = {"epochs_after": 1, "batch_size": 32, "learning_rate": 1e5, "optimizer": "adam"}
    model = nn.Linear(4, 3).half()
    with pytest.raises(DivergedError, match="diverged in epoch 1: a weight is not finite"):
        prune(
            model, (inputs.half(), labels), sparsity=0.5, method="magnitude", held_out=0,
            fine_tuning={**given, "weight_decay": 0.0},
        )  # fmt: skip


def test_soft_labels_take_classes():
    inputs = torch.randn(32, 4)
    with pytest.raises(InputError, match=r"at least two classes; the model's are \(24, 1\)"):
        prune(
            nn.Linear(4, 1), (inputs, inputs[:, :1]), sparsity=0.5, loss=nn.functional.mse_loss,
            samples=8, held_out=8, fine_tuning={"distillation": 0.5, "epochs_after": 1},
        )  # fmt: skip


def test_training_needs_no_gradients_of_the_callers_and_takes_numpys_numbers():
    inputs, labels = torch.randn(32, 4, requires_grad=True), torch.randint(3, (32,))
    with torch.no_grad():
        result = prune(
            nn.Linear(4, 3), (inputs, labels), sparsity=0.5, samples=8, held_out=8, stages=2,
            fine_tuning={"epochs_after": np.int64(1), "learning_rate": np.float32(0.1)},
            noise={"kind": "labels", "fraction": np.float64(0.25)},
        )  # fmt: skip
    assert "training_loss" in result.history[-1]
    assert inputs.grad is None


def test_a_bad_label_met_in_training_is_named():
    inputs, labels = torch.randn(300, 4), torch.randint(3, (300,))
    labels[250] = 7
    with pytest.raises(InputError, match="label 7 of sample 250 is out of range"):
        prune(
            nn.Linear(4, 3), (torch.randn(32, 4), torch.randint(3, (32,))), sparsity=0.5,
            samples=8, held_out=8, stages=1, training_data=(inputs, labels),
            fine_tuning={"epochs_after": 1},
        )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_batchnorm_keeps_its_statistics(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    model[1].requires_grad_(not frozen)
    calibration = torch.randn(80, 6), torch.randint(0, 3, (80,))
    result = prune(
        model, calibration, sparsity=0.5, method="magnitude", batchnorm="never",
        fine_tuning={"epochs_after": 1, "learning_rate": 0.01},
    )  # fmt: skip
    assert torch.equal(result.model[1].running_mean, model[1].running_mean) == frozen
