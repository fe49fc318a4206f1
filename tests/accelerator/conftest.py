from accelerator.fixture import sim

__all__ = ["sim"]
