"""Draw a picture as SVG."""

from pathlib import Path

DOCS = Path(__file__).parents[1]
INK, SOFT, PAPER, FAINT = "#1f2933", "#66727f", "#ffffff", "#e8ecf0"
BLUES, ORANGES = ("#1f4e79", "#5b8db8", "#9cc0de"), ("#9c4a00", "#dd8a3c", "#f3bd87")
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG file with a white background, which looks the same on a dark page."""

    def __init__(self, width: int, height: int, title: str):
        self.lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' role='img' aria-label='{title}'>",
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>",
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER, thick: float = 1):
        """Draw a rectangle."""
        self.lines.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='{stroke}' "
            f"stroke-width='{thick:g}'/>"
        )

    def text(
        self, x: float, y: float, words: str, size=13, fill=INK, anchor="middle", bold: bool = False, halo: str = ""
    ):
        """Write text with its middle, start or end at x, and its baseline at y; `halo` is its outline color."""
        more = " font-weight='bold'" if bold else ""
        more += f" stroke='{halo}' stroke-width='3' stroke-linejoin='round' paint-order='stroke'" if halo else ""
        self.lines.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {FONT}{more}>"
            f"{words}</text>"
        )

    def note(self, x: float, y: float, *lines: str):
        """Write lines of text; the first baseline is at y."""
        for number, words in enumerate(lines):
            self.text(x, y + 17 * number, words, 12, INK, "start")

    def line(self, points: list[tuple[float, float]], stroke: str = SOFT, thick: float = 1):
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='{thick:g}'/>")

    def arrow(self, *points: tuple[float, float]):
        """Draw a line with an arrowhead at the last point; the last segment is parallel to an axis."""
        (x, y), (before_x, before_y) = points[-1], points[-2]
        along_x, along_y = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
        self.line([*points], INK, 1.5)
        back_x, back_y = x - 8 * along_x, y - 8 * along_y
        self.line(
            [(back_x - 4 * along_y, back_y - 4 * along_x), (x, y), (back_x + 4 * along_y, back_y + 4 * along_x)],
            INK,
            1.5,
        )

    def svg(self) -> str:
        """Return the SVG file as text."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"
