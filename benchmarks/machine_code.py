"""Read the machine code (SASS) of a kernel, as cuobjdump prints it, and find registers that nothing has written.

An assembler can lose a register: ptxas 12.8 computes addresses of some matrix products from a uniform register that no
instruction of the kernel has written. Such a kernel is wrong on a GPU, although its PTX is right.

Registers are R0, R1, ... (32 bits of a thread), UR0, ... (uniform registers, 32 bits of a warp), and the predicates P0,
... and UP0, ... (one bit). RZ, URZ, PT and UPT are constants.
"""

import re
from itertools import pairwise

# Instructions whose first operand is read although it is a register: stores, barriers, jumps.
NO_RESULT = ("ST", "RED.", "BAR", "BRA", "BRX", "CALL", "RET", "EXIT", "WARPSYNC", "NANOSLEEP")


def instructions(sass: str) -> list[tuple[int, str]]:
    """Return (address, text) of each instruction in disassembled code."""
    return [(int(address, 16), text.strip()) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/;]+);", sass)]


def opcode(text: str) -> str:
    """Return the opcode of an instruction, which may begin with a predicate: @P0 LDG.E.128 ..."""
    words = text.split()
    return words[1] if text.startswith("@") else words[0]


def unwritten_registers(code: list[tuple[int, str]]) -> set[str]:
    """Return the registers that an instruction reads although no instruction on any path to it writes them.

    An instruction with a predicate counts as a write, and each jump counts as taken and as not taken. Therefore a
    reported register is wrong whatever the inputs of the kernel are.
    """
    after_calls = [following for (_, text), (following, _) in pairwise(code) if opcode(text).startswith("CALL")]
    reads = {}
    writes = {}
    targets = {}  # address -> addresses of the instructions that may follow
    for (address, text), (following, _) in pairwise([*code, (None, "")]):
        reads[address], writes[address] = accesses(text)
        targets[address] = [] if following is None else [following]
        if opcode(text).startswith(("BRA", "CALL", "BSSY")):
            targets[address].append(int(text.split()[-1], 16))
        if opcode(text).startswith("RET"):
            targets[address] += after_calls
    written = {address: set() for address, _ in code}  # address -> registers that are written before
    changed = True
    while changed:
        changed = False
        for address, following in targets.items():
            now = written[address] | writes[address]
            for target in following:
                changed |= not now <= written[target]
                written[target] |= now
    return set().union(*(reads[address] - written[address] for address, _ in code))


def accesses(text: str) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction reads and the registers that it writes.

    The first operands are results: a register with carries (IADD3 R4, P0, R2, R3, RZ), or predicates with or without a
    register (SHFL.BFLY P0, R4, R5, ...). Where the text is not clear, more registers are written and fewer are read, so
    that unwritten_registers never reports a register that is right.
    """
    op = opcode(text)
    guard, _, listed = text.partition(op)
    operands = re.split(r",\s*", listed.strip())
    written = set()
    has_register = "SETP" in op  # the results of a comparison are predicates
    while operands and not op.startswith(NO_RESULT):
        result = re.fullmatch(r"(U?)(R|P)(\d+|Z|T)", operands[0])
        if not result or (has_register and result[2] == "R"):
            break
        del operands[0]
        has_register |= result[2] == "R"
        if result[3].isdigit():
            written |= adjacent(result[1] + result[2], int(result[3]), result_size(op) if result[2] == "R" else 1)
    if op == "R2P":
        written |= adjacent("P", 0, 7)
    read = set()
    for operand in [guard, *operands]:
        for before, kind, number, after in re.findall(r"(\w*desc\[)?\b(U?[RP])(\d+)\b(\.64)?", operand):
            first, size = int(number), 1
            if after or before in ("desc[", "gdesc[") or op == "UIADD3.64":
                size = 2
            if before == "gdesc[" and "GMMA" in op:
                # Two descriptors of 64 bits. The first is not used if the first matrix is in registers.
                first, size = (first, 4) if operand is operands[0] else (first + 2, 2)
            read |= adjacent(kind, first, size)
    if op.startswith("PRMT"):  # replaces some bytes of a register; nothing uses the other bytes if they are not written
        read -= written
    return read, written


def adjacent(kind: str, first: int, size: int) -> set[str]:
    """Return the names of adjacent registers, for example R4 and R5 for the kind R, the first number 4 and size 2."""
    return {f"{kind}{number}" for number in range(first, first + size)}


def result_size(op: str) -> int:
    """Return the number of registers that the result of an instruction takes."""
    if "GMMA" in op:  # HGMMA.64x80x16: the 128 threads of a warp group compute 64 x 80 numbers
        return int(re.search(r"64x(\d+)x", op)[1]) // 2
    if "MMA." in op:  # HMMA.16816: the 32 threads of a warp compute 16 x 8 numbers
        return 4
    if repeated := re.match(r"LDTM.*\.x(\d+)|LDSM.*\.([24])$", op):
        return int(repeated[1] or repeated[2])
    if bits := re.search(r"\.(64|96|128|256)\b", op):
        return int(bits[1]) // 32
    return 2 if ".WIDE" in op or "64" in op or re.match(r"CS2R|D[A-Z]|F\w+2\b", op) else 1


def innermost_loop(code: list[tuple[int, str]]) -> range:
    """Return the addresses of the longest loop without an inner loop: from a backward jump's target to the jump."""
    loops = []
    for address, text in code:
        jump = re.search(r"BRA\S*\s.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append(range(int(jump[1], 16), address + 1))
    inner = [loop for loop in loops if not any(contains(loop, other) for other in loops)]
    return max(inner, key=len, default=range(0))


def contains(loop: range, other: range) -> bool:
    return other != loop and other[0] in loop and other[-1] in loop
