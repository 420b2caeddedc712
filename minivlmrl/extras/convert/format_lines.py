"""Write a function for data.format that fits the columns of a file."""

from minivlmrl.extras.convert.layout import CHOICE, CHOICES, Layout, our_name


def format_lines(row: dict, layout: Layout, own: dict[str, str]) -> list[str]:
    """Return the lines of a function; it shows choices in the question, and answers with the letter of a choice.

    Args:
        own: {our name: column of the file}, as the user named them.
    """
    names = [name for name in row if name != layout.picture]
    if not layout.question and len(names) < 2:
        return []
    question = layout.question or names[0]
    truth = layout.answer or names[-1]
    picture = ""
    if layout.picture:
        picture = (
            f"{our_name(layout.picture, row.get(layout.picture))!r}: row[{own.get(layout.picture, layout.picture)!r}], "
        )
    if isinstance(row.get(question), list):
        return ["def read(row):", f"    return {{{picture}'messages': row[{own.get(question, question)!r}]}}"]
    cells = [name for name in layout.parts if CHOICE.fullmatch(name)]
    lists = [name for name in layout.parts if CHOICES.fullmatch(name) and isinstance(row.get(name), list | dict)]
    shown = [f"str(row.get({name!r}) or '')" for name in layout.parts if name not in (*cells, *lists)]
    shown.append(f"row[{own.get(question, question)!r}]")
    answer = f"row[{own.get(truth, truth)!r}]"
    lines = ["def read(row):"]
    if cells or lists:
        choices = [row.get(name) for name in cells]
        source = f"[row[name] for name in {cells} if row.get(name)]"
        if lists:
            is_dict = isinstance(row[lists[0]], dict)
            choices = [*row[lists[0]].values()] if is_dict else row[lists[0]]
            source = f"[*(row.get({lists[0]!r}) or {{}}){'.values()' if is_dict else ''}]"
        lines = ["from string import ascii_uppercase as letters", "", *lines, f"    choices = {source}"]
        shown += ["*(f'{letter}. {choice}' for letter, choice in zip(letters, choices))"]
        value = row.get(truth)
        if value in choices:
            answer = f"letters[choices.index({answer})] if {answer} in choices else {answer}"
        elif str(value).isdecimal():
            answer = f"letters[int({answer})]"
            lines.append("    # the first choice has the number 0")
    lines.append(f"    question = '\\n'.join([{', '.join(shown)}])")
    lines.append(f"    return {{{picture}'problem': question, 'solution': {answer}}}")
    return lines
