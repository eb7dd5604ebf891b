"""`dure run`: start a program on several ranks."""
