"""Small random models with a tokenizer fitted to the data, for trials without pretrained weights.

The tokenizer is a byte-level BPE. The whole byte alphabet is in it, so every text can be encoded
and decoded, whether or not the data had its characters. Digits are always tokens of their own,
since a small model does not learn arithmetic otherwise, and each tag of the prompt format is one
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.trainers import BpeTrainer
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from grouper.config.schema import NewModelConfig
from grouper.errors import ConfigError, RunFolderError
from grouper.files import whole_folder
from grouper.models.quiet import quiet
from grouper.types import AnswerFormat, Problem

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# Every model has four query heads and two heads of keys and values.
_HEADS = 4
# As in Qwen3; positions take no weights.
_POSITIONS = 32_768

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    f"{{%- if message['role'] == 'assistant' -%}}{{{{- '{END}' -}}}}{{%- endif -%}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_new_model(
    config: NewModelConfig, problems: Sequence[Problem], fmt: AnswerFormat, *, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a random model, and a tokenizer fitted to `problems` as `fmt` writes them.

    The same arguments give the same tokenizer and the same weights, which are in float32. The
    global random generator is left as it was.

    Raises:
        ConfigError: `config.vocab_size` is too small for the bytes and the tags.
    """
    tokenizer = fit_tokenizer(problems, fmt, vocab_size=config.vocab_size)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = new_model_config(config, vocabulary=len(tokenizer), **special)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(shape)
    model.generation_config = transformers.GenerationConfig(**special)
    return model.eval(), tokenizer


def fit_tokenizer(
    problems: Sequence[Problem], fmt: AnswerFormat, *, vocab_size: int
) -> PreTrainedTokenizerFast:
    """Fit a byte-level BPE with chat template, `<|end|>` as EOS and `<|pad|>`.

    Args:
        problems: questions and solutions to fit to, in a fixed order.
        fmt: its instruction is fitted to, too, and its tags become one token each. They are
            ordinary tokens: decoding keeps them.
        vocab_size: upper limit, special tokens and tags included; few data give fewer tokens.

    Raises:
        ConfigError: `vocab_size` is too small for the 256 bytes and the tags.
    """
    special = [PAD, END, *ROLES]
    stripped_tags = [tag.strip() for tag in fmt.tags or ()]
    tags = list(dict.fromkeys(stripped_tags))
    alphabet = sorted(ByteLevel.alphabet())
    smallest = len(alphabet) + len(special) + len(tags)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small for {len(alphabet)} bytes and "
            f"{len(special) + len(tags)} tags",
            where="model.new.vocab_size",
            fix=f"Use {smallest} or more.",
        )
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = [fmt.system]
    for problem in problems:
        texts.append(problem.question)
        texts.append(problem.solution or problem.answer)
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model_config(
    config: NewModelConfig, *, vocabulary: int, **special: int | None
) -> PretrainedConfig:
    """Return the transformers configuration of a new model.

    Args:
        config: its size.
        vocabulary: number of tokens.
        special: ids of special tokens; none by default.
    """
    special_ids = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None} | special
    return transformers.AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        head_dim=config.hidden_size // _HEADS,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=True,
        **special_ids,
    )


def save_new_model(
    folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Write weights, config, generation config, tokenizer and chat template to `folder`.

    The folder appears when it is complete, or not at all.

    Raises:
        RunFolderError: the folder has something in it, or cannot be written.
    """
    folder = Path(folder).expanduser()
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty_folder:
        raise RunFolderError(
            "there is something here already", where=str(folder), fix="Name a new folder."
        )
    with whole_folder(folder) as temporary:
        with quiet():
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder
