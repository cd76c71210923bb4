"""Cross entropy over a large vocabulary without ever holding the [rows, vocabulary] logits whole.

The gradients are computed in the forward pass, chunk by chunk, while a chunk's logits exist: nothing but the
weight, its gradient and one [chunk, vocabulary] block at a time is in memory, forward or backward.
Shapes: N rows, D width of the drafter, V vocabulary of the head, P positions taught, H width of the target.
"""

from dataclasses import dataclass

import torch

CHUNK = 1024  # rows of logits alive at once


@dataclass
class Teacher:
    """The target's distribution at P positions, kept as what it is made of: head times last hidden state."""

    states_PH: torch.Tensor
    head_VH: torch.Tensor  # the target's head, the drafter's vocabulary rows only: renormalised by the softmax
    softcap: float | None = None  # final_logit_softcapping of the target

    def probabilities(self, positions: slice) -> torch.Tensor:
        head_VH = self.head_VH
        logits_nV = (self.states_PH[positions].to(head_VH.dtype) @ head_VH.T).float()
        if self.softcap:
            logits_nV = self.softcap * torch.tanh(logits_nV / self.softcap)
        return logits_nV.softmax(-1)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, head_VD, weight_N, labels_N, teacher, chunk):
        device = hidden_ND.device.type
        # autocast does not reach into the in-place arithmetic below: the casts are ours
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        head = head_VD.to(dtype)
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_head_VD = torch.zeros_like(head_VD) if wants_head else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            hidden, weight, label = hidden_ND[rows].to(dtype), weight_N[rows].float(), labels_N[rows]
            logits = hidden @ head.T  # [n, V]
            student = logits.softmax(-1, dtype=torch.float32)
            top, at = logits.max(-1, keepdim=True)
            log_sum = (top.float() - student.gather(-1, at).log()).squeeze(-1)  # the top's probability never underflows
            if teacher is None:
                picked = logits.gather(-1, label[:, None]).squeeze(-1).float()
            else:  # labels are positions in ascending order: the chunk's are one short range, softmaxed once
                first, last = int(label[0]), int(label[-1])
                probability = teacher.probabilities(slice(first, last + 1))[label - first]
                picked = torch.linalg.vecdot(probability, logits.float())
            total += torch.dot(weight, log_sum - picked)
            if not (wants_hidden or wants_head):
                continue
            grad = student  # becomes (student - teacher) * weight, in place
            if teacher is None:
                grad[torch.arange(len(grad), device=grad.device), label] -= 1
            else:
                grad -= probability
            grad = grad.mul_(weight[:, None]).to(dtype)
            if wants_hidden:
                grad_hidden_ND[rows] = grad @ head
            if wants_head:
                grad_head_VD += grad.T @ hidden
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden_ND, grad_head_VD = ctx.saved_tensors
        return (
            grad_hidden_ND * grad_output if grad_hidden_ND is not None else None,
            grad_head_VD * grad_output if grad_head_VD is not None else None,
            None, None, None, None,
        )  # fmt: skip


def cross_entropy(hidden_ND, head_VD, labels_N, weight_N, chunk: int = CHUNK) -> torch.Tensor:
    """sum_n weight_n · CE(label_n, softmax(head · hidden_n)), a scalar in nats. Labels are vocabulary ids."""
    return ChunkedCrossEntropy.apply(hidden_ND, head_VD, weight_N, labels_N, None, chunk)


def soft_cross_entropy(hidden_ND, head_VD, teacher: Teacher, position_N, weight_N, chunk: int = CHUNK) -> torch.Tensor:
    """sum_n weight_n · CE(p(· | position_n), softmax(head · hidden_n)), a scalar in nats (eq. 5, one row a term).

    `position_N` indexes the teacher's P positions and must be ascending, so that the K training-time-test steps
    that are taught at one position share one teacher softmax.
    """
    return ChunkedCrossEntropy.apply(hidden_ND, head_VD, weight_N, position_N, teacher, chunk)
