"""The Trainer of Stages 2 and 4: transformers' own, with our schedule, order, progress and history."""

import json
import logging
import math
import shutil
from pathlib import Path

import pandas as pd
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from osprey.params import UserError
from osprey.progress import Progress, say


class StageTrainer(Trainer):
    """Runs `model(**batch, num_items_in_batch=...)`, whose loss is already summed and divided by that count.

    Data come in the dataset's own order. The schedule is cosine after a linear warm-up whose first update is
    not lost (the stock one starts at rate 0).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)  # a line per update; Report says the same in fewer
        self.model_accepts_loss_kwargs = True  # num_items_in_batch, which the stock test only finds in **kwargs

    def create_scheduler(self, num_training_steps, optimizer=None):
        warmup = max(1, round(self.args.warmup_steps * num_training_steps))

        def rate(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_training_steps - warmup)))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
        return self.lr_scheduler


class Report(TrainerCallback):
    """Says how far the run is and how long it will take."""

    def __init__(self, what: str):
        self.what, self.progress = what, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress = Progress(self.what, state.max_steps, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.progress.advance(state.global_step - self.progress.done, f"loss {logs['loss']:.3f}")


def arguments(folder: Path, steps: int, section, lr: float, seed: int, save_every: int, **more) -> TrainingArguments:
    """What both stages share; `section` is params.pretrain or params.distill. Raises UserError for DataParallel."""
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=section.batch,
        gradient_accumulation_steps=section.accumulation, learning_rate=lr, warmup_steps=section.warmup,
        max_grad_norm=section.clip, optim="adamw_torch_fused",
        bf16=section.precision == "bf16", use_cpu=cpu, seed=seed, data_seed=seed, train_sampling_strategy="sequential",
        save_steps=save_every, save_total_limit=1, logging_steps=1, logging_nan_inf_filter=False, report_to=[],
        disable_tqdm=True, remove_unused_columns=False, dataloader_num_workers=0, dataloader_pin_memory=not cpu,
        **more,
    )  # fmt: skip
    if args.n_gpu > 1:  # DataParallel would cut our batches along the wrong dimension
        raise UserError("one process sees several GPUs; set CUDA_VISIBLE_DEVICES, or start one process each (torchrun)")
    return args


def drop_half_saved(folder: Path) -> None:
    """Remove checkpoints that a kill cut short: the Trainer writes trainer_state.json last, and rotates after that."""
    for checkpoint in sorted(folder.glob("checkpoint-*")):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(checkpoint)


def train(trainer: Trainer, what: str) -> pd.DataFrame:
    """Train, continuing from the newest checkpoint in the output folder; returns step, lr, loss of every update."""
    folder = Path(trainer.args.output_dir)
    drop_half_saved(folder)
    last = get_last_checkpoint(folder)
    if last:
        say(f"{what}: continues from {Path(last).name}")
    try:
        trainer.train(resume_from_checkpoint=last)
    except Exception:
        drop_half_saved(folder)  # the disk may be full
        raise
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return pd.DataFrame({key: [entry[name] for entry in log] for key, name in
                         (("step", "step"), ("lr", "learning_rate"), ("loss", "loss"))})  # fmt: skip
