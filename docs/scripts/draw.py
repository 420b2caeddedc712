"""Draw pictures for pages as SVG files. Diagrams without measured numbers, such as mask.svg, were drawn once."""

INK, SOFT, PAPER, FAINT = "#1f2933", "#66727f", "#ffffff", "#e8ecf0"
BLUES, ORANGES = ("#1f4e79", "#5b8db8", "#9cc0de"), ("#9c4a00", "#dd8a3c", "#f3bd87")
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG file with a white background, so that it looks the same on a dark page."""

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
        """Write text with its middle, start or end at x and its baseline at y; `halo` is its outline's colour."""
        more = " font-weight='bold'" if bold else ""
        more += f" stroke='{halo}' stroke-width='3' stroke-linejoin='round' paint-order='stroke'" if halo else ""
        self.lines.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {FONT}{more}>"
            f"{words}</text>"
        )

    def line(self, points: list[tuple[float, float]], stroke: str = SOFT, thick: float = 1):
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='{thick:g}'/>")

    def svg(self) -> str:
        """Return the SVG file's text."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"
