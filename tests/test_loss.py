"""The chunked loss against the plain one in float64, and that a distillation step never holds the whole logits."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from osprey import distill, rollouts
from osprey.drafter import Drafter
from osprey.loss import CHUNK, Teacher, cross_entropy, soft_cross_entropy

N, D, V, P, H = 23, 8, 37, 9, 6  # rows, drafter width, vocabulary, positions that teach, target width
CHUNKS = (1, 4, N, 1000)
REDUCED = torch.arange(0, V, 3)


@pytest.fixture
def made():
    """hidden [N, D], head [V, D], weight [N], labels [N]; and the teacher's side: states, head, ascending positions."""
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator)
    every = torch.arange(P).repeat_interleave(2)
    position_N = torch.cat([every, torch.randint(P, (N - 2 * P,), generator=generator)]).sort().values
    return {
        "hidden": random(N, D), "head": random(V, D), "weight": torch.rand(N, generator=generator),
        "labels": torch.randint(V, (N,), generator=generator), "states": 2 * random(P, H), "target": 2 * random(V, H),
        "position": position_N,
    }  # fmt: skip


def learned(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def plain_hard(hidden_ND, head_VD, labels_N, weight_N):
    """One row after the other, in float64."""
    total = 0
    for hidden, label, weight in zip(hidden_ND, labels_N, weight_N):
        logits = head_VD @ hidden
        total = total + weight * (torch.logsumexp(logits, 0) - logits[label])
    return total


def plain_soft(hidden_ND, head_VD, states_PH, target_VH, kept, softcap, position_N, weight_N):
    """Likewise; the teacher's softmax is over the whole vocabulary, then cut to the `kept` ids and renormalised."""
    total = 0
    for hidden, position, weight in zip(hidden_ND, position_N, weight_N):
        taught = target_VH @ states_PH[position]
        if softcap:
            taught = softcap * torch.tanh(taught / softcap)
        p = taught.exp()[kept] / taught.exp()[kept].sum()
        total = total - weight * (p * torch.log_softmax(head_VD @ hidden, 0)).sum()
    return total


def compare(loss, parameters, plain_loss, plain_parameters, rtol, factor=1.0):
    """Value and gradients; the tolerance is relative to the largest element."""
    (loss * factor).backward()
    (plain_loss * factor).backward()
    pairs = [(loss.detach(), plain_loss.detach())]
    pairs += [(a.grad, b.grad) for a, b in zip(parameters, plain_parameters)]
    for mine, reference in pairs:
        assert mine.isfinite().all()
        error = (mine.double() - reference).abs().max()
        assert error <= rtol * reference.abs().max()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_hard_labels(made, chunk):
    ours = learned(made["hidden"], made["head"])
    plain = learned(made["hidden"].double(), made["head"].double())
    loss = cross_entropy(*ours, made["labels"], made["weight"], chunk)
    compare(loss, ours, plain_hard(*plain, made["labels"], made["weight"].double()), plain, rtol=2e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kept", [torch.arange(V), REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_soft_teacher(made, chunk, kept, softcap):
    ours = learned(made["hidden"], made["head"][kept])
    plain = learned(made["hidden"].double(), made["head"][kept].double())
    teacher = Teacher(made["states"], made["target"][kept], softcap)
    loss = soft_cross_entropy(*ours, teacher, made["position"], made["weight"], chunk)
    states, target, weight = (made[name].double() for name in ("states", "target", "weight"))
    reference = plain_soft(*plain, states, target, kept, softcap, made["position"], weight)
    compare(loss, ours, reference, plain, rtol=2e-6)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(made, frozen):
    hidden, head = learned(made["hidden"], made["head"])
    cross_entropy(hidden, head, made["labels"], made["weight"], 4).backward()
    both = {"hidden": hidden.grad, "head": head.grad}
    alone = {"hidden": made["hidden"].clone(), "head": made["head"].clone()}
    left = next(name for name in alone if name != frozen)
    alone[left].requires_grad_()
    cross_entropy(alone["hidden"], alone["head"], made["labels"], made["weight"], 4).backward()
    assert alone[frozen].grad is None
    torch.testing.assert_close(alone[left].grad, both[left], rtol=0, atol=0)


def test_scaled_and_added_losses(made):
    """Autograd may hand the loss any factor, and several micro-batches add up in the same gradients."""
    labels, weight = made["labels"], made["weight"]
    ours, plain = learned(made["hidden"], made["head"]), learned(made["hidden"].double(), made["head"].double())
    reference = plain_hard(*plain, labels, weight.double())
    compare(cross_entropy(*ours, labels, weight, 4), ours, reference, plain, rtol=2e-6, factor=3.0)
    split, whole = learned(made["hidden"], made["head"]), learned(made["hidden"], made["head"])
    for rows in (slice(0, 10), slice(10, N)):
        cross_entropy(split[0][rows], split[1], labels[rows], weight[rows], 4).backward()
    cross_entropy(*whole, labels, weight, 4).backward()
    for a, b in zip(split, whole):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_without_gradients(made):
    with torch.no_grad():
        quiet = cross_entropy(made["hidden"], made["head"], made["labels"], made["weight"], 4)
    reference = plain_hard(made["hidden"].double(), made["head"].double(), made["labels"], made["weight"].double())
    assert quiet.item() == pytest.approx(reference.item(), rel=1e-6) and not quiet.requires_grad


def test_logits_far_beyond_exp(made):
    """Logits in the thousands: an exp of one overflows, most probabilities are zero."""
    big = 300 * made["hidden"]
    ours, plain = learned(big, made["head"]), learned(big.double(), made["head"].double())
    loss = cross_entropy(*ours, made["labels"], made["weight"], 4)
    assert (made["head"] @ big.T).max() > 1000
    compare(loss, ours, plain_hard(*plain, made["labels"], made["weight"].double()), plain, rtol=1e-5)


def test_bf16_autocast(made):
    """Logits in bf16, sums and gradients in fp32."""
    ours = learned(made["hidden"], made["head"])
    plain = learned(made["hidden"].double(), made["head"].double())
    teacher = Teacher(made["states"].bfloat16(), made["target"].bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss = soft_cross_entropy(*ours, teacher, made["position"], made["weight"], 4)
    states, target, weight = (made[name].double() for name in ("states", "target", "weight"))
    reference = plain_soft(*plain, states, target, torch.arange(V), None, made["position"], weight)
    compare(loss, ours, reference, plain, rtol=2e-2)
    assert {loss.dtype, ours[0].grad.dtype, ours[1].grad.dtype} == {torch.float32}
    exact = soft_cross_entropy(*ours, teacher, made["position"], made["weight"], 4)
    assert loss.item() != exact.item()  # autocast was heeded


# One real distillation step at full size of vocabulary. The width equals the chunk: weights and their gradients,
# vocabulary x width, are then no exception to the rule.
VOCABULARY, WIDTH, STEPS = 151_936, 8, 3


class Sizes(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes, by operation, backward included."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.largest[str(func)] = max(self.largest.get(str(func), 0), tensor.numel())
        return made


def distillation_step(vocabulary: int, lengths: tuple[int, ...], rows: int) -> tuple[float, Sizes, list[torch.Tensor]]:
    """Loss, sizes and gradients of a `Distiller` step on responses with more than `rows` taught pairs."""
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    config.swap_h_and_emb, config.target_hidden_size, config.draft_vocab_size = True, WIDTH, vocabulary
    torch.manual_seed(0)
    drafter = Drafter(config)
    drafter.t2d[:] = True
    responses = [
        rollouts.Response(
            tokens=torch.randint(vocabulary, (length,)), response=(torch.arange(length) >= 5).to(torch.uint8),
            greedy=torch.randint(vocabulary, (length,)), taps=torch.randn(length, 3 * WIDTH),
            last=torch.randn(length, WIDTH),
        )
        for length in lengths
    ]  # fmt: skip
    distiller = distill.Distiller(drafter, torch.randn(vocabulary, WIDTH), None, STEPS, 0.8)
    with Sizes() as sizes:
        batch = distill.collate([distill.sample(response, STEPS, drafter.t2d) for response in responses])
        loss = distiller(**batch)["loss"]
        loss.backward()
    assert len(batch["rows"]) > rows
    return loss.item(), sizes, [parameter.grad for parameter in drafter.parameters()]


def plain_soft_cross_entropy(hidden_ND, head_VD, teacher, position_N, weight_N):
    """The formulation that the chunked one replaces."""
    p_NV = teacher.probabilities(slice(None))[position_N]
    return -(weight_N[:, None] * p_NV * torch.log_softmax(hidden_ND @ head_VD.T, -1)).sum()


def test_no_tensor_of_rows_times_vocabulary(monkeypatch):
    step = partial(distillation_step, VOCABULARY, (17, 13), rows=5 * WIDTH)  # several chunks
    monkeypatch.setattr(distill, "soft_cross_entropy", partial(soft_cross_entropy, chunk=WIDTH))
    loss, sizes, gradients = step()
    assert any("embedding_dense_backward" in name for name in sizes.largest)  # backward is watched
    assert max(sizes.largest.values()) == WIDTH * VOCABULARY  # a chunk, or a weight

    monkeypatch.setattr(distill, "soft_cross_entropy", plain_soft_cross_entropy)
    plain_loss, plain_sizes, plain_gradients = step()
    assert max(plain_sizes.largest.values()) > 5 * WIDTH * VOCABULARY
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_distillation_uses_the_default_chunk():
    _, sizes, _ = distillation_step(4000, (200, 200), rows=CHUNK)
    assert max(sizes.largest.values()) == CHUNK * 4000
