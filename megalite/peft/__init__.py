"""A few weights trained beside a frozen model: LoRA, prefix tuning, prompt tuning; PEFT's files in and out."""
