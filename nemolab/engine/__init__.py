"""The engine: a NemotronH that runs, with routed experts read on demand."""

from nemolab.engine.engine import ChatPiece, ChatResult, Engine
from nemolab.engine.trials import Trials

__all__ = ["ChatPiece", "ChatResult", "Engine", "Trials"]
