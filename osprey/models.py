"""Any source or target as a local folder in Hugging Face format, and loading such a folder."""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from osprey import packages
from osprey.params import ROOT, Model, Random, UserError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # of a hub repository: no pickles


@contextmanager
def finished(folder: Path):
    """A folder to write into that becomes `folder` only when the block ends well: never a half-written one."""
    part = folder.with_name(f".{folder.name}-part")  # always the same, so that what a kill left goes with the next run
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def materialise(name: str, model: Model, folder: Path) -> None:
    """Write the model as `folder`: config, safetensors, tokenizer. Raises UserError where the origin is not one."""
    with finished(folder) as made:
        if model.random:
            make_random(model.random, made)
        elif model.package:
            from_gguf(packages.read(model.package, model.gguf), made)
        elif model.hub:
            from huggingface_hub import snapshot_download

            try:
                snapshot_download(model.hub, revision=model.revision, local_dir=made, allow_patterns=WANTED)
            except Exception as error:  # the hub client has a dozen kinds
                raise UserError(f"models.{name}.hub: {model.hub} at {model.revision}: {first_line(error)}") from None
            shutil.rmtree(made / ".cache", ignore_errors=True)
        else:
            origin = ROOT / model.path
            if not (origin / "config.json").is_file():
                raise UserError(f"models.{name}.path: {model.path} is not a model folder (it has no config.json)")
            for pattern in WANTED:
                for file in sorted(origin.glob(pattern)):
                    shutil.copyfile(file, made / file.name)
        load_tokenizer(made)
        load_config(made)


def from_gguf(blob: bytes, folder: Path) -> None:
    """Dequantise a GGUF file. Saved as bf16, the precision the targets run in."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "model.gguf").write_bytes(blob)
        quantised = AutoModelForCausalLM.from_pretrained(temporary, gguf_file="model.gguf", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file="model.gguf")
    config = quantised.config
    # a model loaded from GGUF refuses to be saved: rebuild it without its quantisation
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    save(model.to(torch.bfloat16), tokenizer, folder)


def make_random(spec: Random, folder: Path) -> None:
    """A seeded random model whose tokenizer is trained on generated text, byte-level with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from osprey import records
    from osprey.params import Records

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = records.texts(Records(generate="gsm_symbolic"))
    backend.train_from_iterator((text for text, _ in zip(texts, range(500))), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[spec.architecture](
        vocab_size=spec.vocabulary, hidden_size=spec.width, intermediate_size=2 * spec.width,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip  # a wide initialisation: sharp distributions, so that there is something to learn
    torch.manual_seed(spec.seed)
    save(AutoModelForCausalLM.from_config(config).to(torch.bfloat16), tokenizer, folder)


def save(model, tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_config(folder: Path):
    """The folder's config. Raises UserError when the folder is not a model."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a model folder (it has no config.json)")
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{folder}/config.json: {first_line(error)}") from None


def load_model(folder: Path, dtype: torch.dtype | str):
    """The folder's causal LM in eval mode and `dtype` ("auto": the checkpoint's).

    Raises UserError when the folder is not a whole model.
    """
    load_config(folder)
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: it has no safetensors; the model was cut short")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()
    except Exception as error:  # safetensors and transformers raise many kinds for a file cut short
        raise UserError(f"{folder}: cannot load the weights: {first_line(error)}") from None


def load_tokenizer(folder: Path):
    """The folder's fast tokenizer. Raises UserError when there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # likewise
        raise UserError(f"{folder}: no tokenizer: {first_line(error)}") from None
    if not tokenizer.is_fast:
        raise UserError(f"{folder}: only fast tokenizers (tokenizer.json) are supported")
    return tokenizer


def eos_ids(folder: Path, tokenizer) -> list[int]:
    """The ids that end a turn: the tokenizer's eos and those of the model's generation config."""
    file = folder / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    listed = [listed] if isinstance(listed, int) else listed or []
    ids = sorted({*listed, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
    if not ids:
        raise UserError(f"{folder}: neither tokenizer nor generation_config.json names an eos token")
    return ids


def describe(folder: Path) -> dict:
    """What the folder holds, for the eye."""
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    text = config.get_text_config()
    return {
        "architecture": (config.architectures or [config.model_type])[0],
        "layers": text.num_hidden_layers,
        "width": text.hidden_size,
        "vocabulary": text.vocab_size,
        "tokenizer": len(tokenizer),
        "eos": tokenizer.convert_ids_to_tokens(eos_ids(folder, tokenizer)),
        "chat template": bool(tokenizer.chat_template),
    }


def continuation(folder: Path, text: str, tokens: int) -> str:
    """`text` and its greedy continuation, to be read."""
    model, tokenizer = load_model(folder, torch.float32), load_tokenizer(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    mask = torch.ones_like(ids)
    eos = eos_ids(folder, tokenizer)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=eos, pad_token_id=eos[0]
    )
    return tokenizer.decode(output[0])


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
