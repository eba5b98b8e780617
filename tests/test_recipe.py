import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swap_prune import InputError
from swap_prune.recipe import Recipe, dump, read
from swap_prune.training import FineTuning

TASK = "model: resnet20\ndata: cifar10\nsparsity: 0.9\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def parse(folder: Path, text: str | bytes) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path)


def refusal(folder: Path, text: str | bytes) -> str:
    """The error, without the folder's name; always one line."""
    with pytest.raises(InputError) as caught:
        parse(folder, text)
    message = str(caught.value).removeprefix(f"{folder}/")
    assert "\n" not in message
    return message


def test_every_part_of_a_recipe(folder):
    recipe = parse(
        folder,
        "model: own.package:network\n"
        "data: cifar10\n"
        "weights: ../resnet20.safetensors\n"
        "data_directory: /data/cifar10\n"
        "sparsity: 0.9\n"
        "method: ewr\n"
        "stages: 3\n"
        "schedule: [0.5, 8e-1, 0.9]\n"
        "fine_tuning:\n"
        "  preset: authors-mlpnet\n"
        "  epochs_after: 10\n"
        "seeds: [0, 1, 2]\n",
    )
    assert recipe == Recipe(
        model="own.package:network",
        data="cifar10",
        weights=f"{folder}/../resnet20.safetensors",
        data_directory="/data/cifar10",
        settings={
            "sparsity": 0.9,
            "method": "ewr",
            "stages": 3,
            "schedule": (0.5, 0.8, 0.9),
            "fine_tuning": {"preset": "authors-mlpnet", "epochs_after": 10},
        },
        seeds=(0, 1, 2),
    )


def test_what_is_left_out(folder):
    assert parse(folder, TASK) == Recipe("resnet20", "cifar10", None, None, {"sparsity": 0.9})
    assert parse(folder, TASK + "seed: 7\n").seeds == (7,)


def test_paths_do_not_depend_on_where_it_is_read_from(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("a.yaml").write_text(TASK + "weights: w.safetensors\n")
    assert read("a.yaml").weights == f"{folder}/w.safetensors"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("damping: 1e-3", 0.001),
        ("damping: 1", 1.0),
        ("damping: auto", "auto"),
        ("epsilon: .inf", math.inf),
        ("epsilon: inf", math.inf),
        ("samples: 1e3", 1000),
        ("samples: 1_000", 1000),
        ("samples: 010", 10),
        ("stages: null", None),
        ("stages:", None),
        ("relative: no", False),
        ("per_layer: on", True),
        ("include: layer*.weight", ("layer*.weight",)),
        ("include: [no, 2024-01-01]", ("no", "2024-01-01")),
        ("include: null", None),
        ("exclude: []", ()),
        ("schedule: linear", "linear"),
        ("fine_tuning: authors-resnet20", "authors-resnet20"),
        ("fine_tuning: {learning_rate: 1e-3}", {"learning_rate": 0.001}),
        ("fine_tuning: {}", {}),
        ("fine_tuning: null", None),
        ("held_out: 0", 0),
    ],
)
def test_the_field_decides_how_a_word_is_read(folder, line, value):
    name = line.split(":")[0]
    found = parse(folder, f"{TASK}{line}\n").settings[name]
    assert found == value
    assert type(found) is type(value)


def test_words_that_yaml_takes_for_something_else_are_names(folder):
    recipe = parse(folder, "model: 12:30\ndata: a:b\nsparsity: 0.5\nweights: 2024-01-01\n")
    assert recipe.model == "12:30"
    assert recipe.weights == f"{folder}/2024-01-01"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epsilonn: 1", "'epsilonn' is unknown; did you mean 'epsilon'? accepted are model, data,"),
        ("samples-per-row: 1", "did you mean 'samples_per_row'?"),
        ("noise: 0.1", "noise must be fields as 'kind: labels', or a list of such"),
        ("noise: {kind: hum}", "noise kind='hum' is unknown; accepted are input"),
        ("noise: {kind: labels, part: 1}", "'part' is unknown in noise; accepted are kind"),
        ("noise: [{kind: labels, fraction: 2}]", "noise fraction=2.0 must be a number in [0, 1]"),
        ("<<: {stages: 3}", "'<<' is unknown; "),
        ("[a, b]: 1", "the name of a field must be a word"),
        ("sparsity: 0.8", "'sparsity' is given twice, first in line 3"),
        ("stages: many", "stages='many' must be a whole number of at least 1"),
        ("stages: 2.5", "stages=2.5 must be a whole number of at least 1"),
        ("stages: yes", "stages='yes' must be"),
        ("stages: '3'", "stages='3' must be"),
        ("stages: [3]", "stages has a list where a single value is expected"),
        ("stages: {a: 3}", "stages has a mapping where a single value is expected"),
        ("weights: [a]", "weights has a list where"),
        ("alternations: null", "alternations=None must be"),
        ("damping: 1e-3x", "damping='1e-3x' must be a positive number, or 'auto'"),
        ("damping: .inf", "damping=inf must be"),
        ("epsilon: .nan", "epsilon='.nan' must be"),
        ("method: no", "method='no' is unknown; accepted are "),
        ("relative: maybe", "relative='maybe' must be True or False"),
        ("relative: 'yes'", "relative='yes' must be True or False"),
        ("include: [a, [b]]", "include has a list where"),
        ("include: {a: b}", "include has a mapping where a single value or a list of them"),
        ("include: &a [*a]", "include has a list where"),
        ("include: [a, null]", "include=('a', None) must be name patterns"),
        ("exclude: null", "exclude=None must be name patterns"),
        ("schedule: square", "schedule='square' is unknown"),
        ("schedule: [0.5, much]", "schedule=[0.5, 'much'] must be"),
        ("schedule: [0.5, 0.8]", "the last of which is sparsity=0.9"),
        ("correcting: 15", "correcting=15 must be at least 0 and less than stages=15"),
        ("seed: -1", "seed=-1 must be a whole number of at least 0"),
        ("seed: null", "seed=None must be"),
        ("seeds: 3", "seeds='3' must be a list of one or more whole numbers"),
        ("seeds: []", "seeds=[] must be a list of one or more"),
        ("seeds: null", "seeds=None must be a list"),
        ("seeds: [0, x]", "seed='x' must be a whole number"),
        ("seeds: [0, 1, 0]", "seeds=[0, 1, 0] must be different from each other"),
        ("fine_tuning: none", "preset 'none' doesn't exist; accepted are default, "),
        ("fine_tuning: [default]", "fine_tuning is a list; the name of a preset"),
        ("fine_tuning: {preset: x}", "preset 'x' doesn't exist"),
        ("fine_tuning: {preset: {a: b}}", "preset has a mapping where"),
    ],
)
def test_a_mistake_is_told_with_its_line(folder, line, message):
    found = refusal(folder, f"{TASK}\n# a comment\n{line}\n")
    assert found.startswith("recipe.yaml, line 6: ")
    assert message in found


@pytest.mark.parametrize(
    ("fields", "line", "message"),
    [
        ("  epochs_after: 1\n  momentun: 0\n", 6, "'momentun' is unknown in fine_tuning; did you"),
        ("  momentum: 0\n  momentum: 0\n", 6, "'momentum' is given twice in fine_tuning, first in"),
        ("  momentum: 0\n  batch_size: 0\n", 6, "batch_size=0 must be a whole number"),
        (
            "  learning_rate_schedule: cubic\n",
            5,
            "learning_rate_schedule='cubic' is unknown; accepted are cosine",
        ),
    ],
)
def test_mistakes_in_fine_tuning(folder, fields, line, message):
    # The recipe's own `schedule` isn't the one that is wrong.
    found = refusal(folder, f"{TASK}fine_tuning:\n{fields}schedule: cubic\n")
    assert found.startswith(f"recipe.yaml, line {line}: {message}")


@pytest.mark.parametrize("name", ["model", "data", "sparsity"])
def test_missing_fields(folder, name):
    rest = "".join(line for line in TASK.splitlines(True) if not line.startswith(name))
    expected = f"'{name}' is missing; every recipe needs model, data, sparsity"
    assert refusal(folder, f"\n{rest}") == f"recipe.yaml, line 2: {expected}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: vgg\n", "line 1: model='vgg' doesn't exist; digits, "),
        ("model:\n", "line 1: model=None doesn't exist"),
        ("data: svhn\n", "line 1: data='svhn' doesn't exist; cifar10, "),
        ("sparsity: 1\n", "line 1: sparsity=1.0 must be a number in [0, 1)"),
        (TASK + "seeds: [1]\nseed: 1\n", "line 5: seed and seeds are both given"),
        (TASK + "coupling: gaussian\nderivative: printed\n", "line 4: coupling='gaussian' has no"),
        ("seed: 1\nstages: 0\nsparsity: 2\nmethod: x\n", "line 2: stages=0 must"),
    ],
)
def test_names_and_what_goes_together(folder, text, message):
    assert refusal(folder, text).startswith(f"recipe.yaml, {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ", line 1: the file is empty; "),
        ("# nothing\n", ", line 1: the file is empty; "),
        ("\n- model\n", ", line 2: the file isn't a mapping; "),
        ("resnet20", ", line 1: the file isn't a mapping; "),
        (TASK + "stages: [3\n", ", line 5: this isn't YAML: "),
        (TASK + "\tstages: 3\n", ", line 4: this isn't YAML: "),
        (TASK + "stages: *three\n", ", line 4: this isn't YAML: found undefined alias"),
        (TASK + "---\n" + TASK, ", line 4: this isn't YAML: "),
        (TASK + 'method: "\\UFFFFFFFF"\n', ", line 4: this isn't usable YAML: "),
        ("a: " + "[" * 1000, ", line 1: this isn't usable YAML: "),
        (TASK + "stages: \x00\n", ", line 4: there are characters that YAML doesn't allow"),
        (b"\x80\x04\x95\xff\xfe", " isn't text in UTF-8; "),
    ],
)
def test_what_is_no_recipe_at_all(folder, text, message):
    assert refusal(folder, text).startswith(f"recipe.yaml{message}")


def test_files_that_can_not_be_read(folder):
    with pytest.raises(InputError, match=r"none\.yaml can't be read \(No such file"):
        read(folder / "none.yaml")
    with pytest.raises(InputError, match=r"can't be read \(Is a directory\)"):
        read(folder)


def test_nothing_in_a_recipe_is_executed(folder):
    text = f"{TASK}include: !!python/object/apply:os.mkdir [{folder}/made]\n"
    assert parse(folder, text).settings["include"] == (f"{folder}/made",)
    assert not (folder / "made").exists()


def test_dump_reads_as_if_written_by_hand():
    chosen = {"sparsity": 0.9, "schedule": (0.5, 0.9), "fine_tuning": {"preset": "default"}}
    recipe = Recipe("resnet20", "cifar10", "/w.safetensors", None, chosen, (0, 1))
    assert dump(recipe) == (
        "model: resnet20\n"
        "data: cifar10\n"
        "weights: /w.safetensors\n"
        "data_directory: null\n"
        "sparsity: 0.9\n"
        "schedule: [0.5, 0.9]\n"
        "fine_tuning:\n"
        "  preset: default\n"
        "seeds: [0, 1]\n"
    )


def test_dump_of_python_objects(folder):
    recipe = Recipe("resnet20", "cifar10", None, None, {"sparsity": 0.5})
    tuned = replace(recipe, settings={"sparsity": 0.5, "fine_tuning": FineTuning(momentum=0.5)})
    assert FineTuning(**parse(folder, dump(tuned)).settings["fine_tuning"]).momentum == 0.5
    typed = replace(recipe, settings={"sparsity": 0.5, "include": (nn.Linear,)})
    with pytest.raises(InputError, match=r"Linear.* can't be written in a recipe"):
        dump(typed)


def _numbers(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, exclude_min=least == 0, exclude_max=most == 1)


def _or_auto(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[float | str]:
    return st.just("auto") | numbers


_PATTERNS = st.lists(st.text(), max_size=3).map(tuple)
_COUNTS = st.none() | st.integers(1, 2**63 - 1)
_FINE_TUNING = st.fixed_dictionaries(
    {},
    optional={
        "preset": st.sampled_from(["default", "authors-mlpnet"]),
        "epochs_after": st.integers(0, 100),
        "optimizer": st.sampled_from(["sgd", "adam"]),
        "learning_rate": _numbers(0, 1e300),
        "weight_decay": _numbers(0, 1),
        "learning_rate_schedule": st.just("constant"),
    },
)
_SETTINGS = st.fixed_dictionaries(
    {"sparsity": _numbers(0, 1)},
    optional={
        "method": st.just("ewr"),  # which has all settings
        "stages": st.none() | st.integers(1, 50),
        "samples": _COUNTS,
        "samples_per_row": _COUNTS,
        "held_out": _COUNTS,
        "damping": _or_auto(_numbers(0, 1e300)),
        "epsilon": _or_auto(_numbers(0, math.inf)),
        "mixture": _or_auto(st.floats(0, 1)),
        "relative": st.booleans(),
        "per_layer": st.booleans(),
        "batchnorm": st.sampled_from(["auto", "never"]),
        "include": st.none() | _PATTERNS,
        "exclude": _PATTERNS,
        "fine_tuning": st.none() | st.just("default") | _FINE_TUNING,
    },
)
_RECIPES = st.builds(
    Recipe,
    model=st.sampled_from(["resnet20", "own:net"]),
    data=st.sampled_from(["digits", "own.sets:digits"]),
    weights=st.none() | st.text(st.characters(codec="utf-8")).map(lambda name: f"/w{name}"),
    data_directory=st.none() | st.just("/data"),
    settings=_SETTINGS,
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True).map(tuple),
)


@settings(max_examples=40)
@given(_RECIPES)
def test_dump_and_read_are_inverse(folder, recipe):
    recipe = replace(recipe, weights=recipe.weights and str(Path(recipe.weights)))
    assert parse(folder, dump(recipe)) == recipe


@settings(max_examples=20)
@given(st.integers(1, 5), st.data())
def test_own_schedules_come_back(folder, stages, draw):
    steps = tuple(sorted(draw.draw(st.lists(_numbers(0, 1), min_size=stages, max_size=stages))))
    chosen = {"sparsity": steps[-1], "schedule": steps}
    recipe = Recipe("resnet20", "cifar10", None, None, chosen)
    assert parse(folder, dump(recipe)) == recipe


@settings(max_examples=50)
@given(st.text())
def test_any_text_is_read_or_refused(folder, text):
    with suppress(InputError):
        parse(folder, TASK + text)


def test_line_separators_of_unicode_come_back(folder):
    patterns = ("\x85", "\u2028", "é")
    recipe = Recipe("resnet20", "cifar10", None, None, {"sparsity": 0.5, "exclude": patterns})
    assert parse(folder, dump(recipe)).settings["exclude"] == patterns


def test_noise_comes_back(folder):
    noise = [{"kind": "labels", "fraction": 0.25}, {"kind": "analog", "level": 0.1}]
    read = parse(folder, f"{TASK}noise:\n  kind: labels\n  fraction: 25e-2\n")
    assert read.settings["noise"] == noise[:1]
    both = replace(read, settings=read.settings | {"noise": noise})
    assert parse(folder, dump(both)).settings["noise"] == noise
