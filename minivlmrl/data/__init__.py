"""Rows in other forms, images and videos from anywhere, folders' own templates."""
