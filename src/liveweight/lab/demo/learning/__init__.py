"""What the demo's trainer does between two rounds: rollouts, samples, GRPO."""
