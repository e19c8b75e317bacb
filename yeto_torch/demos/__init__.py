"""What ``python -m yeto_torch.demo`` is made of: tasks, the learners' script, baselines, progress, the report."""
