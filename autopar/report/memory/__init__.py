"""What a rank holds in a training step: estimated from its program, and measured."""
