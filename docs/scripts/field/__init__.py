"""The losses of public projects, compared with those of TRL."""

from docs.scripts.field import other_projects, torch_projects

PROJECTS = torch_projects.PROJECTS | other_projects.PROJECTS
