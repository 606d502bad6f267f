from samewise.engine.engine import Engine, build

__all__ = ["Engine", "build"]
