"""The data sections of a recipe: what is read, and how a problem becomes a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grouper.config.section import NonNegative, Positive, PositiveFloat, Section


class RowsConfig(Section):
    """Where one set of problems lies, and which of its rows are used.

    In this order: `shuffle`, `offset` and `limit` choose rows; `numeric_only`, `only_correct` and
    `unique` choose among the problems that the rows gave.
    """

    source: str = Field(description="a name from `grouper recipes sources`, for example gsm8k")
    path: str | None = Field(None, description="a local file or folder; left out: the Hub")
    split: str | None = Field(None, description="train, test, ...; left out: the source's own")
    subset: str | None = Field(None, description="the Hub configuration name")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our field -> the file's column (question, answer, ...)"
    )
    streaming: bool = Field(
        False, description="read row by row and stop at limit, for sets larger than memory"
    )
    shuffle: NonNegative | None = Field(
        None, description="seed of a shuffle before offset and limit; left out: in order"
    )
    shuffle_buffer: Positive = Field(
        10_000, description="only streaming: rows held in memory to draw from when shuffling"
    )
    offset: NonNegative = Field(0, description="leave out this many rows at the start")
    limit: Positive | None = Field(None, description="use at most this many rows")
    numeric_only: bool = Field(
        False, description="only problems whose answer is a plain decimal number"
    )
    only_correct: bool = Field(
        False,
        description="only worked solutions whose own answer grades as correct; whole responses "
        "must also be in the prompt's format",
    )
    unique: Positive | Literal["all"] = Field(
        "all", description="use this many that differ; all: every one, repeated or not"
    )
    unique_by: Literal["row", "problem"] = Field(
        "row", description="problem: count questions, and keep every row of those that count"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the source's own settings")

    @model_validator(mode="after")
    def _stream_ends(self) -> RowsConfig:
        if self.streaming and self.limit is None:
            raise ValueError("streaming keeps `limit` rows in memory and reads no further: set it")
        return self


class MixedConfig(RowsConfig):
    """One source of a mixture."""

    weight: PositiveFloat = Field(1.0, description="its share, relative to the others'")


_OF_ONE_SOURCE = ("path", "split", "subset", "columns", "streaming", "options")


class SourceConfig(RowsConfig):
    """One set of problems, or several in proportion (`mixture`)."""

    source: str = Field(
        "mixture", description="a name from `grouper recipes sources`; left out: see mixture"
    )
    mixture: tuple[MixedConfig, ...] = Field(
        (), description="several sources by weight instead of one; no problem is used twice"
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> SourceConfig:
        if (self.source == "mixture") != bool(self.mixture):
            raise ValueError("give either one `source` or the list `mixture` of several")
        if not self.mixture:
            return self
        if any(member.source == "mixture" for member in self.mixture):
            raise ValueError("a mixture holds sources, not mixtures: list them all at one level")
        given = [name for name in _OF_ONE_SOURCE if getattr(self, name)]
        if given:
            raise ValueError(f"{', '.join(given)}: set it on the sources in `mixture`")
        return self


class DataConfig(Section):
    """What each part of the run reads. `validation` chooses settings, `test` is used once."""

    sft: SourceConfig | None = Field(None, description="worked solutions; left out: data.train")
    train: SourceConfig
    validation: SourceConfig | None = None
    validation_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="instead of validation: this share of train, held out by run seed"
    )
    test: SourceConfig | None = None

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation is not None and self.validation_share:
            raise ValueError("give only one of data.validation and data.validation_share")
        return self

    @property
    def has_validation(self) -> bool:
        """Whether there will be validation problems, from wherever."""
        return self.validation is not None or self.validation_share > 0


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
    template: Literal["auto", "chat", "plain", "install"] = Field(
        "auto",
        description="auto: the tokenizer's chat template where it has one; install: give it "
        "another, which holds the instruction, opens the format's first tag, and is saved along",
    )
    max_prompt_tokens: Positive = Field(512, description="longer prompts are dropped and listed")
    max_percentile: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="of data.train: prompts above this percentile of length are dropped"
    )

    @model_validator(mode="after")
    def _one_system(self) -> PromptConfig:
        if self.system is not None and self.system_file is not None:
            raise ValueError("give only one of prompt.system and prompt.system_file")
        return self
