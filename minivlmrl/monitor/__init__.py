"""Monitor runs without changing them: run/callbacks.py loads these modules in every run.

| module | purpose |
|---|---|
| check/ | check recipe, rows and rewards before the first step; `minivlmrl check` |
| memory/ | try the largest batches, explain memory that runs out; `minivlmrl memory` |
| inputs.py | check in the first step that the loss depends on all images and texts |
| warnings.py | warn if a run does not learn |
| report.py | write report.html; `minivlmrl report` |

Recipes also run without this folder.
"""
