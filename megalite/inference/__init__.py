"""Generation: a trained model, some prompts, and what it writes after them."""
