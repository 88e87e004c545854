"""Small random models with a tokenizer fitted to the data, for trials without any weights.

The tokenizer is a byte-level BPE: the whole byte alphabet is in it, so every text survives
encoding and decoding, also one that the data it was fitted to never had. Digits are always
tokens of their own (arithmetic is hopeless otherwise), and the tags of the prompt format are
single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grouper.config.schema import NewModelConfig
from grouper.errors import ConfigError, RunFolderError
from grouper.files import whole_folder
from grouper.models.loading import quiet
from grouper.prompts import PromptFormat
from grouper.types import Problem

__all__ = [
    "fit_tokenizer",
    "fitting_texts",
    "make_new_model",
    "new_model_config",
    "save_new_model",
]

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    f"{{%- if message['role'] == 'assistant' -%}}{{{{- '{END}' -}}}}{{%- endif -%}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_new_model(
    config: NewModelConfig, problems: Sequence[Problem], fmt: PromptFormat, *, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random model, and a tokenizer fitted to `problems` as `fmt` writes them.

    The same arguments give the same tokenizer and the same weights, which are in float32. The
    global random generator is left as it was.

    Raises:
        ConfigError: `config.vocab_size` is too small for the bytes and the tags.
    """
    texts, tags = fitting_texts(problems, fmt), [tag.strip() for tag in fmt.tags or ()]
    tokenizer = fit_tokenizer(texts, vocab_size=config.vocab_size, extra_tokens=tags)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = new_model_config(config, vocabulary=len(tokenizer), **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shape)
    model.generation_config = GenerationConfig(**special)
    return model.eval(), tokenizer


def fitting_texts(problems: Sequence[Problem], fmt: PromptFormat) -> Iterator[str]:
    """What the tokenizer of a new model is fitted to: instruction, questions and solutions."""
    yield fmt.system
    for problem in problems:
        yield problem.question
        yield problem.solution or problem.answer


def fit_tokenizer(
    texts: Iterable[str], *, vocab_size: int, extra_tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    """A byte-level BPE fitted to `texts`, with chat template, `<|end|>` as EOS and `<|pad|>`.

    Args:
        texts: what to fit to, in a fixed order.
        vocab_size: upper limit, special and extra tokens included; small data give fewer.
        extra_tokens: texts that become one token each (the tags of a prompt format). They are
            ordinary tokens: decoding keeps them.

    Raises:
        ConfigError: `vocab_size` is too small for the 256 bytes and the extra tokens.
    """
    special = [PAD, END, *ROLES]
    extra = list(dict.fromkeys(extra_tokens))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(special) + len(extra)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small for {len(alphabet)} bytes and "
            f"{len(special) + len(extra)} tags",
            where="model.new.vocab_size",
            fix=f"Use {smallest} or more.",
        )
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(extra),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in extra])
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
    """The transformers configuration of a new model, without any weights.

    Args:
        config: its size.
        vocabulary: tokens.
        special: ids of special tokens; none by default.
    """
    return AutoConfig.for_model(
        config.architecture,
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.initializer_range,
        **{"eos_token_id": None, "pad_token_id": None, "bos_token_id": None, **special},
    )


def save_new_model(
    folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Write weights, config, generation config, tokenizer and chat template to `folder`.

    The folder appears whole or not at all.

    Raises:
        RunFolderError: the folder has something in it, or cannot be written.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(
            "there is something here already", where=str(folder), fix="Name a new folder."
        )
    with whole_folder(folder) as part:
        with quiet():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    return folder
