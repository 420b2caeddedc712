"""Rewards by name: texts, numbers, choices, boxes; and what asks and checks them."""
