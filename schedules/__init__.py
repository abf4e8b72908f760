"""Shipped schedules: which kernel a fused group gets, per target and width (YAML)."""
