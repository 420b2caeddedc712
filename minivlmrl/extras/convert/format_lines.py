"""Generate a Python function to convert rows, for the option data.format."""

from minivlmrl.extras.convert.layout import Layout, our_name


def format_lines(row: dict, layout: Layout, own: dict[str, str]) -> list[str]:
    """Return source lines for a function that converts a row, and appends columns such as `choices` to the question.

    Args:
        own: {minivlmrl's column: the file's column}, as given by --columns.
    """

    def cell(name: str) -> str:
        return f"row[{own.get(name, name)!r}]"

    names = [name for name in row if name != layout.picture]
    if not layout.question and len(names) < 2:
        return []
    question = layout.question or names[0]
    truth = layout.answer or names[-1]
    picture = ""
    if layout.picture:
        picture = f"{our_name(layout.picture, row.get(layout.picture))!r}: {cell(layout.picture)}, "
    lines = ["def read(row):"]
    if isinstance(row.get(question), list):
        return [*lines, f"    return {{{picture}'messages': {cell(question)}}}"]
    asked = cell(question)
    if layout.parts:
        lines.append(f"    parts = [f'{{name}}: {{row[name]}}' for name in {list(layout.parts)} if row.get(name)]")
        asked = f"'\\n'.join([{asked}, *parts])"
    return [*lines, f"    return {{{picture}'problem': {asked}, 'solution': {cell(truth)}}}"]
