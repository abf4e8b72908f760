"""Shipped drafter programs (YAML), the blocks they share, and families/."""
