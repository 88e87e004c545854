"""Recipes from TRL's configuration files: what maps, what has no counterpart, what is refused."""

from __future__ import annotations

from grouper.trl_import.converting import ImportedRecipe, import_trl

__all__ = ["ImportedRecipe", "import_trl"]
