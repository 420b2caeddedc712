"""Losses in public projects, compared with TRL's."""

from docs.scripts.field import other_projects, torch_projects

PROJECTS = torch_projects.PROJECTS | other_projects.PROJECTS
