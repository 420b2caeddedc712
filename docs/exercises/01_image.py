TASK = """
The vision tower needs images whose sides are multiples of `factor`. Choose new_height and new_width: take the nearest
multiples by Python's `round`. If their area is above max_pixels or below min_pixels, scale both sides by the same
number so that the area fits, and round so that it cannot cross the bound again.
"""

HINT = """
Scale both sides by the square root of an area ratio. Compute this ratio from the size of the file, not from the
rounded size. Rounding to the nearest multiple could cross the bound again, so which way must you round when you
shrink the image, and which way when you enlarge it? And what if a side of a very thin image shrinks to less than one
factor?
"""

SIZE = """new_height = round(height / factor) * factor
new_width = round(width / factor) * factor"""

WRONG = {
    "your area has no bounds; compare it with max_pixels and min_pixels": (
        "if new_height * new_width > max_pixels:",
        "min_pixels = 0\nmax_pixels = math.inf\nif new_height * new_width > max_pixels:",
    ),
    "you scale the rounded size; scale the size of the file instead": (
        "if new_height * new_width > max_pixels:",
        "if not min_pixels <= new_height * new_width <= max_pixels:\n    height, width = new_height, new_width\n"
        "if new_height * new_width > max_pixels:",
    ),
    "you round a half up; Python's round takes the even multiple": (SIZE, SIZE.replace("round(", "math.floor(0.5 + ")),
    "you round a half down; Python's round takes the even multiple": (
        SIZE,
        SIZE.replace("round(", "math.ceil(-0.5 + "),
    ),
    "you round up; choose the nearest multiple if its area fits the bounds": (
        SIZE,
        SIZE.replace("round(", "math.ceil("),
    ),
    "you round down; choose the nearest multiple": (SIZE, SIZE.replace("round(", "math.floor(")),
    "you scale the sides by the ratio of areas; the square root is missing": (
        "math.sqrt(height * width / max_pixels)",
        "(height * width / max_pixels)",
    ),
    "you compare the area of the file with max_pixels; compare the area after rounding": (
        "if new_height * new_width > max_pixels",
        "if height * width > max_pixels",
    ),
    "you round down when you enlarge the image, so its area stays below min_pixels": (
        "math.ceil(height * grow / factor) * factor\n    new_width = math.ceil(",
        "math.floor(height * grow / factor) * factor\n    new_width = math.floor(",
    ),
    "you round to the nearest multiple when you shrink the image, so its area can exceed max_pixels again": (
        "math.floor(height / shrink / factor) * factor)\n    new_width = max(factor, math.floor(",
        "round(height / shrink / factor) * factor)\n    new_width = max(factor, round(",
    ),
    "a very thin image gets a side of 0; each side must be at least `factor`": (
        "max(factor, math.floor(width / shrink / factor) * factor)",
        "math.floor(width / shrink / factor) * factor",
    ),
}


def tries(smart_resize):
    sizes = [
        (1092, 1568),
        (100, 130),
        (30, 40),
        (70, 126),
        (98, 154),
        (5000, 29),
        (1001, 1001),
        (1015, 1008),
        (20, 300),
    ]
    for height, width in sizes:
        asked = f"height {height}, width {width}, factor 28, area from 3136 to 1003520"
        yield asked, smart_resize(height, width, 28, 3136, 1003520)
    yield "height 5600, width 28, factor 28, area from 784 to 50000", smart_resize(5600, 28, 28, 784, 50000)
