import threading
from collections import UserDict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from swap_prune import (
    DivergedError,
    InputError,
    PruningWarning,
    apply_masks,
    evaluate,
    machine,
    prune,
)
from swap_prune.gradients import DenseGradients
from swap_prune.schedule import sparsities
from swap_prune.settings import METHODS


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def samples(n: int = 80, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return x, (x[:, :3] + 0.3 * x[:, 3:]).argmax(1)


def trained() -> nn.Module:
    model, (x, y) = network(), samples(400, 5)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([model[0].weight.detach().flatten(), model[2].weight.detach().flatten()])


QUICK = {"stages": 3, "samples": 20}
# EWR without what it has beyond transport.
PLAIN = {
    "memory": 0, "discount": 0.0, "contamination": 0.0, "audit": False, "screen": False,
    "reconstruction": False,
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    sparsity=st.floats(0, 0.99),
    method=st.sampled_from(METHODS),
    per_layer=st.booleans(),
    selection=st.sampled_from(["saliency", "iht"]),
)
@example(sparsity=0.75, method="lr", per_layer=True, selection="iht")
def test_sparsity_is_exact(sparsity, method, per_layer, selection):
    p = 6 * 12 + 12 * 3
    model, before = network(), weights_of(network())
    k = p - round(p * sparsity)
    result = prune(
        model,
        samples(),
        sparsity=sparsity,
        method=method,
        per_layer=per_layer,
        **({"selection": selection} if method in ("lr", "ewr") else {}),
        **QUICK,
    )
    w = weights_of(result.model)
    assert int((w != 0).sum()) == result.nonzeros == k
    assert sum(int(mask.sum()) for mask in result.masks.values()) == k
    assert torch.equal(weights_of(model), before)
    if per_layer:
        for name, size in (("0.weight", 72), ("2.weight", 36)):
            assert abs(int(result.masks[name].sum()) - k * size / p) < 1


def test_seed_fixes_the_result_and_another_seed_changes_it():
    model = trained()
    runs = [prune(model, samples(), sparsity=0.6, seed=seed, **QUICK) for seed in (3, 3, 4)]
    first, again, other = (weights_of(run.model) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_in_place_changes_the_given_model_and_nothing_else_does():
    model = trained()
    result = prune(model, samples(), sparsity=0.5, in_place=True, **QUICK)
    assert result.model is model
    assert int((weights_of(model) == 0).sum()) == 54


def test_regression_beats_magnitude_on_held_back_data():
    model, test = trained(), samples(1000, 9)
    losses = {
        method: evaluate(
            prune(model, samples(600), sparsity=0.8, method=method, stages=6).model, test
        ).loss
        for method in METHODS
    }
    assert losses["lr"] < losses["magnitude"]
    assert losses["ewr"] < losses["magnitude"]


def test_ewr_without_transport_is_lr():
    model = trained()
    lr = prune(model, samples(), sparsity=0.6, method="lr", **QUICK)
    ewr = prune(
        model, samples(), sparsity=0.6, method="ewr", mixture=0.0, epsilon=0.1, **QUICK, **PLAIN
    )
    torch.testing.assert_close(weights_of(ewr.model), weights_of(lr.model), rtol=1e-4, atol=1e-6)


READINGS = [
    (coupling, derivative, epsilon)
    for coupling, derivative in (
        ("sinkhorn", "exact"),
        ("gaussian", "exact"),
        ("gaussian-printed", "exact"),
        ("sinkhorn", "printed"),
    )
    for epsilon in (0.0, 0.1, float("inf"), "auto")
    # The printed covariance has no infinite limit: the next test is about that.
    if (coupling, epsilon) != ("gaussian-printed", float("inf"))
]


@pytest.mark.parametrize(("coupling", "derivative", "epsilon"), READINGS)
def test_every_reading_of_the_paper_runs_and_is_recorded(coupling, derivative, epsilon):
    result = prune(
        trained(),
        samples(),
        sparsity=0.5,
        coupling=coupling,
        derivative=derivative,
        epsilon=epsilon,
        **QUICK,
    )
    assert torch.isfinite(weights_of(result.model)).all()
    assert result.settings["derivative"] == derivative
    cutting = result.history[0]
    assert {"damping", "epsilon", "mixture", "first_order", "held_out_loss"} <= cutting.keys()


def test_printed_closed_form_has_no_infinite_limit():
    with pytest.raises(InputError, match="the printed form a finite one"):
        prune(
            trained(),
            samples(),
            sparsity=0.5,
            coupling="gaussian-printed",
            epsilon=float("inf"),
            **QUICK,
        )


def test_fixed_settings_need_no_held_out_samples():
    fixed = {"damping": 0.1, "first_order": 1.0, "epsilon": 0.1, "mixture": 0.5, "held_out": 0}
    result = prune(trained(), samples(20), sparsity=0.5, samples=20, stages=2, **fixed)
    assert result.settings["held_out"] == 0
    assert "held_out_loss" not in result.history[-1]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*samples(), strict=True)


class Rows(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        x, y = samples()
        return x[index], int(y[index])


@pytest.mark.parametrize(
    "source",
    [
        TensorDataset(*samples()),
        Rows(),
        DataLoader(Rows(), batch_size=7),
        DataLoader(Stream(), batch_size=7),
        Stream(),
    ],
    ids=["tensor dataset", "dataset", "loader", "stream loader", "stream"],
)
def test_every_kind_of_calibration_gives_the_same_model(source):
    model = trained()
    expected = prune(model, samples(), sparsity=0.5, **QUICK)
    result = prune(model, source, sparsity=0.5, **QUICK)
    assert torch.equal(weights_of(result.model), weights_of(expected.model))


class Scaled(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 3 * x, y


def test_what_the_user_wraps_around_the_data_is_respected():
    x, y = samples()
    poisoned = x.clone()
    poisoned[40:] = float("nan")
    data = TensorDataset(poisoned, y)
    half = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(40)))
    first = prune(trained(), half, sparsity=0.5, **QUICK)
    same = prune(trained(), (x[:40], y[:40]), sparsity=0.5, **QUICK)
    assert torch.equal(weights_of(first.model), weights_of(same.model))
    scaled = prune(trained(), Scaled(x, y), sparsity=0.5, **QUICK)
    by_hand = prune(trained(), (3 * x, y), sparsity=0.5, **QUICK)
    assert torch.equal(weights_of(scaled.model), weights_of(by_hand.model))


class Jittered(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


def test_seed_fixes_random_transforms_and_leaves_the_global_state_alone():
    state = torch.random.get_rng_state()
    runs = [prune(trained(), Jittered(*samples()), sparsity=0.5, **QUICK) for _ in range(2)]
    assert torch.equal(weights_of(runs[0].model), weights_of(runs[1].model))
    torch.random.set_rng_state(state)
    expected = torch.rand(1)
    torch.random.set_rng_state(state)
    prune(network_without_seeding, samples(), sparsity=0.5, **QUICK)
    assert torch.equal(torch.rand(1), expected)


network_without_seeding = network()


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int16])
def test_labels_of_any_integer_type(kind):
    x, y = samples()
    expected = prune(trained(), (x, y), sparsity=0.5, **QUICK)
    result = prune(trained(), (x, y.to(kind)), sparsity=0.5, **QUICK)
    assert torch.equal(weights_of(result.model), weights_of(expected.model))


def test_losses_may_be_negative():
    def shifted(output, target):
        return nn.functional.cross_entropy(output, target) - 1000

    given = {"sparsity": 0.5, "method": "lr", **QUICK}
    result = prune(trained(), samples(), loss=shifted, **given)
    plain = prune(trained(), samples(), **given)
    change = evaluate(result.model, samples()).loss - evaluate(plain.model, samples()).loss
    assert abs(change) < 0.2


def test_per_layer_budget_of_a_model_that_is_sparse_already():
    model = trained()
    with torch.no_grad():
        model[0].weight[1:] = 0.0
    for method in METHODS:
        result = prune(model, samples(), sparsity=0.5, method=method, per_layer=True, **QUICK)
        assert int(result.masks["0.weight"].sum()) == 6
        assert int(result.masks["2.weight"].sum()) == 18


@pytest.mark.parametrize("selection", ["saliency", "iht"])
@pytest.mark.parametrize("method", ["lr", "ewr"])
def test_zeros_that_the_model_had_stay(method, selection):
    model = trained()
    with torch.no_grad():
        model[0].weight[2:] = 0.0
    zeros = weights_of(model) == 0
    result = prune(model, samples(), sparsity=0.2, method=method, selection=selection, **QUICK)
    assert bool((weights_of(result.model)[zeros] == 0).all())


def test_a_single_sample_has_no_batchnorm_statistics():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    model.unused = nn.BatchNorm1d(2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    one = prune(model, samples(), sparsity=0.5, stages=2, samples=1, samples_per_row=1)
    assert torch.isfinite(one.model[1].running_var).all()


def test_lr_needs_no_numbers_for_transport():
    fixed = {"damping": 0.1, "first_order": 1.0, "held_out": 0}
    assert prune(trained(), samples(), sparsity=0.5, method="lr", **fixed, **QUICK).nonzeros == 54


def test_own_schedule_sets_the_number_of_stages():
    result = prune(trained(), samples(), sparsity=0.5, schedule=[0.2, 0.5], samples=20)
    assert [round(line["sparsity"], 1) for line in result.history] == [0.2, 0.5]
    assert result.settings["correcting"] == 0


def test_a_matrix_that_the_machine_can_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 64)
    with pytest.raises(InputError, match=r"samples=20 rows of gradients for .* need .* GiB"):
        prune(network(), samples(), sparsity=0.5, **QUICK)


def test_small_data_resolves_to_small_batches():
    result = prune(trained(), samples(30), sparsity=0.5, stages=2)
    assert (result.settings["held_out"], result.settings["samples"]) == (6, 24)
    assert result.settings["samples_per_row"] == 1


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
def test_batchnorm_statistics(choice):
    torch.manual_seed(0)
    x, y = samples(400, 5)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    model.eval()[1].running_mean += 3.0  # statistics that fit nothing: re-estimation must help
    result = prune(model, samples(), sparsity=0.1, method="magnitude", stages=1, batchnorm=choice)
    changed = not torch.equal(result.model[1].running_mean, model[1].running_mean)
    assert changed == (choice != "never")
    assert result.model[1].momentum == model[1].momentum
    assert not result.model[1].training


def test_degenerate_gradients_give_a_valid_model():
    model = trained()
    x, y = samples(20)
    constant = (x[:1].expand(20, -1).clone(), y[:1].expand(20).clone())
    for source, loss, told in (
        (constant, None, nullcontext()),
        ((x, y), lambda output, target: (0.0 * output).sum(), pytest.warns(match="are zero")),
    ):
        with told:
            result = prune(
                model, source, sparsity=0.5, loss=loss, stages=2, samples=4, epsilon=0.0,
                mixture=1.0,
            )  # fmt: skip
        assert torch.isfinite(weights_of(result.model)).all()
        assert result.nonzeros == 54
    one = prune(model, (x, y), sparsity=0.5, stages=2, samples=1, samples_per_row=1)
    assert torch.isfinite(weights_of(one.model)).all()


BAD = {
    "sparsity": [1.0, -0.1, float("nan"), "0.9", True],
    "method": ["wanda"],
    "stages": [0, 1.5],
    "samples": [0, 10**6],
    "samples_per_row": [50],
    "held_out": [-1, 80],
    "damping": [0, -1, "big", float("inf")],
    "first_order": [-1],
    "epsilon": [-0.1, float("nan")],
    "mixture": [1.1],
    "coupling": ["exact"],
    "derivative": ["numerical"],
    "selection": ["random"],
    "batchnorm": [True],
    "schedule": ["quartic", [0.2, 0.1, 0.5], [0.5], 0.5, None, ["a"]],
    "per_layer": ["no"],
    "relative": [1],
    "correcting": [3, -1],
    "alternations": [0],
    "seed": [-1, 2**70],
    "include": [["nothing.*"], 5, "nothing"],
    "speed": [11],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_settings_are_one_sentence_that_names_them(name, value):
    arguments = {"sparsity": 0.5, **QUICK, name: value}
    with pytest.raises(InputError) as error:
        prune(network(), samples(), **arguments)
    message = str(error.value)
    assert name in message
    assert "\n" not in message


def test_bad_models_and_data():
    x, y = samples()
    with pytest.raises(InputError, match="leaves none of the 108"):
        prune(network(), (x, y), sparsity=0.999)
    with pytest.raises(InputError, match=r"label 7 .* labels 0 to 2"):
        prune(network(), (x, torch.where(y == 1, 7, y)), sparsity=0.5, **QUICK)
    with pytest.raises(InputError, match="no sample"):
        prune(network(), DataLoader(TensorDataset(x[:0], y[:0])), sparsity=0.5)
    with pytest.raises(InputError, match="of 79 and of 80 samples"):
        prune(network(), (x, y[1:]), sparsity=0.5)
    with pytest.raises(InputError, match="type int"):
        prune(network(), 3, sparsity=0.5)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        prune("model", (x, y), sparsity=0.5)
    for source in ((x[:, :4], y), (x, y)):
        model = network() if source[0].shape[1] == 4 else nn.Linear(4, 3)
        for loss in (None, nn.functional.cross_entropy):
            with pytest.raises(InputError, match="model can't be called on a sample"):
                prune(model, source, sparsity=0.5, loss=loss, **QUICK)
            with pytest.raises(InputError, match="model can't be called on a sample"):
                evaluate(model, source, loss)
    with pytest.raises(InputError, match="loss can't be computed"):
        prune(network(), (x, {"a": y}), sparsity=0.5, loss=nn.MSELoss(), **QUICK)
    with pytest.raises(InputError, match="must be a scalar"):
        prune(network(), (x, x[:, :3]), sparsity=0.5, loss=lambda output, target: output - target)
    with pytest.raises(InputError, match="no part in the printed derivative"):
        prune(network(), (x, y), sparsity=0.5, derivative="printed", coupling="gaussian")
    with pytest.raises(InputError, match="pass loss="):
        prune(network(), (x, torch.randn(80, 3)), sparsity=0.5, **QUICK)
    for number in (3, 4, 50):  # held out or not, the message has the number in the user's data
        poisoned = x.clone()
        poisoned[number] = float("nan")
        with pytest.raises(InputError, match=f"sample {number} is nan"):
            prune(network(), (poisoned, y), sparsity=0.5, stages=3)


def test_schedules():
    assert sparsities("linear", 0.8, 4, 0) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    cubic = sparsities("cubic", 0.9, 5, 2)
    assert cubic[2:] == pytest.approx([0.9, 0.9, 0.9])
    assert cubic[0] == pytest.approx(0.9 * (1 - (2 / 3) ** 3))
    assert sparsities([0.1, 0.5], 0.5, 2, 0) == [0.1, 0.5]
    # As linspace may end.
    assert sparsities([0.5, 0.9499999999999998], 0.95, 2, 0) == [0.5, 0.95]
    assert sparsities([0.5, 0.5000000001], 0.5, 2, 0) == [0.5, 0.5]
    with pytest.raises(InputError, match="the last of which is sparsity"):
        sparsities([0.1, 0.501], 0.5, 2, 0)


def test_stages_are_measured_after_the_cut_and_before_training():
    model, test = trained(), samples(100, 9)
    quick = {**QUICK, "sparsity": 0.8, "method": "magnitude"}
    untrained = prune(model, samples(), test_data=test, **quick)
    last = untrained.history[-1]
    score = evaluate(untrained.model, test)
    assert (last["test_loss"], last["test_top1"]) == (score.loss, score.top1)
    tuned = {"epochs_per_stage": 1, "epochs_after": 0, "batch_size": 16}
    measured = prune(model, samples(), test_data=test, fine_tuning=tuned, **quick)
    # The first cut is the same with or without the training that follows it.
    assert measured.history[0]["test_loss"] == untrained.history[0]["test_loss"]
    assert measured.history[1]["test_loss"] != untrained.history[1]["test_loss"]
    unmeasured = prune(model, samples(), fine_tuning=tuned, **quick)
    assert torch.equal(weights_of(measured.model), weights_of(unmeasured.model))
    with pytest.raises(InputError, match="test_data"):
        prune(model, samples(), test_data=7, **quick)


def test_the_precision_of_training_is_settled_and_saved():
    quick = {**QUICK, "sparsity": 0.8, "method": "magnitude"}
    settled = machine.fastest_precision()
    tuned = {"epochs_after": 1, "batch_size": 16}
    automatic, named = (
        prune(trained(), samples(), fine_tuning={**tuned, "precision": precision}, **quick)
        for precision in ("auto", settled)
    )
    assert automatic.settings["fine_tuning"]["precision"] == settled
    assert torch.equal(weights_of(automatic.model), weights_of(named.model))


def test_magnitude_takes_input_noise_without_batchnorm_too():
    noise = {"kind": "input", "fraction": 0.5, "level": 1.0}
    result = prune(trained(), samples(), sparsity=0.5, method="magnitude", noise=noise)
    assert result.sparsity == 0.5


def test_a_bad_label_of_a_later_stage_is_not_called_divergence():
    x, y = samples(400)
    y[torch.arange(0, 400, 7)] = 9
    with pytest.raises(InputError, match="label 9") as caught:
        prune(trained(), (x, y), sparsity=0.5, method="lr", stages=6, samples=3, held_out=2)
    assert not isinstance(caught.value, DivergedError)


def test_products_beyond_float32_are_divergence(monkeypatch):
    monkeypatch.setattr(
        DenseGradients, "gram", lambda self: torch.full((self.shape[0],) * 2, float("inf")).double()
    )
    with pytest.raises(DivergedError, match="stage 1 of 3 can't be done: products"):
        prune(trained(), samples(), sparsity=0.5, method="lr", **QUICK)


# --- what users bring ---------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_loss_that_is_no_mean_is_refused(reduction):
    loss = nn.CrossEntropyLoss(reduction=reduction)
    said = "must be a scalar tensor" if reduction == "none" else "for two copies of it"
    for call in (lambda: prune(network(), samples(), sparsity=0.5, loss=loss),
                 lambda: evaluate(network(), samples(), loss)):  # fmt: skip
        with pytest.raises(InputError, match=said):
            call()


def test_a_seed_fixes_what_a_sampler_draws():
    def pruned():
        sampler = WeightedRandomSampler(torch.ones(80).tolist(), 60)
        loader = DataLoader(TensorDataset(*samples()), sampler=sampler)
        return weights_of(prune(trained(), loader, sparsity=0.5, method="lr", stages=2).model)

    assert torch.equal(pruned(), pruned())


def test_layers_alike_are_exact_where_shares_grow_as_weights_are_cut():
    model = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (4, 23, 23, 53))
    model.forward = lambda x: torch.stack(
        [layer(part)[:, 0] for layer, part in zip(model, x.split((4, 23, 23, 53), 1), strict=True)],
        1,
    )
    data = torch.randn(40, 103), torch.randint(4, (40,))
    steps = [1 - 66 / 103, 1 - 64 / 103]
    for method in ("magnitude", "lr"):
        result = prune(
            model, data, sparsity=steps[-1], schedule=steps, method=method, per_layer=True
        )
        assert result.nonzeros == 64


def test_numbers_of_numpy_are_numbers():
    result = prune(
        network(), samples(), sparsity=np.float64(0.8), stages=np.int64(2), method="magnitude",
        schedule=np.array([0.5, 0.8]),
    )  # fmt: skip
    assert result.settings["stages"] == 2
    assert result.settings["schedule"] == (0.5, 0.8)


def test_weights_of_float64_that_stay_are_not_rounded():
    model = network().double()
    data = samples()[0].double(), samples()[1]
    pruned = prune(model, data, sparsity=0.5, method="magnitude").model
    for before, after in zip(model.parameters(), pruned.parameters(), strict=True):
        assert torch.equal(after[after != 0], before[after != 0])


def test_wrong_labels_are_drawn_from_the_classes_of_the_model(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "swap_prune.noise._check_labels", lambda labels, classes: seen.append(classes) or classes
    )
    x, y = samples()
    prune(network(), (x, y % 2), sparsity=0.5, noise={"kind": "labels", "fraction": 0.25}, **QUICK)
    assert set(seen) == {3}


def masked():
    model = network()
    apply_masks(model, {"0.weight": torch.ones(12, 6, dtype=torch.bool)})
    return model


def pruned_by_torch():
    model = network()
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def with_a_lock():
    model = network()
    model.lock = threading.Lock()
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (masked, "call swap_prune.make_permanent"),
        (pruned_by_torch, "torch.nn.utils.prune.remove"),
        (with_a_lock, "can't be copied"),
        (lambda: None, "model is of type NoneType"),
    ],
)
def test_models_that_can_not_be_pruned_as_they_are(make, said):
    with pytest.raises(InputError, match=said):
        prune(make(), samples(), sparsity=0.5, **QUICK)


class Ragged(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(6 + index % 2), 0


class Broken(Ragged):
    def __getitem__(self, index):
        raise OSError("no such file")


class RaggedStream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(6 + i % 2), 0) for i in range(4)])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Ragged(), r"can't be read \(RuntimeError: .*; every item must be a pair"),
        (Broken(), r"can't be read at sample 0 \(OSError: no such file\)"),
        (RaggedStream(), "can't be read"),
        (DataLoader(TensorDataset(*samples()), batch_size=None), "can't be read"),
    ],
)
def test_data_that_can_not_be_read(data, said):
    with pytest.raises(InputError, match=f"^calibration {said}"):
        prune(network(), data, sparsity=0.5)
    with pytest.raises(InputError, match=f"^data {said}"):
        evaluate(network(), data)


def test_test_data_is_looked_at_before_the_first_stage():
    model = network()
    with pytest.raises(InputError, match="test_data yields an item"):
        prune(model, samples(), sparsity=0.5, test_data=Triples(), **QUICK)
    with pytest.raises(InputError, match="can't be called on a sample"):
        prune(
            model, samples(), sparsity=0.5, test_data=(torch.zeros(5, 2), torch.zeros(5)), **QUICK
        )


class Triples(Ragged):
    def __getitem__(self, index):
        return torch.zeros(6), 0, 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "lr", "epsilon": 0.1}, "epsilon=0.1 has no part in method='lr'; ewr has it"),
        ({"method": "lr", "relative": False}, "relative=False has no part in method='lr'"),
        ({"method": "magnitude", "damping": 0.1}, "damping=0.1 has no part in method='magnitude'"),
        ({"method": "wf", "memory": 5}, "memory=5 has no part in method='wf'; lr, ewr have it"),
        ({"schedule": [0.2, 0.5], "correcting": 1}, "no part in a schedule of one's own"),
        ({"seed": 2**70}, "at least 0 and below 2"),
        ({"held_out": 0}, "give held_out a larger number"),
    ],
)
def test_what_has_no_effect_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        prune(network(), samples(), sparsity=0.5, **given)


def test_numbers_of_numpy_in_a_schedule():
    schedule = [np.float32(0.25), np.float64(0.5)]
    result = prune(network(), samples(), sparsity=0.5, schedule=schedule, method="magnitude")
    assert result.settings["schedule"] == (0.25, 0.5)


def test_a_model_whose_every_weight_is_masked_is_told_so():
    model = network()
    apply_masks(model, {name: w != 0 for name, w in model.named_parameters() if w.ndim == 2})
    with pytest.raises(InputError, match="make_permanent"):
        prune(model, samples(), sparsity=0.5)


class Bag(nn.Module):
    """Calls that go wrong for more than one sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = network(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "one":
            return self.inner(x.view(1, -1))
        return self.inner(x).mean(0, keepdim=True)


def test_models_take_several_samples_at_once():
    for kind, said in (("one", "can't be called on 2 samples"), ("mean", "for two samples")):
        with pytest.raises(InputError, match=said):
            prune(Bag(kind), samples(), sparsity=0.5, **QUICK)
        with pytest.raises(InputError, match=said):
            evaluate(Bag(kind), samples())


def collated(make):
    """A loader whose batches are made from a pair of tensors."""
    return DataLoader(
        TensorDataset(*samples()),
        collate_fn=lambda items: make(*(torch.stack(part) for part in zip(*items, strict=True))),
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (collated(lambda x, y: ({"input": x, "scale": 2.0}, y)), "calibration yields 2.0 in a"),
        (collated(lambda x, y: ((x, None), y)), "calibration yields None in a"),
        (collated(lambda x, y: (list(x), y)), r"yields a tensor of shape \(6,\) in a"),
        ((list(samples()[0]), list(samples()[1])), "not a tensor without dimensions"),
        ({"x": samples()[0], "y": samples()[1]}, "calibration is of type dict"),
    ],
)
def test_batches_are_tensors_with_the_samples_first(source, said):
    with pytest.raises(InputError, match=said):
        prune(network(), source, sparsity=0.5, **QUICK)


def test_any_mapping_of_inputs_is_spread():
    source = collated(lambda x, y: (UserDict(input=x), y.to(torch.uint16)))
    model = nn.Sequential(*network())
    result = prune(model, source, sparsity=0.5, **QUICK)
    expected = prune(model, samples(), sparsity=0.5, **QUICK)
    assert torch.equal(weights_of(result.model), weights_of(expected.model))


def test_a_sample_on_which_a_loss_fails_is_one_sentence():
    x, y = samples()
    y[70] = 9
    with pytest.raises(InputError, match=r"loss can't be computed .* out of bounds"):
        evaluate(network(), (x, y), nn.functional.cross_entropy)


@pytest.mark.parametrize("method", METHODS)
def test_torch_may_make_other_tensors_by_default(method):
    model, calibration = network(), samples()
    wanted = prune(model, calibration, sparsity=0.5, stages=2, method=method)
    try:
        torch.set_default_dtype(torch.float64)
        found = prune(model, calibration, sparsity=0.5, stages=2, method=method)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.nonzeros == wanted.nonzeros
    with torch.device("meta"):
        found = prune(model, calibration, sparsity=0.5, stages=2, method=method)
        assert evaluate(found.model, calibration) == evaluate(wanted.model, calibration)


def test_few_samples_to_choose_by_are_warned_of():
    few = "held_out=8 of 40 calibration samples are too few"
    with pytest.warns(PruningWarning, match=few) as caught:
        prune(network(), samples(40), sparsity=0.5, stages=1)
    assert caught[0].filename == __file__


def test_inputs_count_as_memory(monkeypatch):
    monkeypatch.setattr(machine, "_memory", lambda: 30_000)
    settings = {"sparsity": 0.5, "method": "lr", "samples": 8, "held_out": 16}
    prune(network(), samples(80), samples_per_row=1, **settings)
    x, y = samples(800)
    with pytest.raises(InputError, match="fewer samples_per_row"):
        prune(network(), (x, y), samples_per_row=95, **settings)


def test_layers_without_weights_are_not_pruned():
    with pytest.raises(InputError, match="no prunable weight"):
        prune(nn.Linear(6, 0), samples(), sparsity=0.5)


def test_script_modules_are_refused():
    with pytest.raises(InputError, match="ScriptModule"):
        prune(torch.jit.script(network()), samples(), sparsity=0.5)
    assert evaluate(torch.jit.script(network()), samples()) == evaluate(network(), samples())


def test_a_layer_that_lost_all_its_weights_is_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight *= 1e-6
    data = torch.randn(40, 4), torch.randint(2, (40,))
    nothing = "no weight is left of 0.weight, through which nothing"
    with pytest.warns(PruningWarning, match=nothing) as caught:
        prune(model, data, sparsity=0.7, method="magnitude")
    # Where the user is to look, and silence it if need be, is the call.
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["in_place", "progress"])
def test_flags_must_be_true_or_false(name):
    data = torch.randn(40, 6), torch.randint(3, (40,))
    with pytest.raises(InputError, match=f"{name}='no' must be True or False"):
        prune(network(), data, sparsity=0.5, **{name: "no"})


def test_stages_without_end_are_refused():
    data = torch.randn(40, 6), torch.randint(3, (40,))
    with pytest.raises(InputError, match="stages=10000000000 must be at most 10,000"):
        prune(network(), data, sparsity=0.5, stages=10**10)


def test_training_that_does_harm_is_told():
    data = torch.randn(80, 6), torch.randint(3, (80,))
    with pytest.warns(UserWarning, match="fine-tuning raised the held-out loss from"):
        prune(network(), data, sparsity=0.5, fine_tuning={"epochs_after": 2, "learning_rate": 50.0})


def test_test_data_that_do_not_fit_are_named():
    data = torch.randn(80, 6), torch.randint(3, (80,))
    wide = torch.randn(10, 7), torch.randint(3, (10,))
    with pytest.raises(InputError, match="test_data can't be used: the model can't be called"):
        prune(network(), data, sparsity=0.5, test_data=wide)


def test_a_model_that_is_random_in_eval_mode_is_told():
    class Dropping(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    with pytest.warns(PruningWarning, match="the model is random in eval mode") as caught:
        prune(Dropping(6, 3), samples(100), sparsity=0.5, stages=3, audit=False)
    assert caught[0].filename == __file__
    assert sum("random in eval mode" in str(warning.message) for warning in caught) == 1


@pytest.mark.filterwarnings("ignore:the held-out loss was")
def test_losses_that_are_random_prove_nothing_of_an_unused_layer():
    model = nn.Linear(6, 3)
    model.unused = nn.Linear(2, 2)
    model.register_forward_hook(lambda *given: nn.functional.dropout(given[-1], 0.5))
    assert prune(model, samples(100), sparsity=0.5, stages=1).sparsity == 0.5


def test_autocast_of_the_callers_changes_nothing():
    model, calibration = trained(), samples(100)
    expected = prune(model, calibration, sparsity=0.5, stages=2).model
    with torch.autocast("cpu", torch.bfloat16):
        found = prune(model, calibration, sparsity=0.5, stages=2).model
    assert torch.equal(weights_of(found), weights_of(expected))


def test_a_held_out_sample_on_which_the_model_fails_is_named():
    tokens, labels = torch.randint(5, (100, 2)), torch.arange(100) % 3
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3))
    for bad in range(2, 100, 7):
        wrong = tokens.index_fill(0, torch.tensor(bad), 9)
        with pytest.raises(InputError, match=f"sample {bad}: IndexError"):
            prune(model, (wrong, labels), sparsity=0.5, stages=1, method="wf")


@pytest.mark.parametrize("fine_tuning", [None, {"epochs_after": 1, "batch_size": 16}])
def test_inference_mode_of_the_callers_changes_nothing(fine_tuning):
    calibration, settings = samples(100), {"stages": 2, "fine_tuning": fine_tuning, "sparsity": 0.5}
    expected = prune(trained(), calibration, **settings).model
    model = trained()
    with torch.inference_mode():
        built = network()
        found = prune(model, calibration, **settings).model
    assert torch.equal(weights_of(found), weights_of(expected))
    found(calibration[0]).sum().backward()
    prune(built, calibration, **settings).model(calibration[0]).sum().backward()


def test_old_parametrisations_can_be_left_out():
    for norm, remover in (
        (nn.utils.weight_norm, "remove_weight_norm"),
        (nn.utils.spectral_norm, "remove_spectral_norm"),
    ):
        model = network()
        model[0] = norm(model[0])
        model(samples()[0]).sum().backward()  # leaves a weight that torch can't copy
        with pytest.raises(InputError, match=f"{remover}, or exclude the layer"):
            prune(model, samples(), sparsity=0.5)
        result = prune(model, samples(), sparsity=0.5, exclude="0", stages=2)
        assert result.sparsity == 0.5
        assert torch.equal(result.model[0].bias, model[0].bias)
