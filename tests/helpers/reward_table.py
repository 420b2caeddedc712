"""What earns 1 and what earns 0: answers in many spellings, and what a policy tries that does not know better.

{reward: {solution: (answers that earn 1, answers that earn 0)}}; an answer is what is between the tags.
"""

NUMBER = {
    "3": (
        [
            "3", "3.", "3.0", "03", "3.000", "+3", "= 3", "x = 3", "n=3", " 3\n", "three", "Three.", "THREE", "3 cats",
            "3 cm", "3cm", "The answer is 3", "the final answer: 3", "Answer: 3.", "about 3", "~3", "≈ 3", "6/2",
            "6 / 2", "12/4", "$3$", "$3$.", "\\(3\\)", "\\[3\\]", "\\boxed{3}", "$\\boxed{3}$", "**3**",
            "\\frac{6}{2}", "\\frac62", "\\dfrac{9}{3}", "3e0", "30e-1", "0.3x10^1", "0.3 × 10^{1}", "300%", "$3",
            "€3.00", "3\\text{ cm}", "3^\\circ", "3°", "3 km/h", "3 cm^2", "3 m²", "three apples", '"3"',
        ],
        [
            "", " ", ".", "4", "-3", "13", "31", "33", "3 3", "2.999999", "3.0000001", "0.3", "3/1/1", "not 3",
            "no, 3?", "3?", "3!", "3 or 4", "3 and 4", "3, 4", "3/4 or 3", "2 3", "1 2 3", "1, 2, 3, 4, 5, 6, 7, 8, 9",
            "2-4", "3-5", "3 to 5", "between 2 and 4", "3±1", "3 +/- 1", "<4", ">2", ">= 3", "at least 3", "3 or more",
            "3 more", "less than 3", "3x", "3 x", "x", "x3", "3 pi", "3 halves", "3 or", "３", "٣", "Ⅲ", "³", "III",
            "3" * 2000, "3" + "0" * 5000, "0" * 200 + "3", "1e400", "3e999999999", "1e-999999999", "9^9^9^9", "3/0",
            "0/0", "3/", "/3", "nan", "inf", "-inf", "Infinity", "None", "null", "{solution}", "solution",
            "the solution", "3 4 5 cats", "cat", "number", "<number>", "[0-9]", ".*", "\\d", "3\u200b", "3\x00",
            "3<answer>4", "<answer>3</answer> 4", "3</answer>", "3 dozen", "3 thousand", "3 hundred", "3 million",
            "30", "3,000", "3.1", "3..0", "3.0.0", "--3", "3 -", "threefour", "thirteen", "twenty three",
            "How many cats are there? 3 4", "Answer: the number",
        ],
    ),
    "0.5": (
        [
            "0.5", ".5", "0.50", "1/2", "\\frac12", "\\frac{1}{2}", "\\tfrac12", "50%", "50 %", "50 percent", "50\\%",
            "5e-1", "2/4",
        ],
        ["5", "0,5", "1:2", "half or 1/3", "50", "1/2/3", "50 or 5%", "5%", "-0.5", "0.05", "1/3", "0.499"],
    ),
    "50%": (
        ["50%", "50", "0.5", "1/2", "50 percent", "50.0 %"],
        ["5%", "500%", "5", "0.05", "2", "50%%", "50% or 40%", "%"],
    ),
    "1234.5": (
        ["1234.5", "1,234.5", "1,234.50", "$1,234.50", "1.2345e3", "1.2345 × 10^3", "2469/2"],
        ["12345", "1,2345", "12,34.5", "1 234.5", "1.234,5", "1,234", "1234", "1234.5.0", "1_234.5"],
    ),
    "-7": (
        ["-7", "−7", "- 7", "-7.0", "-14/2", "$-7$", "x = -7", "-7°C"],
        ["7", "--7", "+7", "7-", "(7)", "-7 or 7", "±7", "|7|"],
    ),
    "1 1/2": (["1 1/2", "1.5", "3/2", "\\frac{3}{2}", "150%"], ["1", "1/2", "11/2", "1 1", "2", "1 or 1/2"]),
    "5 cm": (
        [
            "5 cm", "5cm", "5", "5.0 cm", "50 mm", "0.05 m", "5 centimeters", "5 centimetres", "five cm",
            "0.05 meters",
        ],
        ["5 m", "5 km", "5 mm", "5 kg", "5 %", "50 cm", "5 inches", "0.5 m", "5 s", "5 cm or 6 cm"],
    ),
    "2 h": (
        ["2 h", "2 hours", "120 min", "120 minutes", "7200 s", "2hr", "7,200 seconds"],
        ["2 min", "2 m", "120 h", "2 s", "20 min"],
    ),
    "4000": (
        ["4000", "4,000", "4 thousand", "4e3", "4.0 × 10^3", "4 \\times 10^{3}", "4\\cdot10^3"],
        ["4", "4 million", "400", "4,00", "40,00", "4.000"],
    ),
    "12": (["12", "twelve", "one dozen", "1 dozen"], ["dozen", "12 dozen", "1 2", "two", "two dozen"]),
    "0": (
        ["0", "zero", "0.0", "-0", "0%", "0 cats", "0/5"],
        ["none", "no cats", "o", "O", "0/0", "0x3", "1", "nothing", "0 or 1"],
    ),
}  # fmt: skip

CHOICE = {
    "B": (
        [
            "B", "b", "B.", "(B)", "[B]", "B)", "(b)", "b.", "B:", " B ", "The answer is B", "The answer is (B).",
            "Answer: B", "the correct option is B.", "Option B", "option (B)", "Choice: B", "**B**", "\\boxed{B}",
            "$\\boxed{\\text{B}}$", "B. a dog", "B) two cats", "(B) The cat is on the mat.", "B: 3.5", "\\text{B}",
            "best answer: B",
        ],
        [
            "", "A", "C", "a", "AB", "BB", "B B", "A B", "B C", "A, B", "B, C", "B or C", "B and C", "A or B", "B/C",
            "A/B/C/D", "A. B. C. D.", "B. C. D. A.", "(A)(B)", "(B) (C)", "B. or C", "B) C) D)", "not B", "not A",
            "B?", "anything but A", "all of the above", "none", "Bob", "Because", "A. B", "B. dog C. cat",
            "b) dog c) cat", "The answer is A or B", "A dog", "2", "the second", "Ｂ", "β", "В", "{B}", "<B>", "(A) B",
            "ABCD", "[A-D]", ".", "B" * 5000, "(" * 5000,
        ],
    ),
    "(A)": (
        ["A", "(A)", "a.", "A. a dog", "(a) Vitamin k2"],
        ["a dog", "A dog", "an A", "I", "B", "A or I", "A. or B."],
    ),
    "C. the red one": (
        ["C", "(C)", "C. the red one", "c) the blue one"],
        ["the red one or C", "A. the red one", "red"],
    ),
}  # fmt: skip

YES_NO = {
    "yes": (
        [
            "yes", "Yes", "YES.", "Yes!", "yes, it is", "Yes. The cat is there.", "True", "true.", "The answer is yes",
            "Answer: Yes", "**Yes**", "\\boxed{yes}", "Yes, I know.",
        ],
        [
            "", "no", "No.", "false", "yes and no", "yes or no", "Yes/No", "yes no", "no yes", "not yes", "yesno", "y",
            "cannot", "I know", "maybe", "Yes, not", "yes?", "Yes, no", "Yes. No.", "yes, but not really", "eyes",
            "yesterday", "ｙｅｓ", "Yes, it isn't", "yes, never", "true or false", "true, false", "yes" * 2000, "1",
            "oui", "say yes",
        ],
    ),
    "No": (
        ["no", "No.", "NO", "no, it is not", "No, there is no cat.", "False", "The answer is no.", "no!"],
        [
            "yes", "not", "none", "nothing", "know", "now", "no yes", "no, yes", "No. True.", "no?", "not no", "nope",
            "cannot", "north",
        ],
    ),
    "True": (["true", "Yes", "yes."], ["false", "no", "truefalse", "untrue"]),
}  # fmt: skip

CLASSES = ["frilly", "dotted", "polka-dotted", "zig_zag", "square", "green square", "no entry", "t-shirt"]
CLASS = {
    "frilly": (
        [
            "frilly", "Frilly", "FRILLY.", " frilly ", "It is frilly.", "The texture is frilly", "frilly texture",
            "a frilly one", "frilly, very frilly", "**frilly**", "\\boxed{frilly}", "frilly!", "The answer is: frilly",
        ],
        [
            "", "dotted", "frilly or dotted", "frilly, dotted", "dotted and frilly", "not frilly", "it isn't frilly",
            "It is never frilly", "no frilly", "anything except frilly", "frill", "frillyness", "unfrilly",
            "f r i l l y", "neither frilly nor dotted", ", ".join(CLASSES), "frilly " * 5000, "ｆｒｉｌｌｙ", "frilIy",
            "class", "{solution}", "instead of dotted it is frilly dotted", "rather than frilly",
            "cannot be frilly... isn't", "the first class",
        ],
    ),
    "polka-dotted": (
        ["polka-dotted", "polka dotted", "Polka_Dotted", "It is polka-dotted."],
        ["dotted", "polka", "polka-dotted or dotted", "polka, dotted", "dotted polka"],
    ),
    "zig_zag": (["zig zag", "zig-zag", "zig_zag", "a ZIG-ZAG line"], ["zigzag", "zag zig", "zig", "zig zag dotted"]),
    "square": (["square", "a square", "red square"], ["green square", "squares", "square, green square", "squared"]),
    "green square": (
        ["green square", "the green square"],
        ["square", "green", "green triangle", "green square square"],
    ),
    "no entry": (["no entry", "No entry sign"], ["entry", "no", "no square", "not no entry"]),
}  # fmt: skip

MATH = {
    "1/2": (
        [
            "1/2", "0.5", "\\frac{1}{2}", "\\frac12", "$\\frac{1}{2}$", "\\boxed{\\frac{1}{2}}", "2^{-1}",
            "\\frac{2}{4}", ".5", "x = \\frac{1}{2}", "\\sin(\\pi/6)", "50\\%", "\\sqrt{\\frac14}", "0.50",
            "\\dfrac{1}{2}", "1-0.5",
        ],
        [
            "2", "1", "-1/2", "0.49", "\\frac{1}{3}", "1/2 or 1/3", "not 1/2", "0.5, 1", "\\{0.5, 1\\}", "(0.5, 1)",
            "[0, 1]", "?", "x", "half of it?", "0.5?", "", "\\frac{1}{0}", "9^9^9^9", "9**9**9**9", "100000!", "3!!",
            "((((" * 50, "1" * 5000, "\\frac{" * 40, "x \\neq 1/2", "0.5}\\boxed{7", "\\boxed{0.5}\\boxed{7}", "5",
            "either 1/2 or 2", "2^{99999}",
        ],
    ),
    "x^2+2x+1": (["x^2+2x+1", "(x+1)^2", "1+2x+x^2", "$(x+1)(x+1)$"], ["x^2", "(x-1)^2", "x^2+2x", "(y+1)^2", "x"]),
    "\\sqrt{2}": (
        ["\\sqrt{2}", "\\sqrt2", "2^{1/2}", "\\frac{2}{\\sqrt{2}}"],
        ["2", "1.41", "-\\sqrt{2}", "\\pm\\sqrt{2}", "\\sqrt{3}"],
    ),
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
    "3": ["3 3", "3/1/1", "not 3", "no, 3?", "3?", "3/4 or 3", "2 3", "1 2 3", "3±1", ">= 3", "at least 3",
        "3 or more", "3 more", "less than 3", "3x", "3 x", "3 pi", "3 halves", "3 or", "3e999999999", "3/",
        "3\u200b", "3\x00", "3<answer>4", "3</answer>", "3 dozen", "3 thousand", "3 hundred", "3 million",
        "3..0", "3.0.0", "3 -"],
    "0.5": ["0,5"],
    "50%": ["50%%"],
    "1234.5": ["1 234.5", "1234.5.0"],
    "1 1/2": ["1", "1 1"],
    "5 cm": ["5 m", "5 km", "5 mm", "5 kg", "5 %", "5 inches", "5 s"],
    "2 h": ["2 min", "2 m", "2 s"],
    "12": ["12 dozen"],
    "0": ["0x3"],
    "1/2": ["0.5?", "0.5}\\boxed{7"],
}  # fmt: skip
MISSED = {  # right ones that it reads in another way, or not as one number
    "3": ["30e-1", "0.3x10^1", "0.3 × 10^{1}"],
    "0.5": ["50\\%", "5e-1"],
    "1234.5": ["1.2345e3", "1.2345 × 10^3"],
    "-7": ["- 7"],
    "1 1/2": ["1.5", "3/2", "\\frac{3}{2}", "150%"],
    "5 cm": ["50 mm", "0.05 m", "0.05 meters"],
    "2 h": ["120 min", "120 minutes", "7200 s", "7,200 seconds"],
    "4000": ["4 thousand", "4e3", "4.0 × 10^3", "4 \\times 10^{3}", "4\\cdot10^3"],
    "12": ["1 dozen"],
}  # fmt: skip
