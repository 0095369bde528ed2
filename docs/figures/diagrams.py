"""Draws the diagrams of docs/concepts and docs/internals as SVG, from the standard library alone.

python docs/figures/diagrams.py            # write docs/figures/*.svg anew
python docs/figures/diagrams.py --check    # change nothing; exit 1 where a file differs

Every drawing is 640 units wide with text of 20, so that it reads at 400 pixels as well. It has its
own background, so that it reads on a dark page.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 640
INK, MUTED, LINE = "#1f2328", "#57606a", "#8c959f"


@dataclass(frozen=True)
class Color:
    """A fill and the stroke that goes with it."""

    fill: str
    stroke: str


TRAINER = Color("#dbeafe", "#1d4ed8")
SERVER = Color("#dcfce7", "#15803d")
PARITY = Color("#ffedd5", "#c2410c")
SPARE = Color("#f3f4f6", "#6b7280")
DEAD = Color("#fee2e2", "#b91c1c")
DISK = Color("#ede9fe", "#6d28d9")
BAND = Color("#f6f8fa", "#d0d7de")
PAPER = Color("#ffffff", "#d0d7de")


class Drawing:
    """An SVG of WIDTH by `height`; coordinates grow to the right and down."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="20">',
            f"<title>{escape(title)}</title>",
        ]
        self.box(1, 1, WIDTH - 2, height - 2, PAPER, radius=12)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: Color,
        lines: str = "",
        radius: int = 6,
        dashed: bool = False,
        size: int = 20,
    ) -> None:
        """A box with centred lines of text, divided by newlines."""
        dash = ' stroke-dasharray="6 5"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" '
            f'fill="{color.fill}" stroke="{color.stroke}" stroke-width="1.5"{dash}/>'
        )
        if lines:
            count = lines.count("\n") + 1
            first = y + height / 2 - (count - 1) * size * 0.6 + size * 0.35
            self.text(x + width / 2, first, lines, anchor="middle", size=size)

    def text(
        self,
        x: float,
        y: float,
        lines: str,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
        size: int = 20,
        over: Color | None = None,
    ) -> None:
        """Lines of text from the baseline `y` on; what lies behind is hidden `over` a color."""
        weight = ' font-weight="bold"' if bold else ""
        edge = f' stroke="{over.fill}" stroke-width="8" paint-order="stroke"' if over else ""
        for number, line in enumerate(lines.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.2:g}" text-anchor="{anchor}" '
                f'font-size="{size}" fill="{color}"{weight}{edge}>{escape(line)}</text>'
            )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str = LINE, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 5"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="2"{dash}/>'
        )

    def arrow(self, x1: float, y: float, x2: float, color: str, both: bool = False) -> None:
        """A level arrow from `x1` to `x2`."""
        self.line(x1, y, x2, y, color)
        for tip, back in [(x2, x1)] + ([(x1, x2)] if both else []):
            side = 12 if back > tip else -12
            self._parts.append(
                f'<path d="M{tip:g} {y:g} l{side} -7 v14 z" fill="{color}" stroke="none"/>'
            )

    def drop(self, x: float, y1: float, y2: float, color: str) -> None:
        """An arrow straight down."""
        self.line(x, y1, x, y2, color)
        self._parts.append(f'<path d="M{x:g} {y2:g} l-7 -12 h14 z" fill="{color}" stroke="none"/>')

    def cross(self, x: float, y: float, size: float = 14) -> None:
        color = DEAD.stroke
        for sign in (1, -1):
            self._parts.append(
                f'<line x1="{x - size:g}" y1="{y - sign * size:g}" x2="{x + size:g}" '
                f'y2="{y + sign * size:g}" stroke="{color}" stroke-width="5"/>'
            )

    def done(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def step() -> str:
    """Who sends what in each exchange of a step."""
    drawing = Drawing(790, "The messages of one training step")
    lanes = trainers, rows, parity = 110, 320, 530
    for x, color, words in (
        (trainers, TRAINER, "Trainers\nrun the slots"),
        (rows, SERVER, "Servers\nwith the rows"),
        (parity, PARITY, "Servers\nwith the parity"),
    ):
        drawing.box(x - 92, 18, 184, 62, color, words)
    heads = []
    for top, height, name in ((160, 186, "Exchange 1"), (430, 152, "Exchange 2")):
        drawing.box(14, top, 612, height, BAND)
        heads.append((top, name))
    drawing.box(14, 664, 612, 110, BAND)
    drawing.text(26, 691, "Agreement", bold=True, color=MUTED)
    for x in lanes:
        drawing.line(x, 80, x, 640, dashed=True)
    for top, name in heads:
        drawing.text(26, top + 27, name, bold=True, color=MUTED, over=BAND)

    drawing.box(18, 92, 184, 58, TRAINER, "forward and\nbackward pass")
    drawing.arrow(trainers, 224, rows, TRAINER.stroke)
    drawing.text(rows + 14, 231, "gradients of step n", over=BAND)
    drawing.arrow(trainers, 268, rows, TRAINER.stroke)
    drawing.text(rows + 14, 275, "row numbers of step n + 1", over=BAND)
    drawing.text(
        26,
        316,
        "to each dense replica: dense gradients, a slice",
        color=TRAINER.stroke,
        over=BAND,
    )

    drawing.box(156, 358, 328, 60, SERVER, "sum in slot order, optimizer,\nlog old XOR new")
    drawing.arrow(rows, 478, parity, SERVER.stroke)
    drawing.text(trainers + 196, 485, "old XOR new", anchor="end", over=BAND)
    drawing.arrow(rows, 520, trainers, SERVER.stroke)
    drawing.text(rows + 14, 527, "rows of step n + 1", over=BAND)
    drawing.text(
        26, 564, "among dense replicas: the sums of slices", color=TRAINER.stroke, over=BAND
    )

    drawing.box(18, 596, 184, 48, TRAINER, "dense step")
    drawing.box(376, 596, 246, 48, PARITY, "apply it to the parity")
    drawing.arrow(30, 716, 610, MUTED, both=True)
    drawing.text(320, 754, "all have finished step n: commit n", anchor="middle")
    return drawing.done()


def stripes() -> str:
    """How rows and parity lie over four servers, k = 3, m = 1, and what a lost row is made from."""
    servers, k = 4, 3
    drawing = Drawing(560, "Stripes of three rows and one parity over four servers")
    left, cell, top = 128, 122, 74
    for server in range(servers):
        x = left + server * cell
        drawing.box(x, 16, cell - 10, 46, DEAD if server == 1 else SERVER, f"shard {server}")
    for stripe in range(servers):
        y = top + stripe * 66
        drawing.text(18, y + 35, f"stripe {stripe}", color=MUTED)
        for unit in range(k + 1):
            server = (stripe + (0 if unit == k else 1 + unit)) % servers
            name = "parity" if unit == k else f"row {stripe * k + unit}"
            x = left + server * cell
            color = DEAD if server == 1 else PARITY if unit == k else SERVER
            drawing.box(x, y, cell - 10, 54, color, name, dashed=server == 1)
    drawing.text(18, 378, "Shard 1 is lost. Its row 0 is in stripe 0:", bold=True)
    y = 398
    for place, (words, color) in enumerate(
        (("row 0", DEAD), ("parity", PARITY), ("row 1", SERVER), ("row 2", SERVER))
    ):
        x = 18 + place * 158
        drawing.box(x, y, 112, 50, color, words)
        if place < 3:
            sign = "=" if place == 0 else "XOR"
            drawing.text(x + 135, y + 32, sign, anchor="middle", size=18)
    drawing.text(18, 484, "Every stripe has lost one unit, and survives it (m = 1).")
    drawing.text(18, 514, "The shards are equally full: 3 rows to 1 parity on each.")
    drawing.text(18, 544, "Parity takes m / k = 1/3 of the memory of the rows.")
    return drawing.done()


def death() -> str:
    """What happens at a death, as a time line."""
    drawing = Drawing(1030, "What happens when a server dies")
    lanes = (92, 244, 396, 548)
    heads = (
        ("Trainer", TRAINER),
        ("Server A", SERVER),
        ("Server B", SERVER),
        ("Spare", SPARE),
    )
    for x, (name, color) in zip(lanes, heads, strict=True):
        drawing.box(x - 68, 16, 136, 44, color, name)
    for x in lanes:
        drawing.line(x, 60, x, 130 if x == lanes[1] else 1010, dashed=True)
    drawing.box(24, 76, 592, 40, BAND, "commit of step n", size=20)
    drawing.text(lanes[1], 160, "killed in step n + 1", anchor="middle", color=DEAD.stroke)
    drawing.cross(lanes[1], 190)

    def stage(top: float, height: float, number: str, name: str, words: str) -> None:
        drawing.box(24, top, 592, height, BAND)
        drawing.text(38, top + 28, f"{number}  {name}", bold=True)
        drawing.text(66, top + 54, words, color=MUTED)

    stage(222, 88, "1", "Notice", "mpirun tells the survivors within milliseconds;\ncalls fail")
    stage(322, 88, "2", "Shrink", "revoke and shrink the communicator;\nnow all know who is dead")
    stage(422, 88, "3", "Compare", "share commit and view, agree;\nthe newest commit counts")
    stage(522, 88, "4", "Undo", "XOR the logged changes once more:\nback to the commit of step n")
    stage(
        622,
        88,
        "5",
        "Hand over",
        "all compute the same new roles:\nthe spare takes the shard, empty so far",
    )
    stage(722, 62, "6", "Do step n + 1 again", "computed gradients are kept")
    drawing.drop(lanes[0], 784, 822, TRAINER.stroke)
    drawing.drop(lanes[2], 784, 822, SERVER.stroke)
    drawing.drop(lanes[3], 784, 822, SERVER.stroke)
    drawing.box(24, 826, 592, 114, SERVER)
    drawing.text(38, 854, "7  Train on, and rebuild meanwhile", bold=True)
    drawing.text(
        66, 880, "rows that a step needs come first,\nthe others in the background", color=MUTED
    )
    drawing.text(66, 928, "until then the run survives one death less", color=MUTED)
    drawing.box(24, 954, 592, 44, SERVER, "Whole again: the run survives m more")
    return drawing.done()


def protections() -> str:
    """What each protection keeps beside the rows, and what it does after a failure."""
    rows: tuple[tuple[str, float, Color, str, str], ...] = (
        ("erasure", 1 / 3, PARITY, "+ m / k", "decode lost rows from k others"),
        ("chain", 1, PARITY, "+ copies - 1", "read lost rows from a copy"),
        ("replicate", 1, PARITY, "+ copies - 1", "read them from trainers, then copies"),
        ("stateless", 0.12, TRAINER, "+ cache", "go on with old rows: not exact"),
        ("mapped", 1, DISK, "rows in files", "map the files of the dead rank"),
        ("checkpoint", 1, DISK, "file, now and then", "load it, redo the steps since"),
        ("none", 0, SPARE, "nothing", "the run ends"),
    )
    drawing = Drawing(80 + 84 * len(rows), "What each protection keeps beside the rows")
    drawing.text(18, 30, "protection", bold=True, color=MUTED)
    drawing.text(150, 30, "rows, and what is kept beside them", bold=True, color=MUTED)
    for number, (name, share, color, extra, after) in enumerate(rows):
        y = 46 + number * 84
        if number:
            drawing.line(14, y - 6, 626, y - 6, BAND.stroke)
        drawing.text(18, y + 27, name, bold=True)
        drawing.box(150, y + 4, 130, 34, SERVER, "rows", size=18)
        if name == "mapped":
            drawing.box(150, y + 4, 130, 34, DISK, "rows", size=18)
            drawing.text(292, y + 27, "in files", color=color.stroke)
        elif share:
            drawing.box(284, y + 4, 130 * share, 34, color)
            drawing.text(292 + 130 * share, y + 27, extra, color=color.stroke)
        else:
            drawing.text(292, y + 27, extra, color=color.stroke)
        drawing.text(150, y + 64, after, color=MUTED)
    drawing.text(18, 70 + 84 * len(rows), "drawn for k = 3, m = 1, and for two copies", size=18)
    return drawing.done()


PACKAGE = FOLDER.parent.parent / "ecrm"


def imports() -> dict[str, set[str]]:
    """The rooms of `ecrm/`, folders and single files, and the rooms imported by each.

    Imports for types alone are left out.
    """
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "kernels").rglob("*.py")]
    found: dict[str, set[str]] = {}
    for path in files:
        inside = path.relative_to(PACKAGE.parent).with_suffix("").parts
        room = "kernels" if inside[0] == "kernels" else inside[1]
        if room in ("__init__", "__main__"):
            continue
        tree = ast.parse(path.read_text())
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for inner in ast.walk(node)
        }
        names = found.setdefault(room, set())
        for node in set(ast.walk(tree)) - for_types:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ecrm"):
                names.update(f"{node.module}.{alias.name}".split(".")[1] for alias in node.names)
    return {room: (names & found.keys()) - {room} for room, names in found.items()}


def rooms() -> str:
    """The rooms of the code by floors, with a line for each import not implied by others."""
    below = imports()

    @cache
    def height(room: str) -> int:
        return 1 + max(map(height, below[room]), default=-1)

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset().union(*({each, *reached(each)} for each in below[room]))

    top = max(map(height, below))
    floors = [sorted(room for room in below if height(room) == floor) for floor in range(top + 1)]
    lines: list[tuple[str, str]] = []  # of neighbouring floors; "room>" is a line passing a floor
    for room, names in sorted(below.items()):
        for each in sorted(names - frozenset().union(*map(reached, names))):
            came = room
            for floor in range(height(room) - 1, height(each), -1):
                passing = f"{each}>{floor}"
                if passing not in floors[floor]:
                    floors[floor].append(passing)
                lines.append((came, passing))
                came = passing
            lines.append((came, each))
    floors = [_sorted_by_lines(floors, lines, number) for number in range(top + 1)]
    step, tall, gap = 74, 38, 14
    drawing = Drawing(step * len(floors) + 10, "The rooms of ecrm/ and their imports")
    at: dict[str, tuple[float, float, float]] = {}
    for number, members in enumerate(reversed(floors)):
        widths = [10 if ">" in member else 132 for member in members]
        left = (WIDTH - sum(widths) - gap * (len(members) - 1)) / 2
        for member, wide in zip(members, widths):
            at[member] = left + wide / 2, 20 + number * step, wide
            left += wide + gap
    for upper, lower in sorted(set(lines)):
        drawing.line(at[upper][0], at[upper][1] + tall, at[lower][0], at[lower][1])
        if ">" in lower:
            drawing.line(at[lower][0], at[lower][1], at[lower][0], at[lower][1] + tall)
    for member, (x, y, wide) in sorted(at.items()):
        if ">" not in member:
            drawing.box(x - wide / 2, y, wide, tall, BAND, member)
    return drawing.done()


def _sorted_by_lines(
    floors: list[list[str]], lines: list[tuple[str, str]], number: int
) -> list[str]:
    """A floor in the order of its neighbours above and below, so that few lines cross."""
    order = {
        member: (place + 1) / (len(members) + 1)
        for members in floors
        for place, member in enumerate(members)
    }
    for _ in range(20):
        for members in (*floors, *reversed(floors)):
            for member in members:
                near = [order[b if a == member else a] for a, b in lines if member in (a, b)]
                order[member] = sum(near) / len(near) if near else order[member]
            for place, member in enumerate(sorted(members, key=order.__getitem__)):
                order[member] = (place + 1) / (len(members) + 1)
    return sorted(floors[number], key=order.__getitem__)


DIAGRAMS: dict[str, Callable[[], str]] = {
    "diagram_step": step,
    "diagram_stripes": stripes,
    "diagram_death": death,
    "diagram_protections": protections,
    "diagram_rooms": rooms,
}


def main(arguments: list[str]) -> int:
    """Exit code 1 where `--check` finds a file that is not what this program draws."""
    stale = []
    for name, draw in DIAGRAMS.items():
        path, drawn = FOLDER / f"{name}.svg", draw()
        if path.exists() and path.read_text() == drawn:
            continue
        stale.append(path.name)
        if "--check" not in arguments:
            path.write_text(drawn)
    if "--check" in arguments and stale:
        print(f"stale: {', '.join(stale)}: type python docs/figures/diagrams.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
