"""The tracking section of a recipe: what is written beside the metrics, and who else is told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from grouper.config.credentials import expanded, refuse_literal_secrets
from grouper.config.extras import require_extra
from grouper.config.section import Positive, Section
from grouper.config.user_code import load_user_object
from grouper.errors import ConfigError, did_you_mean, raise_all

TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Built-in tracker -> the package it needs, which is also the name of the optional extra."""


class TrackerConfig(Section):
    """Somebody else who is told of every step; it can neither stop a run nor slow it."""

    name: str = Field(
        description="tensorboard, wandb, trackio, or your own: `path/to/file.py:function`"
    )
    project: str | None = Field(None, description="left out: grouper")
    entity: str | None = Field(None, description="only wandb: user or team; left out: your own")
    run_name: str | None = Field(None, description="left out: the recipe's name")
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online"] = Field(
        "offline", description="online: send to its server while the run goes on"
    )
    params: Annotated[dict[str, Any], AfterValidator(refuse_literal_secrets)] = Field(
        default_factory=dict,
        description="further keywords: of wandb.init, trackio.init, or yours; ${NAME} is read from "
        "the environment",
    )


class TrackingConfig(Section):
    """What is written down beside the metrics."""

    token_ids: bool = Field(False, description="keep ids and log-probs of every rollout")
    show_every: Positive = Field(1, description="steps between lines in training.log")
    print_every_steps: Positive | None = Field(
        None, description="GRPO steps between samples shown on the console; left out: none"
    )
    trackers: tuple[TrackerConfig, ...] = Field(
        (), description="who else is told of each step; the run folder is written in any case"
    )

    @model_validator(mode="after")
    def _trackers_are_named_once(self) -> TrackingConfig:
        names = [tracker.name for tracker in self.trackers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the tracker {twice[0]!r} is listed twice")
        return self


def check_trackers(tracking: TrackingConfig) -> None:
    """Make sure that every tracker is there, without opening any. Only training needs them.

    Raises:
        ConfigError: every problem at once: no tracker of that name, its package is not installed,
            or the user's own cannot be loaded.
    """
    problems: list[ConfigError] = []
    for tracker in tracking.trackers:
        try:
            _check_tracker(tracker)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)


def tracker_params(tracker: TrackerConfig) -> dict[str, Any]:
    """What a tracker is made with: its `params`, secrets included.

    Raises:
        ConfigError: a variable that they refer to is not set.
    """
    params: dict[str, Any] = expanded(tracker.params, where="tracking.trackers", error=ConfigError)
    return params


def _check_tracker(tracker: TrackerConfig) -> None:
    where = "tracking.trackers"
    tracker_params(tracker)
    if ":" in tracker.name:
        load_user_object(tracker.name, kind="tracker", where=where, error=ConfigError)
    elif tracker.name in TRACKER_PACKAGES:
        package = TRACKER_PACKAGES[tracker.name]
        require_extra(package, tracker.name, where=where, instead="none (--no-trackers)")
    else:
        raise ConfigError(
            f"there is no tracker {tracker.name!r}",
            where=where,
            fix=f"{did_you_mean(tracker.name, TRACKER_PACKAGES)} Your own is named "
            "`path/to/file.py:function`.",
        )
