"""Checks and measures of what unlearning did."""
