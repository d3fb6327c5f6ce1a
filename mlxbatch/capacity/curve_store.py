"""Measured curves on disk: one JSON file for each model and chip, in the user's data folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import platformdirs

from mlxbatch.capacity.measured_curve import DecodePoint, MeasuredCurve, PrefillPoint

FORMAT = 1


class CurveStore:
    """Curves by (model fingerprint or name, machine). A file that cannot be read counts as absent."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(platformdirs.user_data_dir("mlxbatch")) / "curves"

    def path(self, model: str, chip: str) -> Path:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{model}--{chip}").strip("_")
        return self.folder / f"{plain}.json"

    def save(self, curve: MeasuredCurve) -> Path:
        """Write a curve, replacing an older one at once or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(curve.model, curve.chip)
        record = {
            "format": FORMAT,
            "model": curve.model,
            "chip": curve.chip,
            "measured_at": curve.measured_at,
            "decode": [asdict(p) for p in curve.decode],
            "prefill": [asdict(p) for p in curve.prefill],
            "details": dict(curve.details),
        }
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        os.replace(name, path)
        return path

    def load(self, model: str, chip: str) -> MeasuredCurve | None:
        """The curve of a model on a chip, or None."""
        try:
            record = json.loads(self.path(model, chip).read_text("utf-8"))
            if record["format"] != FORMAT or record["model"] != model or record["chip"] != chip:
                return None
            return MeasuredCurve(
                model=model,
                chip=chip,
                decode=tuple(DecodePoint(**p) for p in record["decode"]),
                prefill=tuple(PrefillPoint(**p) for p in record["prefill"]),
                measured_at=str(record["measured_at"]),
                details=record["details"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
