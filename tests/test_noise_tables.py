import argparse
import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from swap_prune import InputError, experiment, models, reproduce, settings, training
from swap_prune.methods import WassersteinRegression
from swap_prune.noise import NOISES, resolve
from swap_prune.reproduce import noise_tables
from swap_prune.reproduce.noise_tables import ABLATION, CLEAN, Cell, Noise
from swap_prune.run_directory import RunDirectory

EVERY_RECIPE = [(n, p) for n in noise_tables.NETWORKS for p in noise_tables.protocols_of(n)]
TABLE2, TABLE3, TABLE5, TABLE6, TABLE7 = noise_tables.TABLES
SCHEDULE = np.linspace(0, 0.95, 10).tolist()


def parse(table: str, *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    return parser.parse_args([table, *map(str, arguments)])


def run(table: str, *arguments: object) -> None:
    options = parse(table, *arguments)
    options.command(options)


@pytest.fixture
def runs(stand_in):
    """What was run; the loss is LR's 1, 2, 3 by seed, and EWR's 0.1 less or so."""

    def figures(recipe, seed):
        lower = 0.0 if recipe.settings["method"] == "lr" else 0.1 + 0.01 * seed
        history = [
            {"stage": i, "test_loss": 1.0 + seed - lower, "test_top1": 50.0, "test_top5": 90.0}
            for i in range(1, 1 + recipe.settings["stages"])
        ]
        return {"top1": 50.0, "top1_dense": 91.43, "loss_dense": 0.3, "history": history}

    return stand_in(figures)


# --- what is shipped ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "name", "column"),
    [
        (TABLE2, "table2_loss_resnet20", "loss"),
        (TABLE3, "table3_loss_mobilenetv1", "loss"),
        (TABLE6, "table6_top1_resnet20", "top1"),
        (TABLE7, "table7_top1_mobilenetv1", "top1"),
    ],
)
def test_published_figures_are_the_papers(table, name, column, shared_dir):
    with (shared_dir / "paper" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    figures = table.published()
    assert len(figures) == len(rows) == 32
    for row in rows:
        fraction = {"10%": 0.1, "25%": 0.25}[row["noisy_data"]]
        level = {"sigma": 1, "2sigma": 2}[row["noise_level"]]
        figure = figures[fraction, level, row["method"].lower(), float(row["sparsity"])]
        assert (figure.value, figure.ci90) == (float(row[column]), float(row["ci90"]))


def test_published_ablation_is_the_papers(shared_dir):
    shipped = noise_tables.read_published("table5")
    path = shared_dir / "paper" / "table5_epsilon_ablation_resnet20_loss.csv"
    with path.open() as file:
        assert shipped == list(csv.DictReader(file))
    figures = TABLE5.published()
    assert figures[0.25, 2.0, "lr", 0.95].value == 2.89
    assert figures[0.25, 2.0, "sinkhorn-inf", 0.84].value == 2.62
    assert {method for _, _, method, _ in figures} <= set(ABLATION)


@pytest.mark.parametrize("table", noise_tables.TABLES, ids=lambda table: table.name)
def test_every_published_sparsity_is_a_stage(table):
    schedule = noise_tables.read_recipe(table.stands_beside, "untrained").settings["schedule"]
    stages = {round(sparsity, 2) for sparsity in schedule}
    assert {sparsity for *_, sparsity in table.published()} == set(table.sparsities) <= stages


def test_no_recipe_is_left_out():
    shipped = {(path.parent.name, path.stem) for path in noise_tables.RECIPES.rglob("*.yaml")}
    assert shipped == set(EVERY_RECIPE)


@pytest.mark.parametrize(("network", "protocol"), EVERY_RECIPE)
def test_a_shipped_recipe_is_the_papers_protocol(network, protocol):
    recipe = noise_tables.read_recipe(network, protocol)
    given = recipe.settings
    assert recipe.model == network
    assert recipe.measure_stages
    assert (given["samples"], given["samples_per_row"]) == (100, 1)
    trained = training.resolve(given.get("fine_tuning"))
    authors = training.PRESETS.get(f"authors-{network}")
    # Rounding is this machine's affair, not the protocol's.
    assert (trained and replace(trained, precision="float32")) == (
        authors if protocol == "authors" else None
    )
    if network == "efficientnet-lite0":
        assert given["schedule"] == pytest.approx([*SCHEDULE[:7], 0.75])
        # Every stage has images of its own.
        assert given["stages"] * given["samples"] + given["held_out"] <= 1000
    else:
        assert given["schedule"] == tuple(SCHEDULE)


@pytest.mark.parametrize("method", ABLATION)
def test_a_methods_settings_can_be_used(method):
    given = noise_tables.settings_of(method)
    settings.check(settings.Settings(sparsity=0.9, **given))
    assert (given["method"] == "lr") == (method == "lr")


def test_variants_are_what_their_names_say():
    plain = {"memory": 0, "contamination": 0.0, "audit": False, "screen": False}
    plain["reconstruction"] = False
    fixed = {"method": "ewr", "relative": False, "mixture": 1.0, **plain}
    assert noise_tables.settings_of("sinkhorn-0") == {**fixed, "coupling": "sinkhorn", "epsilon": 0}
    printed = noise_tables.settings_of("gaussian-printed-10")
    assert printed == {**fixed, "coupling": "gaussian-printed", "epsilon": 10}
    assert noise_tables.settings_of("sinkhorn-inf")["epsilon"] == math.inf
    assert noise_tables.settings_of("relative-0.1")["relative"] is True
    assert noise_tables.settings_of("lr-memory") == {"method": "lr", "memory": "auto"}
    assert noise_tables.settings_of("wf") == {"method": "wf"}


# --- which cells --------------------------------------------------------------------------------


def test_defaults_are_the_cells_of_the_paper():
    cells = TABLE2.plan(parse("table2"))
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 5
    assert {(cell.network, cell.protocol, cell.noise) for cell in cells} == {
        ("resnet20", "untrained", "input")
    }
    # One seed of all before the next; LR and EWR of a cell next to each other.
    assert [cell.seed for cell in cells[:9]] == [0] * 8 + [1]
    assert [cell.method for cell in cells[:4]] == ["lr", "ewr"] * 2
    assert cells == TABLE6.plan(parse("table6"))
    assert {cell.network for cell in TABLE3.plan(parse("table3"))} == {"efficientnet-lite0"}


def test_ablation_is_at_the_noise_of_the_published_one():
    cells = TABLE5.plan(parse("table5", "--seeds", 1))
    assert {cell.its_noise for cell in cells} == {Noise("input", 0.25, 2.0)}
    assert [cell.method for cell in cells] == list(ABLATION)


def test_clean_runs_are_planned_once():
    options = parse("table2", "--noise-fractions", 0, 0.25, "--noise-levels", 1, 2, "--seeds", 1)
    planned = [cell.its_noise for cell in TABLE2.plan(options) if cell.method == "lr"]
    assert planned == [CLEAN, Noise("input", 0.25, 1.0), Noise("input", 0.25, 2.0)]
    assert TABLE2.recipe(TABLE2.plan(options)[0]).settings.get("noise") is None


@pytest.mark.parametrize("kind", NOISES)
def test_every_noise_can_be_asked_for(kind):
    cells = TABLE2.plan(parse("table2", "--noise-kind", kind, "--seeds", 1))
    assert len({cell.folders for cell in cells}) == len(cells)
    for cell in cells:
        (noise,) = resolve(TABLE2.recipe(cell).settings["noise"])
        assert noise.kind == kind


def test_analog_noise_has_a_clean_run_too():
    options = ["--noise-kind", "analog", "--noise-fractions", 0, "--seeds", 1]
    assert {cell.its_noise for cell in TABLE2.plan(parse("table2", *options))} == {CLEAN}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--networks", "efficientnet-lite0"], ["'efficientnet-lite0'", "resnet20, mlpnet"]),
        (["--protocols", "trained"], ["'trained'", "resnet20: untrained, authors"]),
        (["--methods", "wanda"], ["'wanda'", "lr, ewr, lr-memory", "or one of sinkhorn"]),
        (["--methods", "sinkhorn-"], ["'sinkhorn-'", "sinkhorn-10"]),
        (["--methods", "gaussian--1"], ["'gaussian--1'"]),
        (["--noise-kind", "salt"], ["--noise-kind 'salt'", "input, gradient-entries"]),
        (["--noise-fractions", "1.5"], ["fraction=1.5", "[0, 1]"]),
        (["--noise-levels", "-1"], ["level=-1.0", "at least 0"]),
        (["--noise-kind", "labels", "--noise-levels", "1"], ["--noise-levels 1", "no level"]),
        (["--noise-kind", "analog", "--noise-fractions", "0.1"], ["0.1", "takes no fraction"]),
        (["--seeds", "0"], ["seeds=0"]),
    ],
)
def test_what_the_table_does_not_have_is_named(arguments, named, runs, weights, tmp_path):
    with pytest.raises(InputError) as caught:
        run("table2", *arguments, "--weights-directory", weights, "--out", tmp_path / "out")
    assert all(part in str(caught.value) for part in named), caught.value
    assert not runs
    assert not (tmp_path / "out").exists()


def test_efficientnet_has_no_training(runs):
    with pytest.raises(InputError, match="'authors' is not among those of efficientnet-lite0"):
        run("table3", "--protocols", "authors")


# --- running ------------------------------------------------------------------------------------


def test_tables_of_loss_and_accuracy_share_their_runs(runs, weights, tmp_path, capsys):
    common = ["--seeds", 1, "--weights-directory", weights, "--out", tmp_path / "out"]
    run("table2", "--noise-fractions", 0.25, "--noise-levels", 2, *common)
    assert [(r.settings["method"], seed) for r, seed, _ in runs] == [("lr", 0), ("ewr", 0)]
    recipe, _, directory = runs[-1]
    assert directory == tmp_path / "out/cells/resnet20/untrained/input-0.25-2/ewr/seed-0"
    assert recipe.settings["noise"] == [{"kind": "input", "fraction": 0.25, "level": 2.0}]
    assert recipe.weights == str(weights / "resnet20.safetensors")
    err = capsys.readouterr().err
    assert "resnet20, untrained, input noise, 0.25 of the data, level 2, lr, seed 0\n" in err
    assert "cell 2 of 2" in err
    assert "about 60 s left" in err
    run("table6", "--noise-fractions", 0.25, "--noise-levels", 2, *common)
    assert len(runs) == 2
    run("table5", "--methods", "lr", "ewr", "sinkhorn-inf", *common)
    assert [r.settings["epsilon"] for r, _, _ in runs[2:]] == [math.inf]
    out = {path.name for path in (tmp_path / "out").iterdir()}
    assert out == {
        "cells", "table2.json", "table2.md", "table2_figure.csv", "table6.json", "table6.md",
        "table5.json", "table5.md",
    }  # fmt: skip


def test_a_foreign_table_is_left_alone(runs, weights, tmp_path):
    (tmp_path / "table2.json").write_text('{"cells": [{"network": "vgg"}], "commands": []}')
    with pytest.raises(InputError, match="is not a table that this command wrote"):
        run("table2", "--weights-directory", weights, "--out", tmp_path)
    assert not runs


# --- the tables ---------------------------------------------------------------------------------


def test_differences_are_paired():
    # Seeds differ much more than methods: unpaired, nothing could be told.
    lr, ewr = {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}, {0: 0.9, 1: 1.89, 2: 2.88, 4: 0.0}
    found = noise_tables.paired_difference(ewr, lr, better=-1)
    half = stats.t.ppf(0.95, 2) * stats.tstd([-0.10, -0.11, -0.12]) / 3**0.5
    assert found["seeds"] == 3
    assert found["mean"] == pytest.approx(-0.11)
    assert found["ci90"] == pytest.approx(half)
    assert found["percent"] == pytest.approx(-5.5)
    assert found["percent_ci90"] == pytest.approx(50 * half)
    assert found["better"]
    assert not noise_tables.paired_difference(ewr, lr, better=1)["better"]
    assert not noise_tables.paired_difference(lr, ewr, better=-1)["better"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({}, {}), ({0: None}, {0: 1.0}), ({0: 1.0}, {1: 1.0}), ({0: 1.0}, {0: 0.0})],
)
def test_no_pair_or_a_single_one_shows_nothing(ours, theirs):
    found = noise_tables.paired_difference(ours, theirs, better=-1)
    assert found["percent"] is None
    assert found["ci90"] is None
    assert not found["better"]


def test_an_infinite_loss_is_no_advantage():
    both = {0: math.inf, 1: math.inf}
    assert not noise_tables.paired_difference(both, both, better=-1)["better"]
    assert not noise_tables.paired_difference({0: 1.0, 1: 1.0}, both, better=-1)["better"]


def test_markdown_and_json_have_means_differences_and_published_figures(
    runs, weights, tmp_path, capsys
):
    task = ["--noise-fractions", 0, 0.25, "--noise-levels", 2, "--seeds", 3]
    run("table2", *task, "--weights-directory", weights, "--out", tmp_path)
    text = (tmp_path / "table2.md").read_text()
    assert text in capsys.readouterr().out
    quantile = stats.t.ppf(0.95, 2) / 3**0.5
    lr, ewr = f"2.0000 ± {quantile:.4f} [3]", f"1.8900 ± {0.99 * quantile:.4f} [3]"
    percent = f"(-5.5 ± {0.5 * quantile:.1f}%)"
    difference = f"**-0.1100 ± {0.01 * quantile:.4f} {percent}**"
    assert "## resnet20, clean\n" in text
    assert f"| 0.95 | {lr} | {ewr} | {difference} |\n" in text
    assert "## resnet20, input noise, 0.25 of the data, level 2\n" in text
    assert (
        "| sparsity | lr | ewr | ewr - lr | ResNet20 LR, published | ResNet20 EWR, published |"
    ) in text
    assert f"| 0.84 | {lr} | {ewr} | {difference} | 1.76 ± 0.02 | 1.69 ± 0.02 |" in text
    assert "| 0.53 |" not in text
    assert "12 of 12 cells are finished" in text
    contents = json.loads((tmp_path / "table2.json").read_text())
    assert [row["sparsity"] for row in contents["rows"]] == 2 * SCHEDULE
    assert contents["rows"][-1]["methods"]["ewr"]["published"] == {"value": 2.79, "ci90": 0.02}
    assert len(contents["cells"][0]["stages"]) == 10
    with (tmp_path / "table2_figure.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert (last["fraction"], last["level"], last["sparsity"]) == ("0.25", "2.0", "0.95")
    assert float(last["lr_minus_ewr"]) == pytest.approx(0.11)


def test_cells_not_run_are_shown(runs, tmp_path):
    asked = [
        Cell("mlpnet", "untrained", "input", 0.1, 1.0, method, seed=seed)
        for method in ("lr", "ewr")
        for seed in range(2)
    ]
    experiment.run(TABLE6.recipe(asked[0]), 0, asked[0].directory(tmp_path).path)
    text = TABLE6.markdown(TABLE6.write(tmp_path, asked, "the command"))
    # Nothing was published of MLPNet.
    assert "| sparsity | lr | ewr | ewr - lr |\n" in text
    assert "| 0.95 | 50.00 [1 of 2] | – | – |" in text
    assert "1 of 4 cells are finished" in text


def test_ablation_has_epsilons_and_couplings_across(runs, weights, tmp_path):
    methods = ["lr", "sinkhorn-1", "sinkhorn-10", "gaussian-10", "gaussian-printed-10"]
    common = ["--seeds", 2, "--weights-directory", weights, "--out", tmp_path]
    run("table5", "--methods", *methods, *common)
    text = (tmp_path / "table5.md").read_text()
    quantile = stats.t.ppf(0.95, 1) / 2
    lr, ours = f"1.5000 ± {quantile:.4f} [2]", f"**1.3950 ± {0.99 * quantile:.4f} [2]**"
    assert "| sparsity | lr | sinkhorn-1 | sinkhorn-10 |\n" in text
    assert f"| 0.95 | {lr} (2.89) | {ours} (2.78) | {ours} (2.79) |" in text
    assert "| sparsity | epsilon | sinkhorn | gaussian | gaussian-printed |" in text
    assert f"| 0.95 | 10 | {ours} (2.79) | {ours} | {ours} |" in text


# --- on made data -------------------------------------------------------------------------------


@pytest.fixture
def made_mnist(tmp_path, monkeypatch):
    """The command's small arguments, for a network and images that are made up."""
    torch.manual_seed(0)
    save_file(models.build("mlpnet").state_dict(), tmp_path / "mlpnet.safetensors")
    folder, rng = tmp_path / "mnist", np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", 60), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 100, (count, 28, 28), np.uint8) + 15 * labels[:, None, None]
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + values.tobytes())
    monkeypatch.setenv("SWAP_PRUNE_CACHE", str(tmp_path))
    shipped = noise_tables.read_recipe
    small = {"stages": 3, "schedule": (0.0, 0.5, 0.95), "samples": 10, "held_out": 10}

    def read_small(*name):
        recipe = shipped(*name)
        return replace(recipe, settings=recipe.settings | small)

    monkeypatch.setattr(noise_tables, "read_recipe", read_small)
    task = ["--networks", "mlpnet", "--noise-fractions", 0.25, "--noise-levels", 1]
    return [*task, "--weights-directory", tmp_path, "--out", tmp_path / "out"]


def test_table2_runs_on_made_data(made_mnist, tmp_path):
    protocols = ["--protocols", "untrained", "authors"]
    run("table2", *made_mnist, *protocols, "--seeds", 1)
    contents = json.loads((tmp_path / "out/table2.json").read_text())
    cells = contents["cells"]
    assert [(cell["protocol"], cell["method"], cell["epochs"]) for cell in cells] == [
        ("untrained", "lr", 0),
        ("untrained", "ewr", 0),
        ("authors", "lr", 3),
        ("authors", "ewr", 3),
    ]
    for cell in cells:
        assert [stage["sparsity"] for stage in cell["stages"]] == [0.0, 0.5, 0.95]
        assert all(math.isfinite(stage["loss"]) for stage in cell["stages"])
        assert cell["noise_reached"][0]["reached"]["sigma_reached"] > 0
    # EWR's record says how far transport was used; the stage that cuts nothing has no plan.
    used = [[stage["mixture"] for stage in cell["stages"]] for cell in cells[1::2]]
    cutting = [mixture for mixtures in used for mixture in mixtures[1:]]
    assert all(mixtures[0] is None for mixtures in used)
    assert None not in cutting
    text = (tmp_path / "out/table2.md").read_text()
    sentence = f"By EWR, of its stages that cut: in {sum(m > 0 for m in cutting)} of 4 on mlpnet.\n"
    assert f"## How often transport was used\n\n{sentence}" in text
    # The same samples and the same noise.
    assert cells[0]["noise_reached"] == cells[1]["noise_reached"]


def test_a_cell_that_diverges_is_an_entry_of_the_table(made_mnist, tmp_path, monkeypatch, capsys):
    arguments = ["table5", *made_mnist, "--methods", "sinkhorn-inf", "lr", "--seeds", 1]
    solve, calls = WassersteinRegression.prune, []

    def diverge(self, stage):
        w, chosen = solve(self, stage)
        calls.append(self.coupling)
        wild = self.coupling == "sinkhorn" and stage.remaining == 1
        return (w / 0 if wild else w), chosen

    monkeypatch.setattr(WassersteinRegression, "prune", diverge)
    run(*arguments)
    contents = json.loads((tmp_path / "out/table5.json").read_text())
    reasons = {cell["method"]: cell["diverged"] for cell in contents["cells"]}
    assert reasons["lr"] is None
    assert "the weights became infinite at stage 2/3" in reasons["sinkhorn-inf"]
    text = (tmp_path / "out/table5.md").read_text()
    assert "Diverged, and so in no mean:" in text
    assert reasons["sinkhorn-inf"] in text
    assert "to try again, delete" in capsys.readouterr().err
    before = len(calls)
    run(*arguments)
    assert len(calls) == before


def test_an_interrupted_table_goes_on(made_mnist, tmp_path, monkeypatch):
    arguments = ["table5", *made_mnist, "--methods", "lr", "sinkhorn-inf", "--seeds", 1]
    save_step, saved = RunDirectory.save_step, []

    def interrupt(self, step):
        save_step(self, step)
        saved.append((self.path.parent.name, step.number))
        if len(saved) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "save_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    out = tmp_path / "out"
    cells = json.loads((out / "table5.json").read_text())["cells"]
    assert [cell["stages"] is None for cell in cells] == [False, True]
    run(*arguments)
    # LR's three stages once, and those of the other that were missing.
    others = [("sinkhorn-inf", number) for number in (1, 2, 3)]
    assert saved == [*(("lr", number) for number in (1, 2, 3)), *others]
    resumed = json.loads((out / "table5.json").read_text())
    assert len(resumed["commands"]) == 1
    arguments[arguments.index(out)] = tmp_path / "whole"
    run(*arguments)
    whole = json.loads((tmp_path / "whole/table5.json").read_text())
    assert resumed["rows"] == whole["rows"]
