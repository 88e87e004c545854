"""Small tokenizers that behave like the well-known ones where it hurts.

All are byte-level without merges, so an id is the rank of a byte (`byte_id`) or one of the named
special tokens, and golden ids can be worked out by hand. The templates are written for these
tests; they imitate behavior, not text.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

__all__ = [
    "Fixture",
    "byte_ids",
    "gemma",
    "llama3",
    "mistral",
    "no_template",
    "qwen25",
    "sentencepiece_like",
    "strips_thinking",
    "thinks_by_default",
]

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_DECODE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@dataclass(frozen=True)
class Fixture:
    """A tokenizer and what a model folder's generation config would say beside it."""

    tokenizer: PreTrainedTokenizerFast
    generation_eos: tuple[int, ...]
    generation_config: dict[str, object]

    def id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)


def byte_ids(text: str) -> list[int]:
    """What `text` becomes where no special token is in it."""
    ((symbols, _),) = _DECODE.pre_tokenize_str(text)
    return [_BYTES.index(symbol) for symbol in symbols]


def _build(
    special: list[str],
    *,
    eos: str | None,
    bos: str | None = None,
    pad: str | None = None,
    template: str | None = None,
    adds_bos: bool = False,
    generation_eos: tuple[str, ...] = (),
    generation_config: dict[str, object] | None = None,
) -> Fixture:
    backend = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(_BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token=bos,
        pad_token=pad,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    return Fixture(
        tokenizer=tokenizer,
        generation_eos=tuple(backend.token_to_id(token) for token in generation_eos),
        generation_config=generation_config or {},
    )


def no_template(*, eos: str | None = "<eos>", adds_bos: bool = False) -> Fixture:
    """A base model: no chat template; optionally one that puts a BOS in front of every text."""
    special = ["<eos>", "<bos>"]
    return _build(
        special,
        eos=eos,
        bos="<bos>" if adds_bos else None,
        pad=eos,
        adds_bos=adds_bos,
        generation_eos=(eos,) if eos else (),
    )


CHATML = (
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
QWEN_DEFAULT_SYSTEM = "Be helpful."


def qwen25() -> Fixture:
    """Turns end in `<|im_end|>`, EOS and pad are `<|endoftext|>`, a system prompt of its own
    where none is given, and a generation config that would change sampling if it leaked."""
    template = (
        "{%- if messages[0]['role'] != 'system' -%}"
        f"{{{{- '<|im_start|>system\n{QWEN_DEFAULT_SYSTEM}<|im_end|>\n' -}}}}"
        "{%- endif -%}" + CHATML
    )
    return _build(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        template=template,
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        generation_config={"repetition_penalty": 1.05, "top_k": 20, "temperature": 0.7},
    )


def llama3() -> Fixture:
    """BOS written by the template and also added by the tokenizer; three stop ids."""
    template = (
        "{{- bos_token -}}"
        "{%- for m in messages -%}"
        "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
        "+ m['content'] | trim + '<|eot_id|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
    )
    return _build(
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ],
        eos="<|end_of_text|>",
        bos="<|begin_of_text|>",
        template=template,
        adds_bos=True,
        generation_eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    )


def gemma() -> Fixture:
    """No system role: the template raises. The assistant is called `model`."""
    template = (
        "{{- bos_token -}}"
        "{%- if messages[0]['role'] == 'system' -%}"
        "{{- raise_exception('there is no system role') -}}{%- endif -%}"
        "{%- for m in messages -%}"
        "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"
    )
    return _build(
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        eos="<eos>",
        bos="<bos>",
        pad="<pad>",
        template=template,
        adds_bos=True,
        generation_eos=("<eos>", "<end_of_turn>"),
    )


def mistral() -> Fixture:
    """No system role (turns must alternate), no generation prompt, EOS ends the turn."""
    template = (
        "{{- bos_token -}}"
        "{%- for m in messages -%}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{- raise_exception('roles must alternate user and assistant') -}}{%- endif -%}"
        "{%- if m['role'] == 'user' -%}{{- '[INST] ' + m['content'] + ' [/INST]' -}}"
        "{%- else -%}{{- ' ' + m['content'] + eos_token -}}{%- endif -%}"
        "{%- endfor -%}"
    )
    return _build(
        ["<unk>", "<s>", "</s>"],
        eos="</s>",
        bos="<s>",
        template=template,
        adds_bos=True,
        generation_eos=("</s>",),
    )


def drops_system() -> Fixture:
    """Leaves a system message out in silence."""
    template = (
        "{%- for m in messages if m['role'] != 'system' -%}"
        "{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    return _build(
        ["<|end|>", "<|user|>", "<|assistant|>"],
        eos="<|end|>",
        pad="<|end|>",
        template=template,
        generation_eos=("<|end|>",),
    )


def strips_thinking() -> Fixture:
    """ChatML that removes everything up to `</think>` from assistant messages."""
    template = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    return _build(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=template,
        generation_eos=("<|im_end|>",),
    )


def thinks_by_default() -> Fixture:
    """Opens a thinking block in the generation prompt unless told not to, and then closes one."""
    template = CHATML.replace(
        "'<|im_start|>assistant\n'",
        "'<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is defined "
        "and not enable_thinking else '<think>\n')",
    )
    return _build(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=template,
        generation_eos=("<|im_end|>",),
    )


def sentencepiece_like() -> Fixture:
    """Puts a space before the first word of every text, as Llama-2 and the first Mistral do."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    alphabet += [chr(code) for code in range(33, 127)]
    backend = Tokenizer(
        BPE(
            vocab={symbol: i for i, symbol in enumerate(alphabet)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    return Fixture(tokenizer=tokenizer, generation_eos=(2,), generation_config={})
