"""Silos, the coordinator, and the links between them."""
