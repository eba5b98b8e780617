import json
import math
import re
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swap_prune import InputError, data, models, prune
from swap_prune.calibration import Batch
from swap_prune.evaluation import cross_entropy
from swap_prune.gradients import GradientOperator, gradient_rows
from swap_prune.noise import (
    MOST_ITERATIONS,
    NOISES,
    TOLERANCE,
    AdversarialRows,
    AnalogNoise,
    EntryNoise,
    InputNoise,
    LabelNoise,
    Noise,
    Reached,
    RowNoise,
    Rows,
    add_input_noise,
    build,
)
from swap_prune.prunable import select_weights

FRACTIONS = st.floats(0, 1)
LEVELS = st.floats(0.25, 4)
SEEDS = st.integers(0, 10_000)
SIZES = st.integers(1, 30)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def calibrated(fraction: float, deviation: float) -> InputNoise:
    return InputNoise(fraction, 1.0, Reached(deviation, 1.0, 2.0, 1))


def noisy_rows(noise: Noise, matrix: Tensor, seed: int) -> Tensor:
    changed = matrix.clone()
    noise.rows(changed, seeded(seed))
    return changed


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 4))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def images(n: int = 40) -> Batch:
    return normal(n, 3, 4, 4), torch.randint(4, (n,), generator=seeded())


def rows_of(model: nn.Module, samples_per_row: int = 1) -> Rows:
    weights = select_weights(model)
    buffer: list[Tensor] = []

    def rows(batch: Batch) -> GradientOperator:
        if not buffer:
            buffer.append(torch.empty(len(batch[1]) // samples_per_row, weights.size))
        return gradient_rows(model, weights, *batch, cross_entropy, samples_per_row, out=buffer[0])

    return rows


def scaled_rows(factor) -> Rows:
    """Rows whose standard deviation is a function of that of the inputs' noise."""
    clean = images()[0]
    return lambda batch: normal(8, 16) * factor(float((batch[0] - clean).std()))


# --- every noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISES)
def test_a_noise_acts_on_its_own_part_alone(kind):
    noise = build(kind, None if kind == "analog" else 0.5, None if kind == "labels" else 1.0)
    model = perceptron()
    weights = select_weights(model)
    batch, matrix, before = images(), normal(6, 9), weights.read(model)
    noise = noise.calibrate(batch, rows_of(model), seeded())
    inputs, labels = noise.samples(batch, seeded())
    changed = noisy_rows(noise, matrix, 0)
    with noise.weights(model, weights, seeded()):
        inside = weights.read(model)
    acted = {
        "inputs": not torch.equal(inputs, batch[0]),
        "labels": not torch.equal(labels, batch[1]),
        "weights": not torch.equal(inside, before),
        "rows": not torch.equal(changed, matrix),
    }
    part = {"input": "inputs", "labels": "labels", "analog": "weights"}.get(kind, "rows")
    assert [name for name, did in acted.items() if did] == [part]


@pytest.mark.parametrize("kind", NOISES)
def test_a_description_is_json_and_builds_the_noise_again(kind):
    noise = build(kind, None if kind == "analog" else 0.25, None if kind == "labels" else 2)
    described = json.loads(json.dumps(noise.describe()))
    assert described["kind"] == kind
    assert build(kind, described.get("fraction"), described.get("level")) == noise
    with pytest.raises(FrozenInstanceError):
        noise.level = 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("static", 0.1, 1), r"noise kind='static' is unknown; accepted are input, gradient-ent"),
        ((["input"], 0.1, 1), r"noise kind=\['input'\] is unknown"),
        (("input", 1.5, 1), r"noise fraction=1.5 must be a number in \[0, 1\]"),
        (("labels", -0.1), r"noise fraction=-0.1 must be"),
        (("gradient-rows", math.nan, 1), r"noise fraction=nan must be"),
        (("gradient-rows", True, 1), r"noise fraction=True must be"),
        (
            ("gradient-entries", None, 1),
            r"noise fraction is missing; kind='gradient-entries' takes a number in \[0, 1\]",
        ),
        (
            ("adversarial", 0.1),
            r"noise level is missing; kind='adversarial' takes a finite number of at least 0",
        ),
        (("adversarial", 0.1, -1), r"noise level=-1 must be"),
        (("input", 0.1, math.inf), r"noise level=inf must be"),
        (("analog", None, "1"), r"noise level='1' must be"),
        (("analog", 0.1, 1), r"fraction=0.1 has no part in kind='analog', which takes only a lev"),
        (("labels", 0.1, 1), r"level=1 has no part in kind='labels', which takes only a fraction;"),
    ],
)
def test_noise_that_can_not_be(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        build(*arguments)


def test_checks_hold_without_build():
    with pytest.raises(InputError, match=r"noise fraction=2 must be"):
        RowNoise(2, 1)


# --- samples -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(n=SIZES, fraction=FRACTIONS, deviation=LEVELS, seed=SEEDS)
def test_input_noise_touches_its_fraction_of_the_samples(n, fraction, deviation, seed):
    batch = normal(n, 3, 2), torch.arange(n)
    before = batch[0].clone()
    noise = calibrated(fraction, deviation)
    inputs, targets = noise.samples(batch, seeded(seed))
    assert torch.equal(batch[0], before)
    assert torch.equal(targets, batch[1])
    assert int((inputs != before).all((1, 2)).sum()) == round(fraction * n)
    assert int((inputs == before).all((1, 2)).sum()) == n - round(fraction * n)
    assert torch.equal(noise.samples(batch, seeded(seed))[0], inputs)
    assert torch.equal(calibrated(0, deviation).samples(batch, seeded(seed))[0], before)
    assert torch.equal(calibrated(fraction, 0.0).samples(batch, seeded(seed))[0], before)


def test_input_noise_is_in_units_of_each_tensor_and_spares_integers():
    n = 400
    inputs = {
        "a": 5 * normal(n, 50),
        "b": (0.1 * normal(n, 50, seed=2)).half(),
        "tokens": torch.arange(n),
        "mask": torch.ones(n, 2),
    }
    noisy = add_input_noise(inputs, 0.5, 2.0, seeded())
    for name, deviation in (("a", 10), ("b", 0.2)):
        difference = (noisy[name] - inputs[name]).double()
        touched = difference[difference.abs().sum(1) > 0]
        assert len(touched) == 200
        assert float(touched.std()) == pytest.approx(deviation, rel=0.03)
        assert noisy[name].dtype == inputs[name].dtype
    assert torch.equal(noisy["tokens"], inputs["tokens"])
    assert torch.equal(noisy["mask"], inputs["mask"])


@settings(max_examples=40, deadline=None)
@given(
    n=SIZES,
    fraction=FRACTIONS,
    classes=st.integers(2, 200),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
    seed=SEEDS,
)
def test_label_noise_replaces_its_fraction_by_other_classes(n, fraction, classes, dtype, seed):
    labels = torch.randint(classes, (n,), generator=seeded()).to(dtype)
    inputs, before = normal(n, 2), labels.clone()
    noise = LabelNoise(fraction)
    same, changed = noise.samples((inputs, labels), seeded(seed), classes)
    assert same is inputs
    assert torch.equal(labels, before)
    assert changed.dtype == dtype
    assert int((changed != labels).sum()) == round(fraction * n)
    assert 0 <= changed.min() <= changed.max() < classes
    assert torch.equal(noise.samples((inputs, labels), seeded(seed), classes)[1], changed)


def test_the_other_classes_are_equally_likely():
    labels = torch.arange(4).repeat_interleave(6000)
    _, changed = LabelNoise(1.0).samples((None, labels), seeded())
    counts = torch.zeros(4, 4).index_put_((labels, changed), torch.ones(24_000), accumulate=True)
    torch.testing.assert_close(counts, 2000.0 * (1 - torch.eye(4)), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("labels", "classes", "sentence"),
    [
        (torch.randn(4), None, r"needs integer labels; the targets are torch.float32"),
        ({"y": torch.zeros(4).long()}, None, r"needs integer labels; the targets are dict"),
        (torch.zeros(4).long(), None, r"two classes or more.* 0 to 0, of 1 classes"),
        (torch.tensor([-100, 1]), None, r"the labels are -100 to 1, of 2 classes"),
        (torch.tensor([0, 5]), 5, r"the labels are 0 to 5, of 5 classes"),
    ],
)
def test_labels_that_can_not_be_replaced(labels, classes, sentence):
    with pytest.raises(InputError, match=sentence):
        LabelNoise(0.5).samples((None, labels), seeded(), classes)


# --- the calibration of input noise --------------------------------------------------------------


@pytest.mark.parametrize("build_model", [perceptron, convnet])
@pytest.mark.parametrize(
    ("fraction", "level", "samples_per_row"), [(0.25, 1, 1), (0.1, 2, 1), (1, 0.05, 1), (0.5, 1, 4)]
)
def test_calibration_reaches_the_level(build_model, fraction, level, samples_per_row):
    rows, batch, generator = rows_of(build_model(), samples_per_row), images(), seeded(3)
    before = batch[0].clone()
    clean = float(rows(batch).rows().std(correction=0))
    noise = InputNoise(fraction, level).calibrate(batch, rows, generator)
    reached = noise.reached
    assert reached.sigma_clean == clean
    assert 1 <= reached.iterations <= MOST_ITERATIONS
    assert abs(reached.sigma_reached / clean - 1 - level) <= TOLERANCE * level
    # What was measured is what the next draw gives.
    noisy = noise.samples(batch, generator)
    assert float(rows(noisy).rows().std(correction=0)) == reached.sigma_reached
    assert torch.equal(batch[0], before)
    assert noise == InputNoise(fraction, level).calibrate(batch, rows, seeded(3))
    assert noise.describe()["reached"]["deviation"] == reached.deviation > 0


@pytest.mark.parametrize(("fraction", "level"), [(0, 1), (0.5, 0)])
def test_nothing_to_calibrate(fraction, level):
    noise = InputNoise(fraction, level).calibrate(images(), rows_of(perceptron()), seeded())
    assert (noise.reached.deviation, noise.reached.iterations) == (0, 0)
    assert noise.reached.sigma_clean == noise.reached.sigma_reached > 0
    assert torch.equal(noise.samples(images(), seeded())[0], images()[0])


@settings(max_examples=30, deadline=None)
@given(level=st.floats(0.01, 20), rate=st.floats(0.2, 50), power=st.floats(1, 3))
def test_calibration_finds_the_level_of_any_growing_function(level, rate, power):
    rows = scaled_rows(lambda deviation: 1 + (rate * deviation) ** power)
    reached = InputNoise(1.0, level).calibrate(images(), rows, seeded()).reached
    assert reached.sigma_reached == pytest.approx(
        (1 + level) * reached.sigma_clean, abs=TOLERANCE * level * reached.sigma_clean
    )


class Deaf(nn.Module):
    """Its output does not depend on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.ones_like(x.flatten(1)))


class Saturating(nn.Module):
    """What it sees of its inputs is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(0.3 * x.flatten(1)))


@pytest.mark.parametrize("build_model", [Deaf, Saturating])
def test_a_level_out_of_reach_tells_the_largest(build_model):
    torch.manual_seed(0)
    rows, batch = rows_of(build_model()), images()
    with pytest.raises(InputError, match=r"noise level=50 can't be reached") as caught:
        InputNoise(0.5, 50).calibrate(batch, rows, seeded())
    largest = float(re.search(r"largest below it is ([\d.e+-]+),", str(caught.value))[1])
    if build_model is Deaf:
        assert largest == 0
    else:
        assert 0.5 < largest < 5
        InputNoise(0.5, 0.9 * largest).calibrate(batch, rows, seeded())


def test_a_level_just_out_of_reach_is_not_taken_for_reached():
    bounded = scaled_rows(lambda deviation: 1 + min(deviation, 0.95))
    with pytest.raises(InputError, match=r"level=1 can't be reached: the largest below it is 0.95"):
        InputNoise(1.0, 1).calibrate(images(), bounded, seeded())


def test_gradients_that_jump_over_the_level():
    jump = scaled_rows(lambda deviation: 1 + 0.4 * min(deviation, 1) + 20 * (deviation > 1))
    with pytest.raises(InputError, match=r"level=3 can't be reached: the largest below it is 0.4,"):
        InputNoise(1.0, 3).calibrate(images(), jump, seeded())
    # A small jump is no reason to stop: what was reached is in the report.
    small = scaled_rows(lambda deviation: 1 + deviation + 0.2 * (deviation > 1))
    reached = InputNoise(1.0, 1.1).calibrate(images(), small, seeded()).reached
    assert reached.iterations == MOST_ITERATIONS
    assert 1.9 < reached.sigma_reached / reached.sigma_clean < 2.3


def test_noise_that_makes_a_loss_infinite_is_too_strong():
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.exp(x.flatten(1) ** 3))

    torch.manual_seed(0)
    inputs, labels = images()
    noise = InputNoise(0.25, 1e6).calibrate(
        (0.1 * inputs, labels), rows_of(Exponential()), seeded()
    )
    assert noise.reached.sigma_reached / noise.reached.sigma_clean == pytest.approx(1e6, rel=0.2)

    def fails(batch: Batch) -> Tensor:
        if not torch.equal(batch[0], inputs):
            raise InputError("the loss of sample 3 is inf")
        return normal(4, 4)

    with pytest.raises(InputError, match=r"level=1 can't be reached: the largest below it is 0,"):
        InputNoise(0.25, 1).calibrate((inputs, labels), fails, seeded())


def test_input_noise_without_a_measure():
    batch = images()
    with pytest.raises(InputError, match=r"no deviation yet; call calibrate first"):
        InputNoise(0.5, 1).samples(batch, seeded())
    with pytest.raises(InputError, match=r"level=1 can't be reached: .* they all vanish"):
        InputNoise(0.5, 1).calibrate(batch, lambda _: torch.zeros(3, 4), seeded())
    tokens = torch.arange(4), torch.arange(4)
    with pytest.raises(InputError, match=r"needs floating-point inputs; these are torch.int64"):
        InputNoise(0.5, 1).calibrate(tokens, lambda _: torch.zeros(3, 4), seeded())


# --- rows ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), p=st.integers(2, 60), fraction=FRACTIONS, level=LEVELS, seed=SEEDS)
def test_entry_noise_touches_its_fraction_of_every_row(n, p, fraction, level, seed):
    matrix = normal(n, p)
    changed = noisy_rows(EntryNoise(fraction, level), matrix, seed)
    assert ((changed != matrix).sum(1) == round(fraction * p)).all()
    assert torch.equal(noisy_rows(EntryNoise(fraction, level), matrix, seed), changed)
    assert torch.equal(noisy_rows(EntryNoise(0, level), matrix, seed), matrix)
    assert torch.equal(noisy_rows(EntryNoise(fraction, 0), matrix, seed), matrix)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, p=st.integers(2, 20), fraction=FRACTIONS, level=LEVELS, seed=SEEDS)
def test_row_noise_touches_its_fraction_of_the_rows(n, p, fraction, level, seed):
    matrix = normal(n, p)
    changed = noisy_rows(RowNoise(fraction, level), matrix, seed)
    assert int((changed != matrix).all(1).sum()) == round(fraction * n)
    assert int((changed == matrix).all(1).sum()) == n - round(fraction * n)
    assert torch.equal(noisy_rows(RowNoise(fraction, level), matrix, seed), changed)
    assert torch.equal(noisy_rows(RowNoise(0, level), matrix, seed), matrix)
    assert torch.equal(noisy_rows(RowNoise(fraction, 0), matrix, seed), matrix)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, fraction=FRACTIONS, level=LEVELS, seed=SEEDS)
def test_adversarial_rows_are_flipped_and_scaled(n, fraction, level, seed):
    matrix = normal(n, 5)
    changed = noisy_rows(AdversarialRows(fraction, level), matrix, seed)
    touched = (changed != matrix).any(1)
    assert int(touched.sum()) == round(fraction * n)
    assert torch.equal(changed[touched], -level * matrix[touched])
    assert torch.equal(noisy_rows(AdversarialRows(fraction, level), matrix, seed), changed)
    assert torch.equal(noisy_rows(AdversarialRows(0, level), matrix, seed), matrix)


def test_entry_noise_is_in_units_of_each_row():
    scales = torch.tensor([0.01, 1.0, 30.0, 0.0])
    matrix = scales[:, None] * normal(4, 40_000) + 2
    difference = noisy_rows(EntryNoise(0.5, 3.0), matrix, 0) - matrix
    for row, scale in zip(difference[:3].double(), scales.tolist(), strict=False):
        assert float(row[row != 0].std()) == pytest.approx(3 * scale, rel=0.03)
        assert abs(float(row.mean())) < 0.05 * scale
    assert not difference[3].any()


def test_row_noise_is_in_units_of_the_whole_matrix():
    matrix = torch.tensor([0.0, 1e-6, 1.0, 9.0])[:, None] * normal(4, 10_000)
    sigma = float(matrix.std())
    difference = noisy_rows(RowNoise(1.0, 2.0), matrix, 0) - matrix
    for row in difference:
        assert float(row.std()) == pytest.approx(2 * sigma, rel=0.04)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_analog_noise_ends_with_its_context(dtype):
    model = convnet().to(dtype).to(memory_format=torch.channels_last)
    model[0].weight.data[0] = 0
    weights = select_weights(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inside = []

    def fail_inside() -> None:
        with AnalogNoise(0.1).weights(model, weights, seeded()):
            inside.append({key: value.clone() for key, value in model.state_dict().items()})
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fail_inside()
        assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
        assert all(parameter.requires_grad for parameter in model.parameters())
    for key, value in inside[0].items():
        assert torch.equal(inside[1][key], value)
        assert torch.equal(value, before[key]) == (key not in weights.names)
    assert not inside[0]["0.weight"][0].any()
    with AnalogNoise(0).weights(model, weights, seeded()):
        assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_analog_noise_is_in_units_of_each_weight():
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    weights = select_weights(model)
    before = weights.read(model)
    with AnalogNoise(0.3).weights(model, weights, seeded()):
        factors = weights.read(model) / before
    assert float(factors.mean()) == pytest.approx(1, abs=0.01)
    assert float(factors.std()) == pytest.approx(0.3, rel=0.02)


# --- in a run -----------------------------------------------------------------------------------

KINDS = [
    {"kind": "input", "fraction": 0.5, "level": 0.5},
    {"kind": "gradient-entries", "fraction": 0.5, "level": 1.0},
    {"kind": "gradient-rows", "fraction": 0.5, "level": 1.0},
    {"kind": "labels", "fraction": 0.5},
    {"kind": "analog", "level": 0.3},
    {"kind": "adversarial", "fraction": 0.25, "level": 2.0},
]
RUN = {"sparsity": 0.8, "method": "lr", "stages": 2, "samples": 40, "samples_per_row": 2, "seed": 1}


def prune_digits(**changes):
    calibration = data.load("digits").train[:400]
    return prune(models.pretrained("digits"), calibration, **{**RUN, **changes})


@pytest.fixture(scope="module")
def clean():
    return prune_digits()


@pytest.mark.parametrize("noise", KINDS, ids=lambda noise: noise["kind"])
def test_every_noise_reaches_the_result_and_is_seeded(clean, noise):
    noisy, again = prune_digits(noise=noise), prune_digits(noise=[noise])
    weights = [result.model.state_dict() for result in (clean, noisy, again)]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    (told,) = noisy.history[0]["noise"]
    assert told["kind"] == noise["kind"]
    if noise["kind"] == "input":
        reached = told["reached"]
        assert reached["sigma_reached"] == pytest.approx(1.5 * reached["sigma_clean"], rel=0.05)


def test_noisy_runs_resume_to_the_same_result(tmp_path):
    noise = [KINDS[0], KINDS[3], KINDS[5]]
    expected = prune_digits(noise=noise, directory=tmp_path)
    for path in (tmp_path / "stages").glob("0002*"):
        path.unlink()
    found = prune_digits(noise=noise, directory=tmp_path)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name])


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("labels", "noise is of type str"),
        ({"fraction": 0.5}, "must have a kind"),
        ({"kind": "labels", "strength": 1}, "must have a kind"),
        ({"kind": "hum"}, "noise kind='hum' is unknown; accepted are input"),
        ({"kind": "labels", "fraction": 1.5}, "noise fraction=1.5 must be"),
    ],
)
def test_noise_that_is_none(noise, message):
    with pytest.raises(InputError, match=message):
        prune_digits(noise=noise)
