"""Stage 4: distil the target into a drafter by EAGLE-3's training-time test (eq. 5)."""

import os
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from osprey import checkpoint, models, rollouts, supervision, training
from osprey.drafter import Drafter
from osprey.loss import Teacher, soft_cross_entropy
from osprey.params import Distill, UserError
from osprey.records import position
from osprey.unroll import unroll


class Distiller(nn.Module):
    """The drafter beside the part of the frozen target that teaches it, its head; forward is eq. 5."""

    def __init__(self, drafter: Drafter, head_VH: torch.Tensor, softcap: float | None, steps: int, decay: float):
        super().__init__()
        self.drafter, self.steps, self.decay, self.softcap = drafter, steps, decay, softcap
        self.depth = None  # draft steps of this update, where they are drawn: see DrawnDepth
        self.register_buffer("head_VH", head_VH, persistent=False)

    def forward(self, tokens, taps, starts, teacher, rows, labels, num_items_in_batch=None):
        """Loss of one micro-batch: sum_k decay^k sum_i CE_ik / N, N = num_items_in_batch (labels counts it).

        tokens [B, T], taps [B, T, 3H], starts [B, S]; teacher [P, H]: last hidden states of the positions that teach.
        rows [R, 3] int64, one per taught (step k, chain b·S + s, teaching position), ascending in the last.
        """
        hidden_KBSD = torch.stack(list(unroll(self.drafter, tokens, taps, starts, self.depth or self.steps)))
        step_R, chain_R, position_R = rows[rows[:, 0] < len(hidden_KBSD)].unbind(-1)
        hidden_RD = self.drafter.norm(hidden_KBSD.flatten(1, 2)[step_R, chain_R])
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        weight_R = (1.0 if self.depth else self.decay) ** step_R / items
        target = Teacher(teacher, self.head_VH, self.softcap)
        return {"loss": soft_cross_entropy(hidden_RD, self.drafter.lm_head.weight, target, position_R, weight_R)}


def sample(response: rollouts.Response, steps: int, t2d: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one response teaches: tokens, taps, chain starts, taught pairs and the states that teach them."""
    starts = supervision.chain_starts(response.response)
    pairs_KS = supervision.taught_pairs(response.response, starts, steps, t2d[response.greedy])
    return {
        "tokens": response.tokens,
        "taps": response.taps,
        "last": response.last,
        "starts": starts,
        "pairs": pairs_KS,
    }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A micro-batch for `Distiller.forward`: padded on the right, where nothing is taught or attended to."""
    starts = pad_sequence([s["starts"] for s in samples], batch_first=True)
    rows, teacher, offset = [], [], 0
    for b, item in enumerate(samples):
        step_R, chain_R = torch.nonzero(item["pairs"], as_tuple=True)
        taught_at_R = item["starts"][chain_R] + 1 + step_R
        positions, index_R = taught_at_R.unique(return_inverse=True)
        rows.append(torch.stack([step_R, chain_R + b * starts.shape[1], index_R + offset], dim=-1))
        teacher.append(item["last"][positions])
        offset += len(positions)
    rows = torch.cat(rows)
    labels = pad_sequence([torch.where(s["pairs"][0], 1, -100) for s in samples], batch_first=True, padding_value=-100)
    return {
        "tokens": pad_sequence([s["tokens"] for s in samples], batch_first=True),
        "taps": pad_sequence([s["taps"] for s in samples], batch_first=True).float(),
        "starts": starts,
        "teacher": torch.cat(teacher),
        "rows": rows[rows[:, 2].argsort(stable=True)],
        "labels": labels,  # N: the step-0 positions that are taught
    }


class DrawnDepth(TrainerCallback):
    """Draws how many draft steps each update unrolls, step k with probability decay^k, and weights them all alike.

    The loss has eq. 5's expectation at 3.4 steps instead of 5 (K = 5, decay 0.8). A draw depends on seed and update
    alone, so a resumed run draws the same.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        drawn, model.depth = position(self.seed, f"depth {state.global_step}"), 1
        while model.depth < model.steps and drawn < model.decay**model.depth:
            model.depth += 1


class DistillTrainer(training.StageTrainer):
    def _get_num_items_in_batch(self, batch_samples, device):
        taught = sum((batch["labels"] != -100).sum() for batch in batch_samples).to(device)
        return self.accelerator.gather(taught).sum()


def within_budget(responses: list[rollouts.Response], budget: int, run: str) -> list[rollouts.Response]:
    """The first responses with exactly `budget` chain starts between them; the last one is cut to fit."""
    chosen, left = [], budget
    for response in responses:
        starts = supervision.chain_starts(response.response)
        if not len(starts):
            continue
        if len(starts) > left:
            end = int(starts[left - 1]) + 3  # keep the token that the last chain's step 0 predicts
            response = rollouts.Response(**{key: tensor[:end] for key, tensor in vars(response).items()})
        chosen.append(response)
        left -= min(left, len(starts))
        if not left:
            return chosen
    raise UserError(
        f"distill.tokens: {run} wants {budget}, its rollouts have {budget - left}; raise rollouts.prompts.adaptation"
    )


def compact_embedding(drafter: Drafter, samples: list[dict]) -> torch.Tensor:
    """Shrink the embedding to the rows that occur and renumber the samples' tokens; returns the ids of the rows.

    A row that never occurs has no gradient, and at weight decay 0 AdamW leaves it alone: leaving it out is exact.
    """
    used = torch.cat([item["tokens"] for item in samples]).unique()
    renumber = torch.zeros(drafter.config.vocab_size, dtype=torch.int64)
    renumber[used] = torch.arange(len(used))
    for item in samples:
        item["tokens"] = renumber[item["tokens"]]
    small = nn.Embedding(len(used), drafter.config.hidden_size)
    small.weight.data.copy_(drafter.embed_tokens.weight.data[used])
    small.weight.requires_grad = drafter.embed_tokens.weight.requires_grad
    drafter.embed_tokens = small
    return used


def read_teacher(file: Path) -> dict[str, torch.Tensor]:
    """head [V, H] and softcap, as convert wrote them. Raises UserError when the file is missing or cut short."""
    try:
        return load_file(file)
    except Exception as error:  # safetensors has its own kinds, none of them public
        raise UserError(f"{file}: cannot be read ({error}); run the convert stage again") from None


def distill(
    converted: Path,
    responses: list[rollouts.Response],
    section: Distill,
    lr: float,
    seed: int,
    run: str,
    kept: Path,
    out: Path,
) -> pd.DataFrame:
    """Train the converted drafter on one pass over `section.tokens` chain starts; write the folder `out`.

    `kept` is the stage's resume folder. Returns step, tokens (chain starts so far), lr and loss of every update.
    Raises UserError when the rollouts are too few or nothing is supervised.
    """
    drafter = checkpoint.load(converted)
    teacher = read_teacher(converted / "teacher.safetensors")
    samples = [sample(r, section.steps, drafter.t2d) for r in within_budget(responses, section.tokens, run)]
    samples = [item for item in samples if item["pairs"][0].any()]
    if not samples:
        raise UserError(f"{run}: nothing is supervised; no greedy token of its rollouts is in the draft vocabulary")
    if not drafter.config.swap_h_and_emb:
        drafter.embed_tokens.weight.requires_grad = False  # EAGLE-3 keeps the target's embedding
    whole = drafter.embed_tokens
    used = compact_embedding(drafter, samples)

    together = section.batch * section.accumulation * int(os.environ.get("WORLD_SIZE", 1))
    steps = -(-len(samples) // together)
    args = training.arguments(
        kept / "trainer", steps, section, lr, seed, save_every=max(1, steps // 4), weight_decay=0.0
    )
    head_VH = teacher["head"].to(rollouts.DTYPES[section.precision])
    distiller = Distiller(drafter, head_VH, float(teacher["softcap"]) or None, section.steps, section.decay)
    trainer = DistillTrainer(
        distiller, args, train_dataset=samples, data_collator=collate,
        callbacks=[training.Report(run), *([DrawnDepth(seed)] if section.depth == "drawn" else [])],
    )  # fmt: skip
    history = training.train(trainer, run)
    passed = pd.Series([len(item["starts"]) for item in samples]).cumsum()
    history.insert(1, "tokens", [int(passed.iloc[min(step * together, len(passed)) - 1]) for step in history["step"]])

    whole.weight.data[used] = drafter.embed_tokens.weight.data.to(whole.weight.device)  # the Trainer moved the drafter
    drafter.embed_tokens = whole
    with models.finished(out) as made:
        checkpoint.save(drafter.eval(), made)
        models.load_tokenizer(converted).save_pretrained(made)
        history.to_csv(made / "history.csv", index=False, float_format="%.6g")
    return history


def stage(params, name: str, kept: Path, root: Path) -> pd.DataFrame:
    """Run `name` of params.runs on the stage outputs under `root`; returns its history."""
    run = params.runs[name]
    converted = root / "data/converted" / f"{run.target}-{run.recipe}"
    responses = rollouts.read(root / "data/rollouts" / run.target / run.domain / "adaptation.safetensors")
    out = root / "data/drafters" / run.target / run.recipe / name
    return distill(converted, responses, params.distill, run.lr, params.seed, name, kept, out)
