"""Export the functions that training calls if a recipe sets `sampling.environment`."""

from minivlmrl.extras.agents.environment import check_reward, with_tools
from minivlmrl.extras.agents.tool_calls import begin_with_row
from minivlmrl.extras.agents.trajectories import find_sampler, has_windows

__all__ = ["begin_with_row", "check_reward", "find_sampler", "has_windows", "with_tools"]
