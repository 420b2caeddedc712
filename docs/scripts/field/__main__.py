"""Compare a public project's losses with TRL's; docs/losses_of_the_field.md lists the results.

    python -m docs.scripts.field PROJECT FOLDER
    python -m docs.scripts.field PROJECT FOLDER --laws

FOLDER is a clone or unpacked wheel of the project. The script also checks laws that every correct loss obeys. --laws
checks only these, without TRL, and prints their notes.
"""

import argparse

from docs.scripts.field import PROJECTS
from docs.scripts.field.reading import examine_project, judge_project, section


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m docs.scripts.field", description="Check the losses of a public project.")
    p.add_argument("project", choices=PROJECTS)
    p.add_argument("folder", help="the project's folder: a clone, or a wheel that was unpacked or installed")
    p.add_argument("--laws", action="store_true", help="only check laws, and also print their notes")
    options = p.parse_args(arguments)
    project = PROJECTS[options.project]
    verdicts = None if options.laws else judge_project(project, options.folder)
    print(section(options.project, project, examine_project(project, options.folder), verdicts))


if __name__ == "__main__":
    main()
