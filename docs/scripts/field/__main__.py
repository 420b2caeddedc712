"""Compare the losses of a public project with losses of TRL; docs/losses_of_the_field.md has the results.

    python -m docs.scripts.field PROJECT FOLDER
    python -m docs.scripts.field PROJECT FOLDER --laws

FOLDER is a clone of the project, or its unpacked wheel. With --laws, the losses are not compared with those of TRL, but
checked by laws that every right loss obeys.
"""

import argparse

from docs.scripts.field import PROJECTS
from docs.scripts.field.reading import examine_project, judge_project, section


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m docs.scripts.field", description="Check the losses of a public project.")
    p.add_argument("project", choices=PROJECTS)
    p.add_argument("folder", help="the project's folder: a clone, or a wheel that was unpacked or installed")
    p.add_argument("--seconds", type=float, default=10.0, help="time limit for each loss (default: 10)")
    p.add_argument("--laws", action="store_true", help="check the losses by laws, without TRL's numbers")
    options = p.parse_args(arguments)
    project = PROJECTS[options.project]
    if options.laws:
        results = examine_project(project, options.folder)
    else:
        results = judge_project(project, options.folder, options.seconds)
    print(section(options.project, project, results))


if __name__ == "__main__":
    main()
