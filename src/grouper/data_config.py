"""The data sections of a recipe: what is read, and how a problem becomes a prompt."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grouper.section import NonNegative, Positive, Section

__all__ = ["DataConfig", "PromptConfig", "SourceConfig", "TagsConfig"]


class SourceConfig(Section):
    """One set of problems."""

    source: str = Field(description="a name from `grouper recipes sources`, for example gsm8k")
    path: str | None = Field(None, description="a local file or folder; left out: the Hub")
    split: str | None = Field(None, description="train, test, ...; left out: the source's own")
    subset: str | None = Field(None, description="the Hub configuration name")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our field -> the file's column (question, answer, ...)"
    )
    shuffle: NonNegative | None = Field(
        None, description="seed of a shuffle before offset and limit; left out: in order"
    )
    offset: NonNegative = Field(0, description="leave out this many problems at the start")
    limit: Positive | None = Field(None, description="use at most this many different problems")
    options: dict[str, Any] = Field(default_factory=dict, description="the source's own settings")


class DataConfig(Section):
    """What each part of the run reads. `validation` chooses settings, `test` is used once."""

    sft: SourceConfig | None = Field(None, description="worked solutions; left out: data.train")
    train: SourceConfig
    validation: SourceConfig | None = None
    test: SourceConfig | None = None


class TagsConfig(Section):
    """The tags of the `tags` format."""

    reasoning_open: str = "<start_working_out>"
    reasoning_close: str = "<end_working_out>"
    answer_open: str = "<SOLUTION>"
    answer_close: str = "</SOLUTION>"


class PromptConfig(Section):
    """How a problem becomes tokens, and where the answer will stand."""

    format: str = Field("xml", description="a name from `grouper recipes formats`")
    system: str | None = Field(None, description="replaces the format's instruction; '' is none")
    system_file: str | None = Field(None, description="a text file holding the instruction")
    tags: TagsConfig | None = Field(None, description="only for format: tags")
    template: Literal["auto", "chat", "plain"] = Field(
        "auto", description="auto: the tokenizer's chat template where it has one"
    )
    max_prompt_tokens: Positive = Field(512, description="longer prompts are dropped and listed")

    @model_validator(mode="after")
    def _one_system(self) -> PromptConfig:
        if self.system is not None and self.system_file is not None:
            raise ValueError("give only one of prompt.system and prompt.system_file")
        return self
