"""Memory sizes of graphics cards."""

from typing import NamedTuple

# {GB: names}, from NVIDIA's data sheets
CARDS = {
    8: "RTX 5060 Ti 8GB, RTX 4060 Ti 8GB",
    10: "RTX 3080",
    12: "RTX 5070, RTX 4070 Ti, RTX 4070 SUPER, RTX 4070, RTX 3080 Ti, RTX 3080 12GB, RTX 3060",
    16: "A4000, RTX 5080, RTX 5070 Ti, RTX 5060 Ti, RTX 4090 Laptop, RTX 4080 SUPER, RTX 4080, RTX 4070 Ti SUPER, "
    "RTX 4060 Ti, T4, V100",
    24: "L4, A10G, A10, A5000, RTX 5090 Laptop, RTX 4090, RTX 3090 Ti, RTX 3090",
    32: "RTX 5090, V100 32GB",
    40: "A100 40GB",
    48: "L40S, A40, RTX 6000 Ada, A6000",
    80: "H100 PCIe, H100, A100",
    94: "H100 NVL",
    96: "GH200, RTX PRO 6000",
    141: "H200",
    180: "B200",
}
BEFORE_AMPERE = {"T4", "V100"}  # compute capability below 8.0
VARIANTS = {"Laptop", "Ti", "SUPER", "Max", "D"}  # a 4090 Laptop is not a 4090


class Card(NamedTuple):
    """A graphics card."""

    memory: float  # in GB
    before_ampere: bool


def find_card(name: str) -> Card | None:
    """Look up a card such as "4090" or "NVIDIA GeForce RTX 4090"; return None if unknown."""
    words = {*name.replace("-", " ").split()}
    found = []
    for memory, names in CARDS.items():
        for known in names.split(", "):
            own = {*known.split()}
            if own - {"RTX"} <= words and own & VARIANTS == words & VARIANTS:
                found.append((len(own), Card(memory, bool(own & BEFORE_AMPERE))))
    return max(found)[1] if found else None  # "A100 40GB" rather than "A100"
