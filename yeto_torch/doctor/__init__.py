"""Checks before a run: ``python -m yeto_torch.doctor``."""
