"""Tiny random models, made once per session, and drafters converted from them."""

from pathlib import Path

import pytest
import torch

from osprey import checkpoint, models, prune, taps
from osprey.convert import convert
from osprey.drafter import Drafter
from osprey.params import Random, Recipe, Target
from osprey.rollouts import Response

torch.set_num_threads(1)

TAPS = [1, 3, 4]  # of the 8-layer target: EAGLE-3's own choice


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """make_model(architecture, layers, ...) → the folder of a random bf16 model, the same folder for equal arguments.

    Models of equal `vocabulary` have equal tokenizers (512 ids by default). Two key-value heads, four query heads.
    """
    made = {}

    def make(architecture="llama", layers=4, width=64, head_dim=16, vocabulary=512, seed=0) -> Path:
        spec = Random(
            architecture=architecture, layers=layers, width=width, heads=4, kv_heads=2, head_dim=head_dim,
            vocabulary=vocabulary, seed=seed,
        )  # fmt: skip
        key = repr(spec)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{layers}-")
            models.make_random(spec, made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def target_folder(make_model) -> Path:
    """The target: Llama, 8 layers, width 64 (4 heads of 16), vocabulary 512. Its taps are layers 1, 3, 4."""
    return make_model("llama", layers=8)


@pytest.fixture(scope="session")
def target(target_folder):
    """The target's model, fp32, eval mode."""
    return models.load_model(target_folder, torch.float32)


@pytest.fixture(scope="session")
def make_response(target):
    """make_response("000111002222", seed) → a Response: random tokens with the target's fp32 taps, states and argmax.

    The mask gives one digit a token: 0 outside the responses, else the number of the turn.
    """

    def make(mask: str, seed: int = 0) -> Response:
        generator = torch.Generator().manual_seed(seed)
        tokens_T = torch.randint(target.config.vocab_size, (len(mask),), generator=generator)
        taps_TC, last_TH, greedy_T = taps.forward(target, tokens_T, TAPS)
        response_T = torch.tensor([int(digit) for digit in mask], dtype=torch.uint8)
        return Response(tokens_T, response_T, greedy_T, taps_TC, last_TH)

    return make


@pytest.fixture(scope="session")
def source_folder(make_model) -> Path:
    """The source: Qwen3, 4 layers, width 48 (4 heads of 24: 96 is not the width), the target's tokenizer."""
    return make_model("qwen3", layers=4, width=48, head_dim=24, seed=1)


@pytest.fixture(scope="session")
def other_source_folder(make_model) -> Path:
    """A source like `source_folder` with a smaller vocabulary of its own, 400, so that alignment has work to do."""
    return make_model("qwen3", layers=4, width=48, head_dim=24, vocabulary=400, seed=1)


@pytest.fixture(scope="session")
def make_pruned(tmp_path_factory):
    """make_pruned(source folder, layers) → the folder of its first blocks, the same folder for equal arguments."""
    made = {}

    def make(source: Path, layers: int = 2) -> Path:
        if (source, layers) not in made:
            made[source, layers] = tmp_path_factory.mktemp("pruned") / "pruned"
            prune.prune(source, layers, made[source, layers])
        return made[source, layers]

    return make


@pytest.fixture(scope="session")
def make_converted(tmp_path_factory, target_folder, source_folder, make_pruned):
    """make_converted(interface, ...) → the folder that Stage 3 writes, the same folder for equal arguments.

    `interface`: "osprey" (the pruned source) or "eagle3" (random). `layers`: of the drafter. `ids`: the sorted
    target ids of the draft vocabulary, all 512 by default.
    """
    made = {}

    def make(interface: str, layers: int = 2, source: Path = source_folder, ids=range(512)) -> Path:
        key = interface, layers, source, tuple(ids)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(interface) / "converted"
            osprey = interface == "osprey"
            recipe = (
                Recipe(interface="osprey", body="pruned") if osprey
                else Recipe(interface="eagle3", body="random", layers=layers)
            )  # fmt: skip
            body = make_pruned(source, layers) if osprey else None
            convert(recipe, body, source, target_folder, Target(), list(ids), 0, made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_drafter(make_converted):
    """make_drafter(interface, ..., stirred=True) → a Drafter for the tiny target, fp32, eval mode, fresh every time.

    Arguments are make_converted's. A `stirred` one has noise on every weight, as if trained: the context then
    matters, which at Osprey's start it does not, and logits depend on every parameter. `stirred=False` is Stage 3's.
    """

    def make(interface: str, stirred: bool = True, **arguments) -> Drafter:
        drafter = checkpoint.load(make_converted(interface, **arguments))
        if stirred:
            generator = torch.Generator().manual_seed(1)
            for parameter in drafter.parameters():
                scale = 0.2 if parameter.dim() == 1 else 0.5 / parameter.shape[1] ** 0.5
                parameter.data += scale * torch.randn(parameter.shape, generator=generator)
        return drafter

    return make
