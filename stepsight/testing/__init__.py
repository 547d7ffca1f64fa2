"""Contracts for parts of your own: subclass one, say where your part is, and run pytest.

==========================  ======================================