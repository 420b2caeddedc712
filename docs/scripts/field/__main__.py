"""Compare the losses of a public project with losses of TRL; docs/losses_of_the_field.md has the results.

    python -m docs.scripts.field PROJECT FOLDER

FOLDER is a clone of the project, or its unpacked wheel.
"""

import argparse

from docs.scripts.field import PROJECTS
from docs.scripts.field.reading import judge_project, section


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m docs.scripts.field", description="Check the losses of a public project.")
    p.add_argument("project", choices=PROJECTS)
    p.add_argument("folder", help="the project's folder: a clone, or a wheel that was unpacked or installed")
    p.add_argument("--seconds", type=float, default=10.0, help="time limit for each loss (default: 10)")
    options = p.parse_args(arguments)
    project = PROJECTS[options.project]
    print(section(options.project, project, judge_project(project, options.folder, options.seconds)))


if __name__ == "__main__":
    main()
