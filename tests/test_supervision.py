"""What is taught, by whom and with which weight, against the definition written out in loops (design, section 5)."""

import random
from types import SimpleNamespace

import pytest
import slow
import torch
from torch.nn.functional import log_softmax

from osprey import supervision, training
from osprey.distill import (
    Distiller,
    DistillTrainer,
    DrawnDepth,
    collate,
    compact_embedding,
    distill,
    sample,
    within_budget,
)
from osprey.params import Distill, UserError

STEPS, DECAY = 3, 0.8
REDUCED = tuple(v for v in range(512) if v % 4)
MASKS = [
    "000111111111",  # to the very end
    "001110222222000",  # turns, and a tail that is nobody's
    "0112",  # shorter than the chain, then one token
    "0",
    "",
    "00000",
    "01",
    "0111222333",  # adjacent turns
    "1111",  # no prompt: nothing is known of the first token
    "0010",  # one token
]


def turns(mask: str) -> list[tuple[int, int]]:
    """First position of every turn, and the position after its last."""
    edges = [p for p in range(len(mask) + 1) if p in (0, len(mask)) or mask[p] != mask[p - 1]]
    return [(a, b) for a, b in zip(edges, edges[1:]) if mask[a] != "0"]


def taught(mask: str, drafted: list[bool], steps: int) -> set[tuple[int, int]]:
    """All (i, k) of the design: a chain starts inside a turn at token i + 1; step k predicts a token of that turn,
    taught at the position before it, unless the target's greedy token there cannot be drafted."""
    pairs = set()
    for first, end in turns(mask):
        for start in range(max(first, 1), end):
            for k in range(steps):
                predicted = start + 1 + k
                if predicted < end and drafted[predicted - 1]:
                    pairs.add((start - 1, k))
    return pairs


def random_mask(generator: random.Random) -> str:
    mask = "0" * generator.randrange(0, 4)
    for turn in range(1, generator.randrange(1, 5)):
        mask += str(turn) * generator.choice([1, 1, 2, 3, 4, 7]) + "0" * generator.choice([0, 0, 1, 3])
    return mask


@pytest.mark.parametrize("mask", MASKS + [random_mask(random.Random(seed)) for seed in range(60)])
def test_taught_pairs_are_the_definitions(mask):
    response_T = torch.tensor([int(digit) for digit in mask], dtype=torch.uint8)
    generator = random.Random(mask)
    for share in (1.0, 0.6):
        drafted = [generator.random() < share for _ in mask]
        starts_S = supervision.chain_starts(response_T)
        pairs_KS = supervision.taught_pairs(response_T, starts_S, 5, torch.tensor(drafted, dtype=torch.bool))
        assert pairs_KS.shape == (5, len(starts_S))
        made = {(int(starts_S[s]), int(k)) for k, s in torch.nonzero(pairs_KS)}
        assert made == taught(mask, drafted, 5)
        everything = taught(mask, [True] * len(mask), 5)
        assert starts_S.tolist() == sorted({i for i, k in everything if k == 0})  # chains do not depend on the list


def test_the_first_draft_position_of_a_response_is_taught():
    starts_S = supervision.chain_starts(torch.tensor([0, 0, 0, 1, 1, 1]))
    assert starts_S.tolist() == [2, 3]  # index 2 holds token 3, the response's first: what the first draft follows


def distiller(drafter, target, ids, softcap=None) -> Distiller:
    return Distiller(drafter, target.get_output_embeddings().weight.detach()[list(ids)], softcap, STEPS, DECAY)


def batch_of(drafter, responses) -> list[dict]:
    return [sample(response, STEPS, drafter.t2d) for response in responses]


def gradients(loss, drafter):
    names, parameters = zip(*drafter.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def plain_loss(drafter, responses, masks, target, ids, softcap):
    """Eq. 5 in loops: sum_k decay^k sum_i CE_ik / N, the teacher the target's whole distribution cut to `ids`."""
    total, count = 0.0, 0
    for response, mask in zip(responses, masks):
        logits_TV = target(response.tokens[None]).logits[0].detach()
        if softcap:
            logits_TV = softcap * torch.tanh(logits_TV / softcap)
        drafted = [int(greedy) in ids for greedy in logits_TV.argmax(-1)]
        pairs = taught(mask, drafted, STEPS)
        count += sum(k == 0 for _, k in pairs)
        for start in sorted({i for i, _ in pairs}):
            states = slow.chain(drafter, response.tokens.tolist(), response.taps, start, STEPS)
            for k in sorted(k for i, k in pairs if i == start):
                whole_V = logits_TV[start + 1 + k].softmax(-1)
                teacher_V = whole_V[list(ids)] / whole_V[list(ids)].sum()
                total = total - DECAY**k * (teacher_V * log_softmax(slow.logits(drafter, states[k]), -1)).sum()
    return total / count


@pytest.mark.parametrize("interface,layers,ids,softcap", [
    ("osprey", 2, tuple(range(512)), None), ("osprey", 1, REDUCED, None), ("osprey", 1, REDUCED, 2.0),
    ("eagle3", 1, tuple(range(512)), None), ("eagle3", 2, REDUCED, None),
])  # fmt: skip
def test_the_loss_and_its_gradients_are_eq_5(interface, layers, ids, softcap, make_drafter, make_response, target):
    masks = ["00111111", "0110222200", "00011111"]
    responses = [make_response(mask, seed) for seed, mask in enumerate(masks)]
    drafter = make_drafter(interface, layers=layers, ids=ids)
    samples = batch_of(drafter, responses)
    if ids == REDUCED:
        assert not all(drafter.t2d[response.greedy].all() for response in responses)
    loss = distiller(drafter, target, ids, softcap)(**collate(samples))["loss"]
    expected = plain_loss(drafter, responses, masks, target, ids, softcap)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    made, wanted = gradients(loss, drafter), gradients(expected, drafter)
    for name, gradient in wanted.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(made[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_drawn_depths_have_the_expectation_of_eq_5(make_drafter, make_response, target):
    drafter = make_drafter("osprey", ids=REDUCED)
    model, batch = distiller(drafter, target, REDUCED), collate(batch_of(drafter, [make_response("00111111")]))
    wanted = gradients(model(**batch)["loss"], drafter)
    expected = dict.fromkeys(wanted, 0.0)
    for depth in range(1, STEPS + 1):  # a depth is reached with probability decay^(depth - 1), the last one is final
        chance = DECAY ** (depth - 1) - (DECAY**depth if depth < STEPS else 0)
        model.depth = depth
        for name, gradient in gradients(model(**batch)["loss"], drafter).items():
            expected[name] = expected[name] + chance * gradient
    for name, gradient in wanted.items():
        torch.testing.assert_close(expected[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_depths_are_drawn_with_these_probabilities(make_drafter, target):
    model, drawn = distiller(make_drafter("osprey"), target, range(512)), []
    for step in range(4000):
        DrawnDepth(3).on_step_begin(None, SimpleNamespace(global_step=step), None, model=model)
        drawn.append(model.depth)
    for depth in range(1, STEPS + 1):
        reached = DECAY ** (depth - 1)
        share = sum(d >= depth for d in drawn) / len(drawn)
        assert abs(share - reached) < 4 * (reached * (1 - reached) / len(drawn)) ** 0.5 + 1e-9
    assert max(drawn) == STEPS
    DrawnDepth(3).on_step_begin(None, SimpleNamespace(global_step=17), None, model=model)
    assert model.depth == drawn[17]  # a resumed run draws the same


def test_a_batch_of_three_is_three_batches_of_one_with_the_shared_n(make_drafter, make_response, target):
    responses = [make_response(mask, seed) for seed, mask in enumerate(["0001111", "011", "0222201111111"])]
    drafter = make_drafter("osprey")
    samples = batch_of(drafter, responses)
    model = distiller(drafter, target, range(512))
    together, singles = collate(samples), [collate([item]) for item in samples]
    count = sum(int((single["labels"] != -100).sum()) for single in singles)
    assert count == int((together["labels"] != -100).sum()) == 3 + 1 + 3 + 6
    whole = model(**together)["loss"]
    parts = [model(**single, num_items_in_batch=torch.tensor(count))["loss"] for single in singles]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-5, atol=0)
    for (name, a), b in zip(gradients(whole, drafter).items(), gradients(sum(parts), drafter).values()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()), msg=name)


def test_a_longer_neighbour_only_pads(make_drafter, make_response, target):
    short, long = make_response("00111", 1), make_response("0" * 20, 2)  # the long one teaches nothing
    drafter = make_drafter("osprey")
    model = distiller(drafter, target, range(512))
    alone, padded = collate(batch_of(drafter, [short])), collate(batch_of(drafter, [short, long]))
    assert padded["tokens"].shape == (2, 20)
    torch.testing.assert_close(model(**padded)["loss"], model(**alone)["loss"], rtol=1e-5, atol=0)


def updated(drafter, samples, target, folder, batch: int, accumulation: int):
    """The weights after one update of a real training run, and its logged loss. SGD shows the gradient as it is."""
    section = Distill(tokens=1, batch=batch, accumulation=accumulation, precision="fp32", clip=1e9)
    args = training.arguments(folder, 1, section, 1.0, 0, save_every=1)
    model = distiller(drafter, target, range(512))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    trainer = DistillTrainer(model, args, train_dataset=samples, data_collator=collate, optimizers=(optimizer, None))
    history = training.train(trainer, "test")
    return dict(drafter.named_parameters()), float(history["loss"].iloc[0])


def test_accumulation_equals_one_large_batch_in_training(make_drafter, make_response, target, tmp_path):
    masks = ["0001111", "011", "0222201111111"]
    responses = [make_response(mask, seed) for seed, mask in enumerate(masks)]
    weights, losses = [], []
    for batch, accumulation in ((3, 1), (1, 3)):
        drafter = make_drafter("osprey")
        folder = tmp_path / str(batch)
        made, loss = updated(drafter, batch_of(drafter, responses), target, folder, batch, accumulation)
        weights.append(made)
        losses.append(loss)
    start = make_drafter("osprey")
    expected = plain_loss(start, responses, masks, target, range(512), None)
    assert losses == pytest.approx([expected.item()] * 2, rel=1e-4)
    gradient = gradients(expected, start)
    for name, before in start.named_parameters():
        for after in weights:
            close = {"rtol": 1e-3, "atol": 1e-4 * float(gradient[name].abs().max())}
            torch.testing.assert_close(before - after[name], gradient[name], **close, msg=name)


@pytest.mark.parametrize("interface", ["osprey", "eagle3"])
def test_a_turn_knows_nothing_of_the_next(interface, make_drafter, make_response, target):
    whole, end = "0001111102222", 8
    response = make_response(whole)
    drafter = make_drafter(interface)
    model = distiller(drafter, target, range(512))

    def first_turn(item):
        """The batch, with turn 2 not taught, and where turn 1 is taught in the whole."""
        pairs_KS, inside_S = item["pairs"], item["starts"] < end - 2
        return pairs_KS[:, inside_S], collate([item | {"pairs": pairs_KS & inside_S}])

    pairs, batch = first_turn(sample(response, STEPS, drafter.t2d))
    assert pairs.any() and len(pairs[0]) == 4
    loss = model(**batch)["loss"]
    for field in ("tokens", "greedy", "taps", "last"):
        getattr(response, field)[end:] = getattr(make_response(whole, seed=1), field)[end:]
    changed_pairs, changed = first_turn(sample(response, STEPS, drafter.t2d))
    assert not torch.equal(batch["tokens"], changed["tokens"])
    assert torch.equal(pairs, changed_pairs)
    assert torch.equal(batch["rows"], changed["rows"]) and torch.equal(batch["labels"], changed["labels"])
    assert torch.equal(batch["teacher"], changed["teacher"])
    torch.testing.assert_close(model(**changed)["loss"], loss, rtol=1e-6, atol=0)


def starts(response) -> list[int]:
    return supervision.chain_starts(response.response).tolist()


def test_within_budget_takes_exactly_the_budget_from_the_front(make_response):
    responses = [make_response(mask, seed) for seed, mask in enumerate(["00111", "01", "0111102222", "00", "011111"])]
    every = [(r, start) for r, response in enumerate(responses) for start in starts(response)]
    assert len(every) == 2 + 0 + 3 + 3 + 0 + 4
    for budget in range(1, len(every) + 1):
        chosen = within_budget(responses, budget, "run")
        assert all(starts(cut) for cut in chosen)  # none that teaches nothing
        assert sum(len(starts(cut)) for cut in chosen) == budget
        kept = []
        for cut in chosen:
            length = len(cut.tokens)
            r = next(r for r, whole in enumerate(responses) if torch.equal(whole.tokens[:length], cut.tokens))
            kept += [(r, start) for start in starts(cut)]
            for field in ("tokens", "response", "greedy", "taps", "last"):
                assert torch.equal(getattr(cut, field), getattr(responses[r], field)[:length])
        assert kept == every[:budget]


def test_a_budget_beyond_the_rollouts_is_refused_in_one_line(make_response):
    responses = [make_response("00111"), make_response("0000")]
    with pytest.raises(UserError, match="distill.tokens: run wants 3, its rollouts have 2") as refused:
        within_budget(responses, 3, "run")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mask,ids,named", [
    ("000000", range(512), "rollouts have 0"),  # a template without its response marked
    ("000111", None, "nothing is supervised"),  # no greedy token can be drafted
])  # fmt: skip
def test_nothing_to_learn_is_refused_in_one_line(mask, ids, named, make_converted, make_response, tmp_path):
    response = make_response(mask)
    ids = ids or [v for v in range(512) if v not in response.greedy.tolist()]
    section, converted = Distill(tokens=1, precision="fp32"), make_converted("osprey", ids=ids)
    with pytest.raises(UserError, match=named) as refused:
        distill(converted, [response], section, 1e-3, 0, "run", tmp_path / "kept", tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_training_the_rows_that_occur_equals_training_all(make_drafter, make_response, target):
    responses = [make_response("000" + "1" * 9, seed) for seed in range(4)]
    compact, dense = make_drafter("osprey"), make_drafter("osprey")
    start = dense.embed_tokens.weight.detach().clone()
    samples = batch_of(dense, responses)
    renumbered = [dict(item) for item in samples]
    used = compact_embedding(compact, renumbered)
    assert len(compact.embed_tokens.weight) == len(used) < 60
    assert used.tolist() == sorted({int(token) for response in responses for token in response.tokens})
    for drafter, items in ((compact, renumbered), (dense, samples)):
        model = distiller(drafter, target, range(512))
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
        for item in items:
            optimizer.zero_grad()
            model(**collate([item]))["loss"].backward()
            optimizer.step()
    untouched = [v for v in range(512) if v not in used]
    assert torch.equal(dense.embed_tokens.weight[untouched], start[untouched])
    assert (compact.embed_tokens.weight - start[used]).abs().max().item() > 1e-3
    torch.testing.assert_close(compact.embed_tokens.weight, dense.embed_tokens.weight[used], rtol=0, atol=1e-5)
    for (name, a), b in zip(compact.named_parameters(), dense.parameters()):
        if name != "embed_tokens.weight":
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)
