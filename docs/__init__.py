"""Pages; scripts/ writes their numbers and pictures, exercises/ has the exercises."""
