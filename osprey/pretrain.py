"""Stage 2: next-token pretraining of the pruned backbone on generic text; no target is involved."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import TrainerCallback

from osprey import corpus, models, training
from osprey.loss import cross_entropy
from osprey.params import Pretrain
from osprey.progress import say


class NextToken(nn.Module):
    """A causal LM whose forward is the chunked next-token loss."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        # documents end with eos, which is often pad as well: its row must learn
        lm.get_input_embeddings().padding_idx = None
        # a tied head is the embedding, which the Trainer's checkpoints refuse to hold twice
        self._keys_to_ignore_on_save = ["lm.lm_head.weight"] if lm.config.tie_word_embeddings else []

    def state_dict(self, *args, prefix="", **kwargs):
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for key in self._keys_to_ignore_on_save:
            state.pop(prefix + key, None)
        return state

    def tie_weights(self):
        """The Trainer asks for this after it has loaded a checkpoint without the tied key."""
        self.lm.tie_weights()

    def forward(self, input_ids, num_items_in_batch=None):
        """input_ids [B, T] → {"loss": nats, summed over the B · (T - 1) predictions / num_items_in_batch}."""
        hidden_BTD = self.lm.model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), input_ids[:, 1:].flatten()
        items = len(labels_N) if num_items_in_batch is None else num_items_in_batch
        weight_N = torch.ones(len(labels_N), device=hidden_ND.device) / items
        return {"loss": cross_entropy(hidden_ND, self.lm.lm_head.weight, labels_N, weight_N)}


class PretrainTrainer(training.StageTrainer):
    def _get_num_items_in_batch(self, batch_samples, device):
        predictions = sum(b["input_ids"].shape[0] * (b["input_ids"].shape[1] - 1) for b in batch_samples)
        return torch.tensor(predictions * self.accelerator.num_processes, device=device)


@torch.no_grad()
def held_out_loss(model: NextToken, windows_WT: torch.Tensor, precision: str) -> float:
    """Mean next-token loss over the held-out windows, in nats."""
    device = next(model.parameters()).device
    model.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        losses = [float(model(windows.to(device))["loss"]) for windows in windows_WT.split(8)]
    model.train()
    sizes = [len(windows) for windows in windows_WT.split(8)]
    return float(np.average(losses, weights=sizes))


class Watch(TrainerCallback):
    """Held-out loss at steps evenly spread on a log axis; the short backbone at its share of the run."""

    def __init__(self, folder: Path, section: Pretrain, windows_WT, tokenizer):
        self.folder, self.section, self.windows, self.tokenizer = folder, section, windows_WT, tokenizer
        spread = np.geomspace(1, section.steps, section.evaluations).round().astype(int)
        self.short_step = max(1, round(section.short * section.steps))
        self.steps = {0, self.short_step, section.steps, *spread.tolist()}
        self.file = folder / "held_out.csv"

    def measured(self) -> pd.DataFrame:
        return pd.read_csv(self.file) if self.file.exists() else pd.DataFrame(columns=["step", "loss"])

    def visit(self, step: int, model: NextToken) -> None:
        known = self.measured()
        if step in self.steps and step not in known["step"].tolist():
            loss = held_out_loss(model, self.windows, self.section.precision)
            say(f"pretrain: step {step}, held-out loss {loss:.3f} nats")
            row = pd.DataFrame({"step": [step], "loss": [loss]})
            partial = self.file.with_suffix(".partial")
            pd.concat([known, row]).to_csv(partial, index=False)
            partial.rename(self.file)
        if step == self.short_step and not (self.folder / "short-backbone").exists():
            with models.finished(self.folder / "short-backbone") as made:
                models.save(model.lm, self.tokenizer, made)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.visit(state.global_step, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.visit(state.global_step, model)


def pretrain(pruned: Path, corpus_folder: Path, section: Pretrain, seed: int, kept: Path, out: Path) -> dict:
    """Train the pruned model at `pruned`; write backbone/, short-backbone/, train.csv and held_out.csv to `out`.

    `kept` is the stage's resume folder: a killed run continues there. Steps, windows and rates are `section`'s
    (paper, Appendix C). Returns the end points.
    """
    model = NextToken(models.load_model(pruned, torch.float32))
    tokenizer = models.load_tokenizer(pruned)
    args = training.arguments(
        kept / "trainer", section.steps, section, section.lr, seed, save_every=max(1, section.steps // 5),
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=section.weight_decay, fsdp=section.fsdp,
    )  # fmt: skip
    windows_per_step = section.batch * section.accumulation * args.world_size
    tokens_per_step = windows_per_step * section.window
    data = corpus.Windows(corpus_folder, "train", section.window, section.steps * windows_per_step, seed)
    watch = Watch(kept, section, corpus.held_out(corpus_folder, section.window, section.held_out_windows), tokenizer)
    callbacks = [watch, training.Report("pretrain")]
    trainer = PretrainTrainer(model, args, train_dataset=data, callbacks=callbacks)
    history = training.train(trainer, "pretrain")
    held_out = watch.measured()
    held_out["perplexity"] = np.exp(held_out["loss"])
    with models.finished(out) as made:
        models.save(model.lm, tokenizer, made / "backbone")
        shutil.copytree(kept / "short-backbone", made / "short-backbone")
        for frame, name in ((history, "train.csv"), (held_out, "held_out.csv")):
            frame.insert(1, "tokens", frame["step"] * tokens_per_step)
            frame.to_csv(made / name, index=False, float_format="%.6g")
    first, last = held_out.iloc[0], held_out.iloc[-1]
    return {
        "tokens": section.steps * tokens_per_step,
        "held_out_loss_before": round(float(first["loss"]), 4),
        "held_out_loss": round(float(last["loss"]), 4),
        "held_out_perplexity": round(float(last["perplexity"]), 1),
    }
