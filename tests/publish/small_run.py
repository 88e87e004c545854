"""Settings of a run that is over in seconds."""

SMALL = (
    "sft.steps=2",
    "grpo.steps=2",
    "grpo.prompts_per_step=4",
    "grpo.allow_truncation=true",
    "data.sft.options.count=60",
    "data.train.options.count=60",
    "data.validation.options.count=4",
    "data.test.options.count=8",
    "model.new.hidden_size=64",
    "model.new.intermediate_size=128",
)
"""Makes the demonstration a matter of seconds; it learns nothing."""
