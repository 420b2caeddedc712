"""What earns 1 and what earns 0: answers in many spellings, and what a policy tries that does not know better.

{reward: {solution: (answers that earn 1, answers that earn 0)}}; an answer is what is between the tags.
"""

NUMBER = {
    "3": (
        [
            "3", "3.", "3.0", "+3", "= 3", "n=3", " 3\n", "three", "3 cats", "3 cm", "The answer is 3", "about 3",
            "≈ 3", "6/2", "$3$", "\\[3\\]", "\\boxed{3}", "$\\boxed{3}$", "**3**", "\\frac{6}{2}", "\\frac62", "3e0",
            "30e-1", "0.3 × 10^{1}", "300%", "$3", "3\\text{ cm}", "3^\\circ", "3 km/h", "3 cm^2", "three apples",
            '"3"',
        ],
        [
            "", " ", ".", "-3", "33", "3 3", "3.0000001", "3/1/1", "not 3", "no, 3?", "3?", "3!", "3 or 4", "3, 4",
            "between 2 and 4", "3±1", "<4", "at least 3", "less than 3", "3x", "3 halves", "3 or", "３", "III",
            "3" * 2000, "3" + "0" * 5000, "0" * 200 + "3", "1e-999999999", "9^9^9^9", "3/0", "nan", "None",
            "{solution}", ".*", "3\u200b", "3\x00", "3<answer>4", "<answer>3</answer> 4", "3</answer>", "3 dozen",
            "3 thousand", "3,000", "3..0", "threefour",
        ],
    ),
    "0.5": (
        ["0.5", ".5", "1/2", "\\frac12", "\\frac{1}{2}", "50%", "50 %", "50\\%", "5e-1"],
        ["5", "0,5", "half or 1/3", "50", "1/2/3", "-0.5", "0.499"],
    ),
    "50%": (["50%", "50", "0.5", "1/2"], ["5%", "500%", "50%%", "50% or 40%", "%"]),
    "1234.5": (
        ["1,234.5", "1,234.50", "$1,234.50", "1.2345e3", "1.2345 × 10^3"],
        ["1,2345", "1 234.5", "1.234,5", "1234.5.0", "1_234.5"],
    ),
    "-7": (["-7", "−7", "- 7", "-14/2", "-7°C"], ["7", "--7", "(7)", "-7 or 7", "|7|"]),
    "1 1/2": (["1 1/2", "1.5", "3/2", "\\frac{3}{2}", "150%"], ["1/2", "11/2", "1 1", "1 or 1/2"]),
    "5 cm": (
        ["5 cm", "5", "50 mm", "0.05 m", "5 centimeters", "five cm"],
        ["5 m", "5 kg", "50 cm", "5 inches", "5 s", "5 cm or 6 cm"],
    ),
    "2 h": (["2 h", "120 min", "7200 s", "7,200 seconds"], ["2 min", "120 h", "2 s"]),
    "4000": (["4000", "4,000", "4 thousand", "4e3", "4 \\times 10^{3}"], ["4 million", "4,00", "4.000"]),
    "12": (["12", "twelve", "one dozen", "1 dozen"], ["dozen", "12 dozen", "1 2", "two", "two dozen"]),
    "0": (["0", "zero", "-0", "0/5"], ["none", "no cats", "0/0", "0x3", "0 or 1"]),
}  # fmt: skip

CHOICE = {
    "B": (
        [
            "B", "B.", "(B)", "The answer is B", "The answer is (B).", "the correct option is B.", "option (B)",
            "**B**", "\\boxed{B}", "$\\boxed{\\text{B}}$", "B) two cats", "B: 3.5", "\\text{B}", "best answer: B",
        ],
        [
            "", "A", "AB", "BB", "B C", "A, B", "B or C", "B/C", "A. B. C. D.", "(A)(B)", "B. or C", "not B", "B?",
            "anything but A", "all of the above", "Because", "A. B", "B. dog C. cat", "The answer is A or B", "2",
            "Ｂ", "В", "ABCD", "B" * 5000, "(" * 5000,
        ],
    ),
    "(A)": (["A", "(A)", "A. a dog", "(a) Vitamin k2"], ["a dog", "A dog", "I", "A or I"]),
    "C. the red one": (["C", "C. the red one", "c) the blue one"], ["the red one or C", "A. the red one"]),
}  # fmt: skip

YES_NO = {
    "yes": (
        [
            "yes", "Yes", "Yes!", "yes, it is", "True", "The answer is yes", "Answer: Yes", "**Yes**", "\\boxed{yes}",
            "Yes, I know.",
        ],
        [
            "", "no", "false", "yes and no", "Yes/No", "no yes", "yesno", "cannot", "maybe", "yes?", "Yes, no",
            "yes, but not really", "eyes", "ｙｅｓ", "Yes, it isn't", "yes, never", "true or false", "yes" * 2000,
        ],
    ),
    "No": (
        ["No.", "no, it is not", "No, there is no cat.", "False", "The answer is no."],
        ["yes", "not", "no, yes", "No. True.", "no?", "not no", "nope"],
    ),
    "True": (["true", "Yes", "yes."], ["false", "no", "truefalse", "untrue"]),
}  # fmt: skip

CLASSES = ["frilly", "dotted", "polka-dotted", "zig_zag", "square", "green square", "no entry", "t-shirt"]
CLASS = {
    "frilly": (
        [
            "frilly", "FRILLY.", "It is frilly.", "a frilly one", "frilly, very frilly", "**frilly**",
            "\\boxed{frilly}", "The answer is: frilly",
        ],
        [
            "", "dotted", "frilly or dotted", "dotted and frilly", "not frilly", "anything except frilly",
            "frillyness", "f r i l l y", "neither frilly nor dotted", ", ".join(CLASSES), "frilly " * 5000,
            "ｆｒｉｌｌｙ", "frilIy", "instead of dotted it is frilly dotted", "rather than frilly",
            "cannot be frilly... isn't",
        ],
    ),
    "polka-dotted": (
        ["polka-dotted", "polka dotted", "Polka_Dotted", "It is polka-dotted."],
        ["dotted", "polka", "polka-dotted or dotted", "polka, dotted", "dotted polka"],
    ),
    "zig_zag": (["zig zag", "zig-zag", "zig_zag", "a ZIG-ZAG line"], ["zigzag", "zag zig", "zig", "zig zag dotted"]),
    "square": (["square", "red square"], ["green square", "squares", "square, green square"]),
    "green square": (
        ["green square", "the green square"],
        ["square", "green", "green triangle", "green square square"],
    ),
    "no entry": (["no entry", "No entry sign"], ["no square", "not no entry"]),
}  # fmt: skip

MATH = {
    "1/2": (
        [
            "1/2", "\\frac{1}{2}", "\\frac12", "$\\frac{1}{2}$", "\\boxed{\\frac{1}{2}}", "2^{-1}",
            "x = \\frac{1}{2}", "\\sin(\\pi/6)", "50\\%", "\\sqrt{\\frac14}", "1-0.5",
        ],
        [
            "-1/2", "\\frac{1}{3}", "1/2 or 1/3", "not 1/2", "\\{0.5, 1\\}", "(0.5, 1)", "half of it?", "",
            "\\frac{1}{0}", "9^9^9^9", "100000!", "((((" * 50, "1" * 5000, "\\frac{" * 40, "x \\neq 1/2",
            "0.5}\\boxed{7", "\\boxed{0.5}\\boxed{7}", "2^{99999}",
        ],
    ),
    "x^2+2x+1": (["x^2+2x+1", "(x+1)^2", "1+2x+x^2", "$(x+1)(x+1)$"], ["(x-1)^2", "(y+1)^2"]),
    "\\sqrt{2}": (["\\sqrt{2}", "\\sqrt2", "2^{1/2}", "\\frac{2}{\\sqrt{2}}"], ["1.41", "-\\sqrt{2}", "\\pm\\sqrt{2}"]),
    "\\{1, 2\\}": (["\\{1, 2\\}", "\\{2,1\\}"], ["1", "2", "\\{1\\}", "\\{1,2,3\\}"]),
    "[0, 1)": (["[0,1)", "[0, 1)"], ["(0,1)", "[0,1]", "(0,1]", "[0,2)", "1"]),
}  # fmt: skip

TABLE = {"number": NUMBER, "choice": CHOICE, "yes_no": YES_NO, f"class(classes={CLASSES!r})": CLASS, "math": MATH}
ROWS = [
    (reward, solution, answer, earned)
    for reward, solutions in TABLE.items()
    for solution, columns in solutions.items()
    for earned, answers in zip((1.0, 0.0), columns, strict=True)
    for answer in answers
]

# where math-verify, given solution and answer as they are, says something else about a row of `number` or `math`
TAKEN = {  # it finds the number in an answer that says something else
    "3": [
        "3 3", "3/1/1", "not 3", "no, 3?", "3?", "3±1", "at least 3", "less than 3", "3x", "3 halves", "3 or",
        "3\u200b", "3\x00", "3<answer>4", "3</answer>", "3 dozen", "3 thousand", "3..0",
    ],
    "0.5": ["0,5"],
    "50%": ["50%%"],
    "1234.5": ["1 234.5", "1234.5.0"],
    "1 1/2": ["1 1"],
    "5 cm": ["5 m", "5 kg", "5 inches", "5 s"],
    "2 h": ["2 min", "2 s"],
    "12": ["12 dozen"],
    "0": ["0x3"],
    "1/2": ["0.5}\\boxed{7"],
}  # fmt: skip
MISSED = {  # right ones that it reads in another way, or not as one number
    "3": ["30e-1", "0.3 × 10^{1}"],
    "0.5": ["50\\%", "5e-1"],
    "1234.5": ["1.2345e3", "1.2345 × 10^3"],
    "-7": ["- 7"],
    "1 1/2": ["1.5", "3/2", "\\frac{3}{2}", "150%"],
    "5 cm": ["50 mm", "0.05 m"],
    "2 h": ["120 min", "7200 s", "7,200 seconds"],
    "4000": ["4 thousand", "4e3", "4 \\times 10^{3}"],
    "12": ["1 dozen"],
}  # fmt: skip
