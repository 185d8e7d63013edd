"""The ways in which tasks travel to silos."""
