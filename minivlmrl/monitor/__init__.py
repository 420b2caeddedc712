"""Monitor training runs without changing what they compute: run/callbacks.py loads these modules in every run.

| module | purpose |
|---|---|
| check/ | check recipe, rows and rewards before the first step; `minivlmrl check` |
| memory/ | try the largest batches before the first step, explain out-of-memory errors; `minivlmrl memory` |
| inputs.py | check in the first step that the loss depends on all images and texts |
| warnings.py | warn if a run does not learn |
| report.py | write report.html; `minivlmrl report` |

Recipes also run without the folder monitor/.
"""
