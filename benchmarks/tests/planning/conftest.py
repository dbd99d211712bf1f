"""Puts the planning programs on the path, as Python does for the one that is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "planning"))
