"""Ways to unlearn: one paper, one file."""

from fedforget.methods.method import Guarantee, Method
from fedforget.methods.rapid import RapidRetrain
from fedforget.methods.retrain import Retrain

BUILT_IN: dict[str, type[Retrain] | type[RapidRetrain]] = {"retrain": Retrain, "rapid": RapidRetrain}

__all__ = ["BUILT_IN", "Guarantee", "Method", "RapidRetrain", "Retrain"]
