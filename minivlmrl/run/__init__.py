"""Carry out a training run: set it up, run the training loop, evaluate, log and save checkpoints.

The losses and rollouts of each stage are in trainers/.
"""
