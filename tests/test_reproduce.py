import argparse
import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy import stats

from swap_prune import InputError, experiment, models, reproduce, settings, stages
from swap_prune.reproduce import common, table1
from swap_prune.reproduce.table1 import TABLE, Cell

TRAINED = ("lr-authors", "ewr-authors", "lr-trained", "ewr-trained")
EVERY_RECIPE = [(n, m) for n in table1.NETWORKS for m in table1.methods_of(n)]


def run(*arguments: object) -> None:
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    options = parser.parse_args(["table1", *map(str, arguments)])
    options.command(options)


@pytest.fixture
def runs(stand_in):
    """What was run; top-1 is 94, 95, 96 by seed."""
    return stand_in(lambda _, seed: {"top1": 94.0 + seed, "loss": 0.2, "top1_dense": 93.97})


# --- what is shipped ----------------------------------------------------------------------------


def test_published_figures_are_the_papers(shared_dir):
    with (shared_dir / "paper" / "table1_accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [
        (f.network, f.sparsity, f.noise_fraction, f.method, f.top1, f.ci95)
        for f in table1.published()
    ] == [
        (
            row["network"], float(row["sparsity"]),
            {"none": 0.0, "20%": 0.2}[row["noisy_data"]], row["method"],
            float(row["top1"]), float(row["ci95"]) if row["ci95"] else None,
        )
        for row in rows
    ]  # fmt: skip


def test_networks_have_the_methods_and_sparsities_of_the_table():
    one_shot, staged = ("magnitude", "wf", "cbs"), ("lr", "ewr")
    for network in ("mlpnet", "resnet20"):
        assert table1.methods_of(network) == (*one_shot, *staged, *TRAINED)
        assert table1.sparsities_of(network) == (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
    assert table1.methods_of("efficientnet-lite0") == ("magnitude", "wf", *staged)
    assert table1.sparsities_of("efficientnet-lite0") == (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    assert table1.methods_of("resnet50-cifar") == ("magnitude", *staged)
    assert table1.sparsities_of("resnet50-cifar") == (0.95, 0.98)
    assert table1.methods_of("mobilenetv1") == ("magnitude", *staged)
    assert table1.sparsities_of("mobilenetv1") == (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def test_no_recipe_is_left_out():
    shipped = {(path.parent.name, path.stem) for path in table1.RECIPES.rglob("*.yaml")}
    assert shipped == set(EVERY_RECIPE)


@pytest.mark.parametrize(("network", "method"), EVERY_RECIPE)
def test_a_shipped_recipe_reads_and_is_what_its_name_says(network, method):
    recipe = table1.read_recipe(network, method)
    assert recipe.model == network
    assert recipe.settings["method"] == method.split("-")[0]
    assert recipe.settings["sparsity"] in table1.sparsities_of(network)
    assert (recipe.weights, recipe.data_directory) == (None, None)
    assert (recipe.settings["stages"] == 1) == (method in ("magnitude", "wf", "cbs"))
    assert recipe.settings["stages"] <= 15
    plain = {name: v for name, v in recipe.settings.items() if name != "fine_tuning"}
    settings.check(settings.Settings(**plain))
    assert (common.epochs_trained(recipe.settings) > 0) == (method in TRAINED)


def test_each_column_is_pruned_by_its_own_method():
    # A baseline that falls through to another method would fill its column with that one's figures.
    built = {
        name: type(stages.build_method(settings.Settings(sparsity=0.9, method=name)))
        for name in ("magnitude", "wf", "cbs", "ewr")
    }
    assert len(set(built.values())) == len(built), built


def test_our_training_and_the_authors_are_as_long_on_mlpnet():
    for method in TRAINED:
        assert common.epochs_trained(table1.read_recipe("mlpnet", method).settings) == 15


@pytest.mark.parametrize("network", ["mobilenetv1", "efficientnet-lite0"])
def test_imagenet_recipes_do_with_a_thousand_images(network):
    given = table1.read_recipe(network, "ewr").settings
    assert given["samples"] * given["samples_per_row"] + given["held_out"] <= 1000


# --- which cells --------------------------------------------------------------------------------


def test_defaults_are_every_cell_of_two_networks():
    cells = table1.plan(None, None, None, None, 3)
    clean = [cell for cell in cells if cell.noise_fraction == 0]
    noisy = [cell for cell in cells if cell.noise_fraction == 0.2]
    assert len(cells) == len(set(cells)) == len(clean) + len(noisy)
    assert len(clean) == 2 * 7 * (8 * 3 + 1)
    assert len(noisy) == 2 * 2 * (6 * 3)
    assert {cell.sparsity for cell in noisy} == {0.95, 0.98}
    assert {cell.method.split("-")[0] for cell in noisy} == {"lr", "ewr"}
    assert {cell.seed for cell in cells if cell.method == "magnitude"} == {0}
    # A whole table of one seed comes before the second seed.
    assert [cell.seed for cell in cells[: 7 * 9 + 2 * 6 + 1]] == [0] * 75 + [1]


def test_what_is_named_twice_is_run_once():
    cells = table1.plan(["mlpnet", "mlpnet"], [0.9, 0.9], ["lr", "lr"], None, 1)
    assert cells == [Cell("mlpnet", "lr", 0.9, seed=0)]


def test_noise_can_be_left_out_or_asked_for_where_the_paper_has_none():
    clean = table1.plan(["mlpnet"], [0.95], ["ewr"], [0.0], 1)
    assert clean == [Cell("mlpnet", "ewr", 0.95, seed=0)]
    noisy = table1.plan(["efficientnet-lite0"], [0.5], ["wf", "ewr"], [0.2], 1)
    assert noisy == [Cell("efficientnet-lite0", "ewr", 0.5, 0.2, seed=0)]
    with pytest.raises(InputError, match="wf have no figures with noisy data"):
        table1.plan(["mlpnet"], [0.95], ["wf"], [0.2], 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--networks", "vgg"], ["'vgg'", "mlpnet, resnet20, resnet50-cifar"]),
        (["--networks", "mlpnet", "--sparsities", "0.42"], ["0.42", "mlpnet: 0.5, 0.6"]),
        (["--networks", "mlpnet", "--methods", "ewt"], ["'ewt'", "magnitude, wf, cbs"]),
        (["--networks", "mobilenetv1", "--methods", "cbs"], ["'cbs'", "magnitude, lr, ewr"]),
        (["--noise-fractions", "0.3"], ["0.3", "table 1: 0.0, 0.2"]),
        (["--seeds", "0"], ["seeds=0"]),
    ],
)
def test_what_the_table_does_not_have_is_named(arguments, named, runs, weights, tmp_path):
    with pytest.raises(InputError) as caught:
        run(*arguments, "--weights-directory", weights, "--out", tmp_path / "out")
    assert all(part in str(caught.value) for part in named)
    assert not runs


# --- running ------------------------------------------------------------------------------------


def test_a_cell_is_its_recipe_with_sparsity_seed_and_weights(runs, weights, tmp_path):
    out = tmp_path / "out"
    task = ["--networks", "mlpnet", "--sparsities", "0.95", "--methods", "magnitude", "ewr"]
    images = ["--data-directory", tmp_path]
    run(*task, *images, "--seeds", "2", "--weights-directory", weights, "--out", out)
    assert [(r.settings["method"], seed) for r, seed, _ in runs] == [
        ("magnitude", 0),
        ("ewr", 0),
        ("ewr", 0),
        ("ewr", 1),
        ("ewr", 1),
    ]
    noisy, _, directory = runs[-1]
    assert directory == out / "cells" / "mlpnet" / "ewr" / "0.95-noisy-0.2" / "seed-1"
    assert noisy.settings["noise"] == [{"kind": "input", "level": 1.0, "fraction": 0.2}]
    recipe, _, directory = runs[-2]
    assert directory == out / "cells" / "mlpnet" / "ewr" / "0.95" / "seed-1"
    assert "noise" not in recipe.settings
    assert recipe.settings["sparsity"] == 0.95
    assert recipe.settings["samples_per_row"] == 16
    assert recipe.weights == str(weights / "mlpnet_mnist.safetensors")
    assert recipe.data_directory is None  # MNIST has its cache


def test_images_go_to_the_networks_that_need_them(runs, tmp_path):
    task = ["--networks", "efficientnet-lite0", "--sparsities", "0.3", "--methods", "lr"]
    run(*task, "--seeds", "1", "--data-directory", tmp_path, "--out", tmp_path / "out")
    assert [(r.weights, r.data_directory) for r, _, _ in runs] == [(None, str(tmp_path))]
    assert "| lr |" in (tmp_path / "out" / "table1.md").read_text()


def test_finished_cells_are_not_run_again(runs, weights, tmp_path, capsys):
    common = ["--weights-directory", weights, "--out", tmp_path / "out", "--seeds", "1"]
    run("--networks", "mlpnet", "--sparsities", "0.9", "--methods", "lr", "ewr", *common)
    assert len(runs) == 2
    err = capsys.readouterr().err
    assert "cell 1 of 2: mlpnet, lr, sparsity 0.9, seed 0\n" in err
    assert "cell 2 of 2: mlpnet, ewr, sparsity 0.9, seed 0; about 60 s left" in err
    run("--networks", "mlpnet", "--sparsities", "0.9", "0.8", "--methods", "lr", *common)
    assert [r.settings["sparsity"] for r, _, _ in runs] == [0.9, 0.9, 0.8]
    contents = json.loads((tmp_path / "out" / "table1.json").read_text())
    # What the first command asked for stays in the table.
    assert [(c["method"], c["sparsity"]) for c in contents["cells"]] == [
        ("lr", 0.8),
        ("lr", 0.9),
        ("ewr", 0.9),
    ]
    assert len(contents["commands"]) == 2


def test_a_failure_names_the_cell_and_keeps_those_before(runs, weights, tmp_path, monkeypatch):
    works = experiment.run

    def fails_at_ewr(recipe, seed, out, progress=True):
        if recipe.settings["method"] == "ewr":
            raise InputError("the weights became infinite")
        return works(recipe, seed, out, progress)

    monkeypatch.setattr(experiment, "run", fails_at_ewr)
    task = ["--networks", "mlpnet", "--sparsities", "0.9", "--methods", "lr", "ewr"]
    with pytest.raises(InputError, match=r"cell mlpnet, ewr, sparsity 0.9, seed 0: the weights"):
        run(*task, "--seeds", "1", "--weights-directory", weights, "--out", tmp_path / "out")
    contents = json.loads((tmp_path / "out" / "table1.json").read_text())
    assert [c["top1"] for c in contents["cells"]] == [94.0, None]


@pytest.mark.parametrize("network", ["resnet50-cifar", "mobilenetv1"])
def test_missing_weights_stop_before_anything_is_run(network, runs, weights, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="must have one file") as caught:
        run("--networks", "mlpnet", network, "--weights-directory", weights, "--out", out)
    assert network in str(caught.value)
    assert not runs
    assert not out.exists()


def test_weights_directory_is_asked_for(runs):
    with pytest.raises(InputError, match="--weights-directory is missing: mlpnet"):
        run()
    assert not runs


def test_two_files_of_weights_are_one_too_many(weights):
    (weights / "mlpnet.safetensors").touch()
    with pytest.raises(InputError, match=r"it has mlpnet.safetensors, mlpnet_mnist.safetensors"):
        common.find_weights("mlpnet", weights)


def test_missing_data_stops_before_anything_is_run(runs, weights, tmp_path, monkeypatch):
    def load_task(model, data, weights, data_directory):
        if data == "cifar10":
            raise InputError("directory 'x' has neither")

    monkeypatch.setattr(experiment, "load_task", load_task)
    with pytest.raises(InputError, match="resnet20 can't be run: directory 'x' has neither"):
        run("--weights-directory", weights, "--out", tmp_path / "out")
    assert not runs


def test_a_foreign_table_is_left_alone(runs, weights, tmp_path):
    (tmp_path / "table1.json").write_text("[]")
    with pytest.raises(InputError, match="is not a table that this command wrote"):
        run("--weights-directory", weights, "--out", tmp_path)
    assert (tmp_path / "table1.json").read_text() == "[]"
    assert not runs


# --- the table ----------------------------------------------------------------------------------


def test_a_column_says_how_long_its_cells_were_trained_not_what_the_recipe_asks_now():
    record = {
        "network": "resnet20", "noise_fraction": 0.0, "seed": 0, "top1": 91.0,
        "top1_dense": 91.43, "method": "ewr-trained",
    }  # fmt: skip
    records = [
        record | {"sparsity": 0.7, "epochs": 3},
        record | {"sparsity": 0.8, "epochs": 15},
        record | {"sparsity": 0.9, "epochs": None, "top1": None},
    ]
    assert "| sparsity | ewr-trained, 3 or 15 epochs (EWR) |" in table1._network_table(
        "resnet20", records
    )


def test_markdown_has_means_intervals_and_published_figures(runs, weights, tmp_path, capsys):
    out = tmp_path / "out"
    methods = ["magnitude", "ewr", "ewr-authors"]
    task = ["--networks", "mlpnet", "--sparsities", "0.5", "0.95", "--methods", *methods]
    run(*task, "--weights-directory", weights, "--out", out)
    text = (out / "table1.md").read_text()
    assert text in capsys.readouterr().out
    ours = f"95.00 ± {stats.t.ppf(0.975, 2) / 3**0.5:.2f}"
    better = f"**{ours}** [3] (92.86 ± 0.05)"
    worse = f"{ours} [3] (95.24 ± 0.03)"
    assert "## mlpnet, dense top-1 93.97" in text
    assert "| sparsity | magnitude (MP) | ewr (EWR) | ewr-authors, 15 epochs (EWR) |" in text
    assert f"| 0.5 | **94.00** [1] (93.93) | {worse} | {worse} |" in text
    assert f"| 0.95 | **94.00** [1] (83.64) | {better} | {better} |" in text
    noisy = f"**{ours}** [3] (90.50 ± 0.07)"
    assert f"| 0.95, 20% noisy | – | {noisy} | {noisy} |" in text
    assert f"swap-prune reproduce table1 {' '.join(task)} --seeds 3" in text
    assert "20 of 20 cells are finished; they took 20 min in all" in text
    contents = json.loads((out / "table1.json").read_text())
    assert contents["seconds"] == 20 * 60
    assert {cell["epochs"] for cell in contents["cells"]} == {0, 15}
    assert sorted(path.name for path in out.iterdir()) == ["cells", "table1.json", "table1.md"]


def test_cells_not_run_are_shown(runs, weights, tmp_path):
    asked = table1.plan(["resnet20"], [0.9, 0.95], ["wf", "ewr"], [0.0], 3)
    experiment.run(
        table1.read_recipe("resnet20", "ewr"),
        0,
        Cell("resnet20", "ewr", 0.9, seed=0).directory(tmp_path).path,
    )
    text = TABLE.markdown(TABLE.write(tmp_path, asked, "the command"))
    assert "| 0.9 | – (11.49) | **94.00** [1 of 3] (88.82 ± 0.10) |" in text
    assert "| 0.95 | – | – (81.33 ± 0.15) |" in text
    assert "1 of 12 cells are finished" in text


def test_cells_of_other_code_are_counted(runs, weights, tmp_path, monkeypatch):
    task = ["--networks", "mlpnet", "--methods", "ewr", "--noise-fractions", "0.0"]
    task += ["--weights-directory", weights, "--out", tmp_path]
    run(*task, "--sparsities", "0.5")
    assert "other code" not in (tmp_path / "table1.md").read_text()
    monkeypatch.setattr(experiment, "code_version", lambda: "another")
    run(*task, "--sparsities", "0.6")
    assert (
        "3 of them are of other code than wrote this file." in (tmp_path / "table1.md").read_text()
    )


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("freedom", [*range(1, 12), 30, 31, 100, 1000])
def test_t_quantiles_are_students(freedom, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert common.t_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-9)


def test_confidence_interval_is_that_of_scipy():
    values = [93.2, 94.1, 92.7, 93.9]
    low, high = stats.t.interval(0.95, 3, stats.tmean(values), stats.sem(values))
    assert common.confidence_interval(values, 0.95) == pytest.approx((high - low) / 2)
    assert common.confidence_interval([93.2], 0.95) is None
    assert common.confidence_interval([93.2, float("inf")], 0.95) is None


def test_time_left_is_judged_by_the_nearest_finished_cells():
    finished = [(("mlpnet", "lr"), 10), (("mlpnet", "ewr"), 30)]
    waiting = [Cell("mlpnet", m, 0.9, seed=1).kind for m in ("lr", "ewr", "wf")]
    assert common.seconds_left(finished, waiting) == 10 + 30 + 20
    assert common.seconds_left(finished, [("resnet20", "lr")]) == 20
    assert common.seconds_left([], waiting) is None


def make_images(folder, count):
    for split in ("train", "val"):
        for label in ("0000", "0001"):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(0, 256, (224, 224, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")


@pytest.mark.parametrize("network", ["resnet50-cifar", "mobilenetv1", "efficientnet-lite0"])
def test_large_networks_run_on_made_data(tmp_path, monkeypatch, network):
    torch.manual_seed(0)
    save_file(models.build(network).state_dict(), tmp_path / f"{network}.safetensors")
    make_images(tmp_path / "imagenet", 4)
    images, labels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    (tmp_path / "cifar10").mkdir()
    save_file(
        {"train_images": images, "train_labels": labels}
        | {"test_images": images.clone(), "test_labels": labels.clone()},
        tmp_path / "cifar10/cifar10.safetensors",
    )
    monkeypatch.setenv("SWAP_PRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "PRETRAINED", {})
    shipped = table1.read_recipe
    small = {"stages": 2, "correcting": 0, "samples": 2, "samples_per_row": 2, "held_out": 2}

    def read_small(*cell):
        recipe = shipped(*cell)
        return replace(recipe, settings=recipe.settings | small)

    monkeypatch.setattr(table1, "read_recipe", read_small)
    arguments = ["--networks", network, "--methods", "lr", "--sparsities", "0.8", "--seeds", "1"]
    arguments += ["--noise-fractions", "0.0"]
    if network == "resnet50-cifar":
        arguments[5] = "0.95"
    directories = ["--weights-directory", tmp_path, "--data-directory", tmp_path / "imagenet"]
    run(*arguments, *directories, "--out", tmp_path / "out")
    (cell,) = json.loads((tmp_path / "out/table1.json").read_text())["cells"]
    assert cell["network"] == network
    assert cell["top1"] is not None
