"""Carry out a training run: set it up, run the training loop, evaluate, log and save checkpoints.

Each training stage's losses and rollouts are in trainers/.
"""
