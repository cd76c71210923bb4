"""Bad parameter files: one line that names the key and the mend."""

import copy

import pytest
import yaml
from walk import ROOT

from osprey import params

GOOD = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())


def changed(path, value):
    """The smoke preset with one dotted key set (or removed: None)."""
    tree = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node = tree
    for part in parents:
        node = node[part]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return tree


CASES = {
    "misspelt section": ("pretain", {"steps": 5}, "pretain: no such key"),
    "misspelt key": ("distill.tokns", 5, "distill.tokns: no such key"),
    "missing key": ("distill.tokens", None, "distill.tokens: Field required"),
    "wrong type": ("distill.tokens", "many", "distill.tokens: Input should be a valid integer (given: 'many')"),
    "1e-4 is text in YAML": (
        "runs.tiny-osprey-chat.lr",
        "1e-4",
        "runs.tiny-osprey-chat.lr: Input should be a valid number",
    ),
    "impossible value": (
        "pretrain.window",
        0,
        "pretrain.window: Input should be greater than or equal to 2 (given: 0)",
    ),
    "unknown recipe": ("runs.tiny-osprey-chat.recipe", "ospry", "'ospry' is not among recipes (osprey, eagle3-1l)"),
    "unknown domain": ("runs.tiny-osprey-chat.domain", "maths", "'maths' is not among domains (chat, math)"),
    "unknown target": ("runs.tiny-osprey-chat.target", "big", "'big' is not among targets (tiny)"),
    "run without a drafter": ("drafters.tiny-osprey", None, "drafter: 'tiny-osprey' is not among drafters"),
    "target without a model": ("targets.other", {}, "targets.other: 'other' is not among models (tiny)"),
    "not three taps": ("targets.tiny.taps", [1, 2], "targets.tiny.taps: List should have at least 3 items"),
    "dots in a name": ("models.a.b", {}, "models.a"),
    "hub without revision": ("models.tiny", {"hub": "a/b"}, "models.tiny: hub needs revision"),
    "two origins": ("models.tiny", {"hub": "a/b", "revision": "c", "path": "d"}, "models.tiny: give exactly one of"),
    "eagle3 with a backbone": (
        "recipes.eagle3-1l",
        {"interface": "eagle3", "body": "backbone"},
        "recipes.eagle3-1l: an eagle3",
    ),
    "shares that do not add up": (
        "corpus.texts.problems.share",
        0.7,
        "corpus: the shares of texts add up to 1.2000, not 1",
    ),
    "template without prompt": ("domains.chat.template", "hello", "domains.chat: template must contain {prompt}"),
    "drafter under another name": (
        "drafters",
        {"mine": {"target": "tiny", "recipe": "osprey"}},
        "drafters.mine: must be named",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_parameters_are_one_line(case, tmp_path):
    path, value, message = CASES[case]
    if case == "dots in a name":
        tree = copy.deepcopy(GOOD)
        tree["models"]["a.b"] = GOOD["models"]["tiny"]
    else:
        tree = changed(path, value)
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(params.UserError) as caught:
        params.load(file)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("params.yaml: ") and message in line


def test_a_drafter_without_a_run_is_one_line(tmp_path):
    tree = copy.deepcopy(GOOD)
    tree["runs"] = {name: run for name, run in tree["runs"].items() if run["recipe"] == "osprey"}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(params.UserError, match="drafters.tiny-eagle3-1l: no run uses it"):
        params.load(tmp_path / "params.yaml")


def test_the_good_file_is_good(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    assert params.load(file).distill.steps == 5


def test_missing_and_broken_files_are_one_line(tmp_path):
    with pytest.raises(params.UserError, match="no such file; copy one from presets/"):
        params.load(tmp_path / "params.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: 2")
    with pytest.raises(params.UserError, match="broken.yaml: not YAML: ") as caught:
        params.load(tmp_path / "broken.yaml")
    assert "\n" not in str(caught.value)
