"""Remote procedure calls between the processes of a job. There is no door to them yet.

What stands has no I/O of its own: who holds which remote reference (`references`), messages that
must arrive (`links`), what travels in a message (`message`), what others may call (`allow`), the
threads that run it (`workers`), and backward passes over several processes (`autograd`).
"""
