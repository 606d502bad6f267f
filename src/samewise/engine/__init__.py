from samewise.engine.engine import MAKERS, Engine, MakeProposer, Parts, build

__all__ = ["MAKERS", "Engine", "MakeProposer", "Parts", "build"]
