"""Gives every Python that starts here one module whose source is another file:
TIERMEM_MUTANT=module=/path/of/file.py."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import CodeType, ModuleType
from typing import Any


class _Mutant(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, self._path)
        return importlib.machinery.ModuleSpec(name, loader, origin=self._path)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the file, without cached bytecode."""

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self.get_data(self.path), self.path, "exec")


if mutant := os.environ.get("TIERMEM_MUTANT"):
    module, _, file = mutant.partition("=")
    sys.meta_path.insert(0, _Mutant(module, file))
