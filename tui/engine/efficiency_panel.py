"""eff(B): what another row in the batch is worth on this machine, and where the engine stands."""

from __future__ import annotations

from mlxbatch.engine.snapshot import EffPoint, Snapshot
from mlxbatch.tui.drawing import Line, Piece
from mlxbatch.tui.numbers import UNKNOWN, rate


def efficiency_title(snapshot: Snapshot) -> list[Piece]:
    curve = snapshot.eff
    pieces: list[Piece] = [("eff(B)", "title"), (": tok/s by decode rows", "dim")]
    if curve.saturation:
        pieces.append((f" · S {curve.saturation:.1f}", "text"))
    return pieces


def efficiency_foot(snapshot: Snapshot) -> list[Piece]:
    bandwidth = snapshot.machine.bandwidth
    parts = [snapshot.eff.source] if snapshot.eff.source else []
    if bandwidth:
        parts.append(f"▏ roof {bandwidth / 1e9:.0f} GB/s")
    return [(" · ".join(parts), "dim")] if parts else []


def efficiency_rows(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Measured points as bars against the memory-bandwidth roof; ▶ marks the operating point."""
    points = _points(snapshot)
    if not points:
        return [
            Line(("no curve for this model yet", "dim")),
            Line(("mlxbatch tune measures one", "dim")),
        ]
    shown = _thinned(points, snapshot.eff.now, height - 1)
    bar_width = max(0, width - 26)
    top = max(_roof(point) or point.tokens_per_second for point in shown)
    lines = [Line((f"{'B':>5}{'tok/s':>7}{'eff':>6}{'roof':>7}", "dim"))]
    for point in shown:
        now = point is snapshot.eff.now
        line = Line(("▶" if now else " ", "accent"))
        line.add(f"{point.rows:>4}{rate(point.tokens_per_second):>7}", "strong" if now else "text")
        efficiency = f"{point.efficiency:.2f}" if point.efficiency else UNKNOWN
        line.add(f"{efficiency:>6}", "strong" if now else "text")
        line.add(f"{point.of_roof * 100:>5.0f} % " if point.of_roof is not None else f"{UNKNOWN:>7} ", "dim")
        line.extend(_bar(point, top, bar_width, now))
        lines.append(line)
    return lines


def _points(snapshot: Snapshot) -> list[EffPoint]:
    curve = snapshot.eff
    points = list(curve.points)
    if curve.now is not None and curve.now.rows:
        points = [point for point in points if point.rows != curve.now.rows] + [curve.now]
    return sorted(points, key=lambda point: point.rows)


def _thinned(points: list[EffPoint], now: EffPoint | None, room: int) -> list[EffPoint]:
    """At most `room` points: the operating point, both ends, and even steps between."""
    if len(points) <= room:
        return points
    keep = {round(index * (len(points) - 1) / (room - 1)) for index in range(room)} if room > 1 else {0}
    if now in points and points.index(now) not in keep:
        nearest = min(keep - {0} or keep, key=lambda index: abs(index - points.index(now)))
        keep = (keep - {nearest}) | {points.index(now)}
    return [points[index] for index in sorted(keep)]


def _roof(point: EffPoint) -> float | None:
    return point.tokens_per_second / point.of_roof if point.of_roof else None


def _bar(point: EffPoint, top: float, width: int, now: bool) -> list[Piece]:
    if width < 4 or top <= 0:
        return []
    scale = (width - 1) / top
    cells = max(1, round(point.tokens_per_second * scale))
    roof = _roof(point)
    gap = max(0, round(roof * scale) - cells) if roof else 0
    bar: list[Piece] = [("█" * cells, "accent" if now else "decode")]
    if roof:
        bar += [("╌" * gap, "faint"), ("▏", "dim")]
    return bar
