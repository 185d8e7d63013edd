"""Where samples come from, how they are split over silos, and what a silo remembers of those it deleted."""
