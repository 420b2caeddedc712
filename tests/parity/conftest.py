"""`pytest tests/parity` ends with a table: how our losses and options each agree with the installed TRL."""

from tests.parity.compare import Row, summary, table


def pytest_terminal_summary(terminalreporter):
    """Print the table, unless a larger run contained these tests."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [Row(**value) for report in reports for name, value in report.user_properties if name == "row of parity"]
    if rows and all("parity" in argument for argument in terminalreporter.config.args):
        terminalreporter.write_line("\nours against TRL, value and gradient: family, cells, verdict")
        terminalreporter.write_line("\n".join([*table(rows), summary(rows)]))
